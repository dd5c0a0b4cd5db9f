"""Floating-point operations of one training step, for the throughput in the log."""

from __future__ import annotations

from argparse import Namespace

from megatron_npu.training.derive import expert_layers


def of_step(args: Namespace) -> float:
    """Return the operations of one global batch: matrix products only, those of the mask left out.

    A product of [m, k] and [k, n] takes 2mnk operations, and training needs three for each: forward, the
    gradient of the input and that of the weight. With h the hidden size, q the heads' total size, g that of
    keys (and of values), f the feed-forward size, s the sequence, V the padded vocabulary and L layers, a
    token costs ::

        6 · (L · (h(q + 2g) + qh + m·hf + q·s) + hV),    m = 3 with SwiGLU, else 2

    where q·s is scores and weighted values, 2·q·s, of which a causal mask needs half. In a layer with
    experts f is the size of all that a token takes, the shared one included; the router does not count. The
    same count as Megatron's ``num_floating_point_operations`` (compare arXiv:2104.04473, equation 3).
    Recomputed activations do not count as work; a window (``--pre-tockens``) is not taken off.
    """
    hidden = args.hidden_size
    queries = args.kv_channels * args.num_attention_heads
    groups = args.kv_channels * args.num_query_groups
    matrices = 3 if args.swiglu else 2
    attention = hidden * (queries + 2 * groups) + queries * hidden + queries * args.seq_length
    inner = sum(_of_experts(args) if experts else args.ffn_hidden_size for experts in expert_layers(args))
    layers = args.num_layers * attention + matrices * hidden * inner
    token = 6 * (layers + hidden * args.padded_vocab_size)
    return float(token) * args.seq_length * args.global_batch_size


def _of_experts(args: Namespace) -> int:
    """Return the inner sizes of all experts of a token together."""
    return args.moe_router_topk * args.moe_ffn_hidden_size + (args.moe_shared_expert_intermediate_size or 0)
