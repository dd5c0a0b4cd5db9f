"""Compute the number of floating-point operations in a training step, for the throughput in the log."""

from __future__ import annotations

from megatron_npu.pretrain.flags.plan_parts import ModelSizes


def of_step(sizes: ModelSizes) -> float:
    """Return the number of floating-point operations for one global batch, counting only matmuls.

    Operations that the causal mask hides are not counted.

    A matmul of [m, k] and [k, n] takes 2mnk operations, and training requires three matmuls: the forward
    pass, the input's gradient and the weight's gradient. With hidden size h, q the total size of the query
    heads, g that of the keys (and of the values), f the feed-forward size, s the sequence length, V the
    padded vocabulary and L layers, a token costs ::

        6 · (L · (h(q + 2g) + qh + m·hf + q·s) + hV),    m = 3 with SwiGLU, otherwise 2

    where q·s is half of 2·q·s, the cost of scores and weighted values, because a causal mask requires only
    half of them. In a layer with experts, f is the total size used per token, including the shared expert;
    the router is not counted. This is the same count as Megatron's ``num_floating_point_operations`` (compare
    arXiv:2104.04473, equation 3). Multi-latent attention has its own matmuls; multi-token prediction adds,
    per additional token, a layer like the last one, a projection from 2h to h, and logits. Recomputed
    activations are not counted; a window (``--pre-tockens``) is not subtracted.
    """
    hidden, further = sizes.hidden_size, sizes.mtp_num_layers or 0
    matrices = 3 if sizes.swiglu else 2
    kinds = [*sizes.expert_layers]
    inner = sum(
        _of_experts(sizes) if experts else sizes.ffn_hidden_size for experts in kinds + further * kinds[-1:]
    )
    layers = (sizes.num_layers + further) * _of_attention(sizes) + matrices * hidden * inner
    token = 6 * (layers + further * 2 * hidden**2 + (1 + further) * hidden * sizes.padded_vocab_size)
    return float(token) * sizes.seq_length * sizes.global_batch_size


def _of_attention(sizes: ModelSizes) -> float:
    """Return the number of multiplications per token in the matmuls of one attention layer."""
    hidden, heads = sizes.hidden_size, sizes.num_attention_heads
    if not sizes.multi_latent_attention:
        queries, groups = sizes.kv_channels * heads, sizes.kv_channels * sizes.num_query_groups
        return hidden * (queries + 2 * groups) + queries * hidden + queries * sizes.seq_length
    rotated, rank = sizes.qk_pos_emb_head_dim, sizes.kv_lora_rank
    queries, values = (sizes.qk_head_dim + rotated) * heads, sizes.v_head_dim * heads
    asking = sizes.q_lora_rank * (hidden + queries) if sizes.q_lora_rank else hidden * queries
    known = hidden * (rank + rotated) + rank * (sizes.qk_head_dim * heads + values)
    return asking + known + values * hidden + (queries + values) * sizes.seq_length / 2


def _of_experts(sizes: ModelSizes) -> int:
    """Return the sum of the hidden sizes of all experts that process a token."""
    shared = sizes.moe_shared_expert_intermediate_size or 0
    return sizes.moe_router_topk * (sizes.moe_ffn_hidden_size or 0) + shared
