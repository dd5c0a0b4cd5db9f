"""Define reference kernels that sort tokens by expert, restore their order, and select experts.

``sorted_indices[i * topk + k]`` is the row of the sorted tokens that contains the k-th copy of token i. -1 or
a row beyond the sorted tokens means that the copy was dropped.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from megatron_npu.sim.kernels.registry import kernel


@kernel("npu_moe_token_permute")
def npu_moe_token_permute(
    tokens: Tensor, indices: Tensor, num_out_tokens: int | None = None, padded_mode: bool = False
) -> tuple[Tensor, Tensor]:
    """Copy each token ``[t, h]`` once for each of its experts in ``indices`` ``[t, topk]``, and sort the
    copies by expert.

    ``num_out_tokens`` limits the number of rows like a slice: 0 keeps all, -n drops the last n.
    """
    order, positions = _sort(indices.flatten())
    copies = max(1, indices.numel() // max(1, tokens.size(0)))
    rows = order // copies
    kept = rows[: num_out_tokens or len(rows)]
    return tokens[kept].contiguous(), positions


@kernel("npu_moe_token_permute_grad_v2")
def npu_moe_token_permute_grad_v2(
    grad_permuted_tokens: Tensor,
    sorted_indices: Tensor,
    tokens_size_0: int,
    tokens_dtype: torch.dtype,
    num_topK: int,  # noqa: N803  the schema's name
    padded_mode: bool = False,
) -> Tensor:
    """Return the gradient of the tokens, ``[t, h]``, which is the sum over their copies."""
    copies = _copies(grad_permuted_tokens, sorted_indices, tokens_size_0, num_topK)
    return copies.sum(1).to(tokens_dtype)


@kernel("npu_moe_token_permute_grad")
def npu_moe_token_permute_grad(
    tokens: Tensor,
    grad_permuted_tokens: Tensor,
    indices: Tensor,
    sorted_indices: Tensor,
    padded_mode: bool = False,
) -> Tensor:
    """Return the gradient of the tokens, with the signature of older torch_npu versions."""
    copies = 1 if indices.dim() == 1 else indices.size(1)
    return npu_moe_token_permute_grad_v2(
        grad_permuted_tokens, sorted_indices, tokens.size(0), tokens.dtype, copies
    )


@kernel("npu_moe_token_unpermute")
def npu_moe_token_unpermute(
    permuted_tokens: Tensor,
    sorted_indices: Tensor,
    probs: Tensor | None = None,
    padded_mode: bool = False,
    restore_shape: Sequence[int] | None = None,
) -> Tensor:
    """Return the sum of the copies of each token, ``[t, h]``, weighted by ``probs`` ``[t, topk]`` if they
    are given.
    """
    shape = (len(sorted_indices), 1) if probs is None else probs.shape
    copies = _copies(permuted_tokens, sorted_indices, *shape)
    if probs is not None:
        copies = copies * probs.float().unsqueeze(-1)
    return copies.sum(1).to(permuted_tokens.dtype)


@kernel("_npu_moe_token_unpermute")
def npu_private_moe_token_unpermute(
    permuted_tokens: Tensor,
    sorted_indices: Tensor,
    probs: Tensor | None = None,
    padded_mode: bool = False,
    restore_shape: Sequence[int] | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the unpermuted tokens, and the input that the backward pass needs if probabilities are given."""
    needed = permuted_tokens.clone() if probs is not None else permuted_tokens.new_empty(0)
    return npu_moe_token_unpermute(permuted_tokens, sorted_indices, probs), needed


@kernel("npu_moe_token_unpermute_grad_v2")
def npu_moe_token_unpermute_grad_v2(
    grad_unpermuted_tokens: Tensor,
    sorted_indices: Tensor,
    permuted_tokens_size_0: int,
    permuted_tokens_dtype: torch.dtype,
    probs: Tensor | None = None,
    padded_mode: bool = False,
    restore_shape: Sequence[int] | None = None,
    permuted_tokens: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the gradients of the sorted tokens and of ``probs``.

    The latter is empty without ``probs``.
    """
    copies = 1 if probs is None else probs.size(1)
    grad = grad_unpermuted_tokens.float()
    spread = grad.repeat_interleave(copies, 0)
    if probs is not None:
        spread = spread * probs.float().reshape(-1, 1)
    grad_tokens = _scatter(spread, sorted_indices, permuted_tokens_size_0).to(permuted_tokens_dtype)
    if probs is None:
        return grad_tokens, grad_unpermuted_tokens.new_empty(0)
    assert permuted_tokens is not None  # the forward keeps it when there are probabilities
    gathered = _copies(permuted_tokens, sorted_indices, *probs.shape)
    return grad_tokens, (gathered * grad.unsqueeze(1)).sum(-1).to(probs.dtype)


@kernel("npu_moe_token_unpermute_grad")
def npu_moe_token_unpermute_grad(
    permuted_tokens: Tensor,
    grad_unpermuted_tokens: Tensor,
    sorted_indices: Tensor,
    probs: Tensor | None = None,
    padded_mode: bool = False,
    restore_shape: Sequence[int] | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the gradients of the sorted tokens and of ``probs``, with the signature of older torch_npu
    versions.
    """
    return npu_moe_token_unpermute_grad_v2(
        grad_unpermuted_tokens,
        sorted_indices,
        permuted_tokens.size(0),
        permuted_tokens.dtype,
        probs,
        permuted_tokens=permuted_tokens,
    )


@kernel("npu_moe_token_permute_with_routing_map")
def npu_moe_token_permute_with_routing_map(
    tokens: Tensor,
    routing_map: Tensor,
    *,
    probs: Tensor | None = None,
    num_out_tokens: int | None = None,
    drop_and_pad: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the tokens sorted by expert, their probabilities (or an empty tensor), and ``sorted_indices``.

    ``routing_map`` and ``probs`` are ``[t, experts]``; each row of the map has the same number of ones.
    """
    token, expert = routing_map.bool().nonzero(as_tuple=True)
    order, positions = _sort(expert)
    sorted_probs = tokens.new_empty(0) if probs is None else probs[token, expert][order]
    return tokens[token[order]], sorted_probs, positions


@kernel("npu_moe_token_permute_with_routing_map_grad")
def npu_moe_token_permute_with_routing_map_grad(
    permuted_token_out_grad: Tensor,
    probs_grad: Tensor | None,
    sorted_indices: Tensor,
    routing_map: Tensor,
    experts_num: int,
    tokens_num: int,
    drop_and_pad: bool,
) -> tuple[Tensor, Tensor | None]:
    """Return the gradients of the tokens and of ``probs`` ``[t, experts]``.

    Without ``probs_grad``, that is, if the sorted probabilities are not used, the second gradient is
    undefined, as in op-plugin; autograd treats it as zeros.
    """
    copies = _copies(permuted_token_out_grad, sorted_indices, tokens_num)
    grad_tokens = copies.sum(1).to(permuted_token_out_grad.dtype)
    if probs_grad is None or not probs_grad.numel():
        return grad_tokens, None
    grad_probs = probs_grad.new_zeros(tokens_num, experts_num)
    grad_probs[routing_map.bool()] = probs_grad[sorted_indices.long()]
    return grad_tokens, grad_probs


@kernel("npu_moe_token_unpermute_with_routing_map")
def npu_moe_token_unpermute_with_routing_map(
    permuted_tokens: Tensor,
    sorted_indices: Tensor,
    restore_shape: Sequence[int],
    *,
    probs: Tensor | None = None,
    routing_map: Tensor | None = None,
    drop_and_pad: bool = False,
) -> Tensor:
    """Return the sum of each token's copies, ``[t, h]``, weighted by probabilities if these are given."""
    copies = _copies(permuted_tokens, sorted_indices, restore_shape[0])
    if probs is not None:
        assert routing_map is not None  # by the limits
        copies = copies * probs[routing_map.bool()].float().view(*copies.shape[:2], 1)
    return copies.sum(1).to(permuted_tokens.dtype)


@kernel("_npu_moe_token_unpermute_with_routing_map")
def npu_private_moe_token_unpermute_with_routing_map(
    permuted_tokens: Tensor,
    sorted_indices: Tensor,
    restore_shape: Sequence[int],
    *,
    probs: Tensor | None = None,
    routing_map: Tensor | None = None,
    drop_and_pad: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the result, two copies of ``sorted_indices``, and the sorted probabilities (or an empty tensor).

    The backward pass in this mode reads ``sorted_indices`` itself; of the other outputs, only the shape is
    correct.
    """
    result = npu_moe_token_unpermute_with_routing_map(
        permuted_tokens, sorted_indices, restore_shape, probs=probs, routing_map=routing_map
    )
    sorted_probs = permuted_tokens.new_empty(0)
    if probs is not None:
        assert routing_map is not None  # by the limits
        values = probs[routing_map.bool()].float().unsqueeze(1)
        sorted_probs = _scatter(values, sorted_indices, len(sorted_indices)).squeeze(1).to(probs.dtype)
    return result, sorted_indices.clone(), sorted_indices.clone(), sorted_probs


@kernel("npu_moe_token_unpermute_with_routing_map_grad")
def npu_moe_token_unpermute_with_routing_map_grad(
    unpermuted_tokens_grad: Tensor,
    out_index: Tensor,
    permuted_token_id: Tensor,
    routing_map: Tensor | None,
    permuted_tokens: Tensor | None,
    probs: Tensor | None,
    drop_and_pad: bool,
    restore_shape: Sequence[int],
) -> tuple[Tensor, Tensor]:
    """Return the gradients of the sorted tokens and of ``probs``.

    The latter is empty without ``probs``.
    """
    tokens = restore_shape[0]
    grad = unpermuted_tokens_grad.float()
    copies = len(out_index) // max(1, tokens)
    spread = grad.repeat_interleave(copies, 0)
    if probs is None:
        empty = unpermuted_tokens_grad.new_empty(0)
        return _scatter(spread, out_index, len(out_index)).to(unpermuted_tokens_grad.dtype), empty
    assert routing_map is not None  # by the limits
    assert permuted_tokens is not None
    chosen = routing_map.bool()
    grad_tokens = _scatter(spread * probs[chosen].float().unsqueeze(1), out_index, len(out_index))
    grad_probs = torch.zeros_like(probs)
    grad_probs[chosen] = (_gather(permuted_tokens, out_index) * spread).sum(-1).to(probs.dtype)
    return grad_tokens.to(unpermuted_tokens_grad.dtype), grad_probs


def _sort(experts: Tensor) -> tuple[Tensor, Tensor]:
    """Return the indices that sort token copies stably by expert, and each copy's int32 row in the sorted
    order.
    """
    order = experts.argsort(stable=True)
    positions = torch.empty_like(order)
    positions[order] = torch.arange(len(order))
    return order, positions.int()


def _gather(rows: Tensor, positions: Tensor) -> Tensor:
    """Return ``rows[positions]`` in fp32, with zeros for positions out of range."""
    positions = positions.long()
    valid = (positions >= 0) & (positions < rows.size(0))
    gathered = torch.zeros(len(positions), rows.size(1), dtype=torch.float32)
    gathered[valid] = rows[positions[valid]].float()
    return gathered


def _copies(rows: Tensor, positions: Tensor, tokens: int, topk: int | None = None) -> Tensor:
    """Return the copies of each token as fp32 ``[tokens, topk, h]``.

    If ``topk`` is None, it is inferred.
    """
    each = len(positions) // max(1, tokens) if topk is None else topk
    return _gather(rows, positions).view(tokens, each, rows.size(1))


def _scatter(values: Tensor, positions: Tensor, count: int) -> Tensor:
    """Return a tensor ``[count, h]`` with ``values`` at ``positions``, which is the inverse of
    ``_gather``.
    """
    positions = positions.long()
    valid = (positions >= 0) & (positions < count)
    rows = torch.zeros(count, values.size(1), dtype=torch.float32)
    rows[positions[valid]] = values[valid]
    return rows


# --- the router ---


@kernel("npu_moe_gating_top_k")
def npu_moe_gating_top_k(
    x: Tensor,
    k: int,
    *,
    bias: Tensor | None = None,
    input_ids: Tensor | None = None,
    tid2eid: Tensor | None = None,
    k_group: int = 1,
    group_count: int = 1,
    group_select_mode: int = 0,
    renorm: int = 0,
    norm_type: int = 0,
    out_flag: bool = False,
    routed_scaling_factor: float = 1.0,
    eps: float = 1e-20,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return weights and int32 experts, ``[t, k]`` each, and with ``out_flag`` all scores, fp32 ``[t, e]``.

    The scores are softmax (``norm_type`` 0) or sigmoid; ``bias`` affects only the selection. With groups,
    experts are selected from the ``k_group`` groups with the largest score (mode 0) or the largest sum of
    their two largest scores (mode 1).
    """
    scores = x.float().softmax(-1) if norm_type == 0 else x.float().sigmoid()
    preference = scores if bias is None else scores + bias.float()
    if group_count > 1:
        grouped = preference.view(x.size(0), group_count, -1)
        worth = grouped.topk(group_select_mode + 1, dim=-1).values.sum(-1)
        kept = torch.full_like(worth, float("-inf")).scatter(1, worth.topk(k_group, dim=-1).indices, 0.0)
        preference = (grouped + kept.unsqueeze(-1)).flatten(1)
    chosen = preference.topk(k, dim=-1).indices
    weights = scores.gather(1, chosen)
    if norm_type == 1:
        weights = weights / (weights.sum(-1, keepdim=True) + eps)
    weights = (weights * routed_scaling_factor).to(x.dtype)
    return weights, chosen.int(), scores if out_flag else scores.new_empty(0)


@kernel("npu_moe_gating_top_k_backward")
def npu_moe_gating_top_k_backward(
    x_norm: Tensor,
    grad_y: Tensor,
    expertIdx: Tensor,  # noqa: N803  the schema's name
    *,
    renorm: int = 0,
    norm_type: int = 0,
    routed_scaling_factor: float = 1.0,
    eps: float = 1e-20,
) -> Tensor:
    """Return the gradient of ``x``, ``[t, e]``, given the sigmoid scores ``x_norm``."""
    chosen, grad = expertIdx.long(), grad_y.float() * routed_scaling_factor
    scores = x_norm.gather(1, chosen)
    total = scores.sum(-1, keepdim=True) + eps
    mean = (scores / total * grad).sum(-1, keepdim=True)
    of_scores = torch.zeros_like(x_norm).scatter_add(1, chosen, (grad - mean) / total)
    return (x_norm * (1 - x_norm) * of_scores).to(grad_y.dtype)
