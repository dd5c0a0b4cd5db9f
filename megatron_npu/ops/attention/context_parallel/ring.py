"""Ring attention: each rank keeps its queries, and keys and values go round from rank to rank.

Liu, Zaharia, Abbeel 2023, "Ring Attention with Blockwise Transformers for Near-Infinite Context", with the
balanced order of megatron-core: a sequence is cut into 2·cp chunks, and rank r has the chunks r and
2·cp - 1 - r, one behind the other. No rank ever holds more keys than its own and those it is being sent.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_npu.ops.attention.block import partial, partial_backward


def ring_attention(
    query: Tensor, key: Tensor, value: Tensor, *, scale: float, causal: bool, group: dist.ProcessGroup
) -> Tensor:
    """Return the attention of this rank's queries over everyone's keys, ``[s, b, n, d]``, contiguous.

    Args:
        query: this rank's part of the sequence, ``[s, b, n, d]``; fp32, bf16 or fp16; s even.
        key: likewise ``[s, b, g, d]``, where g divides n.
        value: as ``key``.
        scale: factor of the scores, usually 1 / sqrt(d).
        causal: no query sees a key after its own position in the whole sequence.
        group: the ranks that share the sequence, in its order.

    Raises:
        ValueError: an odd number of tokens, which does not fall into two chunks.
    """
    if query.size(0) % 2:
        raise ValueError(f"{query.size(0)} tokens on this rank, which are not two chunks of equal length")
    return _Ring.apply(query.contiguous(), key, value, scale, causal, group)


def _seen(step: int, rank: int, chunk: int, causal: bool) -> tuple[int, int, bool]:
    """Return what the keys that come at ``step`` are to this rank.

    They are those of rank ``rank - step``. Where that is an earlier rank, its first chunk lies before all of
    our queries and its second behind them; where it is a later one, both lie between our two chunks.

    Returns:
        The first query that sees them, the number of keys that are seen, and whether the diagonal is theirs.
    """
    if not causal or step == 0:
        return 0, 2 * chunk, causal
    return (0, chunk, False) if step <= rank else (chunk, 2 * chunk, False)


class _Passing:
    """A tensor on its way to the next rank, and the previous rank's on its way here."""

    def __init__(self, tensor: Tensor, group: dist.ProcessGroup) -> None:
        rank, size = group.rank(), group.size()
        after, before = (dist.get_global_rank(group, (rank + hop) % size) for hop in (1, -1))
        self.sent = tensor.contiguous()  # must live until it has left
        self.received = torch.empty_like(self.sent)
        self.requests = dist.batch_isend_irecv(
            [
                dist.P2POp(dist.isend, self.sent, after, group),
                dist.P2POp(dist.irecv, self.received, before, group),
            ]
        )

    def wait(self) -> Tensor:
        for request in self.requests:
            request.wait()
        return self.received


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scale: float,
        causal: bool,
        group: dist.ProcessGroup,
    ) -> Tensor:
        both = torch.stack((key, value))  # one message
        rank, size, chunk = group.rank(), group.size(), query.size(0) // 2
        for step in range(size):
            passing = _Passing(both, group) if step + 1 < size else None
            first, keys, diagonal = _seen(step, rank, chunk, causal)
            part = partial(query[first:], both[0, :keys], both[1, :keys], scale, diagonal)
            if step == 0:
                output, total = part[0].to(part[1].dtype), part[1]
            else:
                _merge(output[first:], total[..., first:], *part)
            if passing is not None:
                both = passing.wait()
        output = output.to(query.dtype)
        ctx.save_for_backward(query, key, value, output, total)
        ctx.how = scale, causal, group
        return output

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, output, total = ctx.saved_tensors
        scale, causal, group = ctx.how
        rank, size, chunk = group.rank(), group.size(), query.size(0) // 2
        both = torch.stack((key, value))
        query_grad = torch.zeros_like(query, dtype=total.dtype)
        # The gradients of keys and values follow them, one hop behind, and are home after the last. They
        # travel in the dtype of the keys: a rounding for each rank, as when gradients are reduce-scattered.
        both_grad = torch.zeros_like(both)
        following: _Passing | None = None
        for step in range(size):
            passing = _Passing(both, group) if step + 1 < size else None
            first, keys, diagonal = _seen(step, rank, chunk, causal)
            of_query, of_key, of_value = partial_backward(
                grad[first:],
                query[first:],
                both[0, :keys],
                both[1, :keys],
                output[first:],
                total[..., first:].contiguous(),
                scale,
                diagonal,
            )
            query_grad[first:] += of_query
            if following is not None:
                both_grad = following.wait()
            both_grad[0, :keys] += of_key
            both_grad[1, :keys] += of_value
            if passing is not None:
                both = passing.wait()
            following = _Passing(both_grad, group)
        both_grad = following.wait()
        return query_grad.to(query.dtype), both_grad[0], both_grad[1], None, None, None


def _merge(output: Tensor, total: Tensor, part: Tensor, part_total: Tensor) -> None:
    """Take a part over other keys into ``output``, ``[s, b, n, d]`` in fp32, and ``total``, ``[b, n, s]``."""
    merged = torch.logaddexp(total, part_total)
    output.mul_(_share(total - merged)).add_(part * _share(part_total - merged))
    total.copy_(merged)


def _share(logarithm: Tensor) -> Tensor:
    """``[b, n, s]`` to factors ``[s, b, n, 1]``."""
    return logarithm.exp().permute(2, 0, 1).unsqueeze(-1)
