"""Sort tokens by expert, and restore the original order of the tokens.

Source: ``permute`` and ``unpermute`` of megatron-core (``transformer/moe/moe_utils.py``, 0.16.1), for the
case in which every token goes to the same number of experts and none is dropped.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_npu.ops.dispatch import Make, Operation, unsupported_dtype


def permute_tokens(
    tokens: Tensor, routing_map: Tensor, probs: Tensor | None, copies: int
) -> tuple[Tensor, Tensor | None, Tensor]:
    """Copy each token once for each of its experts, and sort the copies by expert.

    Rows are grouped by expert, and keep the token order within each group.

    Args:
        tokens: ``[t, h]``, fp32, bf16 or fp16.
        routing_map: ``[t, e]``, bool, with ``copies`` True values per row, which is not checked.
        probs: ``[t, e]``, of the dtype of ``tokens`` or fp32, or None if they are not needed.
        copies: the number of experts per token.

    Returns:
        The rows ``[t * copies, h]``; their probabilities ``[t * copies]``, or None without ``probs``; and
        ``positions`` (int32, ``[t * copies]``): the row of a token's k-th copy, with experts in ascending
        order, is ``positions[token * copies + k]``.

    Raises:
        ValueError: the shapes do not match.
    """
    if (
        tokens.dim() != 2
        or routing_map.shape[:1] != tokens.shape[:1]
        or not 0 < copies <= routing_map.size(1)
    ):
        raise ValueError(
            "tokens and routing_map must have the shapes [t, h] and [t, e], and the number of copies must "
            f"be from 1 to e, but got {tuple(tokens.shape)}, {tuple(routing_map.shape)} and {copies} copies"
        )
    rows, kept, positions = _permute(tokens, routing_map, probs, copies)
    return rows, None if probs is None else kept, positions


def unpermute_tokens(
    rows: Tensor,
    positions: Tensor,
    tokens: int,
    probs: Tensor | None = None,
    routing_map: Tensor | None = None,
) -> Tensor:
    """Sum the copies of each token, weighted by the routing probabilities if they are given.

    Args:
        rows: ``[t * copies, h]``.
        positions: the positions that ``permute_tokens`` returned.
        tokens: t.
        probs, routing_map: ``[t, e]``; either both or neither are given.

    Returns:
        ``[t, h]`` in the dtype of ``rows``; sums are in fp32.
    """
    return _unpermute(rows, positions, tokens, probs, routing_map)


def _permute_reference(
    tokens: Tensor, routing_map: Tensor, probs: Tensor | None, copies: int
) -> tuple[Tensor, Tensor, Tensor]:
    token, expert = routing_map.bool().nonzero(as_tuple=True)  # by token, experts ascending
    order = expert.argsort(stable=True)
    positions = torch.empty_like(order)
    positions[order] = torch.arange(order.numel(), device=order.device)
    kept = tokens.new_empty(0) if probs is None else probs[token, expert][order]
    return tokens.index_select(0, token[order]), kept, positions.to(torch.int32)


def _unpermute_reference(
    rows: Tensor, positions: Tensor, tokens: int, probs: Tensor | None, routing_map: Tensor | None
) -> Tensor:
    copies = rows.index_select(0, positions.long()).view(tokens, -1, rows.size(1))
    copies = copies.to(torch.promote_types(rows.dtype, torch.float32))
    if probs is not None and routing_map is not None:
        copies = copies * probs[routing_map.bool()].view(tokens, -1, 1)
    return copies.sum(1).to(rows.dtype)


_permute = Operation("permute_tokens", _permute_reference)
_unpermute = Operation("unpermute_tokens", _unpermute_reference)


@_permute.on("cpu", "cuda", note="rows counted, not sorted")
def _permute_torch(
    tokens: Tensor, routing_map: Tensor, probs: Tensor | None, copies: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Permute tokens in plain torch, by computing the row to which each copy of a token belongs."""
    counted = routing_map.cumsum(0)
    ends = counted[-1:].cumsum(1)
    rows = (counted - 1 + ends - counted[-1:]).masked_select(routing_map)  # by token, experts ascending
    owners = torch.arange(tokens.size(0), device=tokens.device).repeat_interleave(copies)
    token = torch.empty_like(owners).index_copy_(0, rows, owners)
    kept = tokens.new_empty(0) if probs is None else probs.T.masked_select(routing_map.T)
    return tokens.index_select(0, token), kept, rows.to(torch.int32)


@_unpermute.on("cpu", "cuda", note="gathered and summed")
def _unpermute_torch(
    rows: Tensor, positions: Tensor, tokens: int, probs: Tensor | None, routing_map: Tensor | None
) -> Tensor:
    copies = rows.index_select(0, positions).view(tokens, -1, rows.size(1))
    wide = torch.promote_types(rows.dtype, torch.float32)
    if probs is None or routing_map is None:
        return copies.sum(1, dtype=wide).to(rows.dtype)
    weights = probs.masked_select(routing_map).view(tokens, 1, -1)
    return torch.bmm(weights.to(wide), copies.to(wide)).squeeze(1).to(rows.dtype)


# torch_npu 2.13, npu_moe_token_permute_with_routing_map: experts of a token
_NPU_COPIES = 512
_LIMITS = (
    f"fewer than {_NPU_COPIES} experts per token, probabilities in the tokens' dtype or in fp32 with bf16"
)


def _beyond_npu(tokens: Tensor, routing_map: Tensor, probs: Tensor | None, copies: int) -> str | None:
    """Return the limit of ``npu_moe_token_permute_with_routing_map`` that the arguments exceed, or None."""
    kernel = "npu_moe_token_permute_with_routing_map"
    if copies >= _NPU_COPIES:
        return f"{kernel} supports fewer than {_NPU_COPIES} experts per token, but got {copies}"
    return unsupported_dtype(kernel, tokens.dtype) or _beyond_probs(kernel, tokens, probs)


def _beyond_probs(kernel: str, rows: Tensor, probs: Tensor | None) -> str | None:
    if probs is None or probs.dtype is rows.dtype:
        return None
    if (rows.dtype, probs.dtype) == (torch.bfloat16, torch.float32):
        return None
    return f"{kernel} does not support probabilities in {probs.dtype} for rows in {rows.dtype}"


def _back_beyond_npu(
    rows: Tensor, positions: Tensor, tokens: int, probs: Tensor | None, routing_map: Tensor | None
) -> str | None:
    kernel = "npu_moe_token_unpermute_with_routing_map"
    return unsupported_dtype(kernel, rows.dtype) or _beyond_probs(kernel, rows, probs)


@_permute.on("npu", supports=_beyond_npu, note="`npu_moe_token_permute_with_routing_map`", limits=_LIMITS)
def _permute_npu(
    tokens: Tensor, routing_map: Tensor, probs: Tensor | None, copies: int
) -> tuple[Tensor, Tensor, Tensor]:
    import torch_npu

    return torch_npu.npu_moe_token_permute_with_routing_map(
        tokens, routing_map, probs=probs, num_out_tokens=tokens.size(0) * copies, drop_and_pad=False
    )


@_unpermute.on(
    "npu", supports=_back_beyond_npu, note="`npu_moe_token_unpermute_with_routing_map`", limits=_LIMITS
)
def _unpermute_npu(
    rows: Tensor, positions: Tensor, tokens: int, probs: Tensor | None, routing_map: Tensor | None
) -> Tensor:
    import torch_npu

    return torch_npu.npu_moe_token_unpermute_with_routing_map(
        rows, positions, [tokens, rows.size(1)], probs=probs, routing_map=routing_map, drop_and_pad=False
    )


@_permute.example()
def _example(make: Make) -> Tensor:
    routing_map = torch.zeros(6, 4, dtype=torch.bool, device=make(1).device)
    routing_map[:, 1::2] = True
    return permute_tokens(make(6, 16), routing_map, make(6, 4), 2)[0]


@_unpermute.example()
def _example_back(make: Make) -> Tensor:
    rows = make(12, 16)
    return unpermute_tokens(rows, torch.arange(12, dtype=torch.int32, device=rows.device), 6)
