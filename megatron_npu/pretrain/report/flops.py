"""Floating-point operations of one training step, for the throughput in the log."""

from __future__ import annotations

from argparse import Namespace

from megatron_npu.pretrain.flags.derive import expert_layers


def of_step(args: Namespace) -> float:
    """Return the operations of one global batch: matrix products only, without those that the mask hides.

    A product of [m, k] and [k, n] takes 2mnk operations, and training needs three: forward, the input's
    gradient and the weight's gradient. With hidden size h, q the total size of the query heads, g that of the
    keys (and of the values), f the feed-forward size, s the sequence length, V the padded vocabulary and L
    layers, a token costs ::

        6 · (L · (h(q + 2g) + qh + m·hf + q·s) + hV),    m = 3 with SwiGLU, else 2

    where q·s are scores and weighted values, 2·q·s, of which a causal mask needs half. In a layer with
    experts, f is the total size used per token, including the shared expert; the router is not counted. This
    is the same count as Megatron's ``num_floating_point_operations`` (compare arXiv:2104.04473, equation 3).
    Multi-latent attention has its own products; multi-token prediction adds, per further token, a layer like
    the last one, a projection from 2h to h, and logits. Recomputed activations are not counted; a window
    (``--pre-tockens``) is not subtracted.
    """
    hidden, further = args.hidden_size, args.mtp_num_layers or 0
    matrices = 3 if args.swiglu else 2
    kinds = expert_layers(args)
    inner = sum(
        _of_experts(args) if experts else args.ffn_hidden_size for experts in kinds + further * kinds[-1:]
    )
    layers = (args.num_layers + further) * _of_attention(args) + matrices * hidden * inner
    token = 6 * (layers + further * 2 * hidden**2 + (1 + further) * hidden * args.padded_vocab_size)
    return float(token) * args.seq_length * args.global_batch_size


def _of_attention(args: Namespace) -> float:
    """Return the products of a token in the attention of one layer."""
    hidden, heads = args.hidden_size, args.num_attention_heads
    if not args.multi_latent_attention:
        queries, groups = args.kv_channels * heads, args.kv_channels * args.num_query_groups
        return hidden * (queries + 2 * groups) + queries * hidden + queries * args.seq_length
    rotated, rank = args.qk_pos_emb_head_dim, args.kv_lora_rank
    queries, values = (args.qk_head_dim + rotated) * heads, args.v_head_dim * heads
    asking = args.q_lora_rank * (hidden + queries) if args.q_lora_rank else hidden * queries
    known = hidden * (rank + rotated) + rank * (args.qk_head_dim * heads + values)
    return asking + known + values * hidden + (queries + values) * args.seq_length / 2


def _of_experts(args: Namespace) -> int:
    """Return the inner sizes of all experts of a token together."""
    return args.moe_router_topk * args.moe_ffn_hidden_size + (args.moe_shared_expert_intermediate_size or 0)
