"""Ring attention: each rank keeps its queries, and keys and values go round from rank to rank (p2p).

Liu, Zaharia, Abbeel 2023, "Ring Attention with Blockwise Transformers for Near-Infinite Context", with the
load-balanced order of megatron-core: a sequence is cut into 2·cp chunks, and rank r has the chunks r and
2·cp - 1 - r, one behind the other. No rank ever holds more keys than its own and those it is being sent.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_npu.ops.attention.block import Residuals, attention_block, attention_block_backward


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


class Block(NamedTuple):
    """What of a rank's keys this rank's queries see.

    Attributes:
        first_query: they are seen from this query on.
        keys: so many of them, from the first.
        causal: whether the diagonal of the sequence is among the pairs.
    """

    first_query: int
    keys: int
    causal: bool


def visible_block(step: int, rank: int, chunk: int, causal: bool) -> Block:
    """Return what ``rank`` sees of the keys that come to it at ``step``, those of rank ``rank - step``.

    Where that is an earlier rank, its first chunk lies before all of our queries and its second behind them;
    where it is a later one, both lie between our two chunks.

    Args:
        step: of the ring; 0 are our own keys.
        rank: in the context-parallel group.
        chunk: tokens of a chunk; each rank has two.
        causal: no query sees a later key.
    """
    if not causal or step == 0:
        return Block(0, 2 * chunk, causal)
    return Block(0, chunk, False) if step <= rank else Block(chunk, 2 * chunk, False)


class _SendReceive:
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
        key_value = torch.stack((key, value))  # one message
        rank, size, chunk = group.rank(), group.size(), query.size(0) // 2
        for step in range(size):
            transfer = _SendReceive(key_value, group) if step + 1 < size else None
            first, keys, diagonal = visible_block(step, rank, chunk, causal)
            block = attention_block(query[first:], key_value[0, :keys], key_value[1, :keys], scale, diagonal)
            if step == 0:
                output, lse = block[0].to(block[1].dtype), block[1]
            else:
                merge(output[first:], lse[..., first:], *block)
            if transfer is not None:
                key_value = transfer.wait()
        output = output.to(query.dtype)
        ctx.save_for_backward(query, key, value, output, lse)
        ctx.options = scale, causal, group
        return output

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, output, lse = ctx.saved_tensors
        scale, causal, group = ctx.options
        rank, size, chunk = group.rank(), group.size(), query.size(0) // 2
        key_value = torch.stack((key, value))
        query_grad = torch.zeros_like(query, dtype=lse.dtype)
        # The gradients of keys and values follow them, one hop behind, and are home after the last. They
        # travel in the dtype of the keys: a rounding for each rank, as when gradients are reduce-scattered.
        key_value_grad = torch.zeros_like(key_value)
        grad_transfer: _SendReceive | None = None
        for step in range(size):
            transfer = _SendReceive(key_value, group) if step + 1 < size else None
            first, keys, diagonal = visible_block(step, rank, chunk, causal)
            residuals = Residuals(
                query[first:],
                key_value[0, :keys],
                key_value[1, :keys],
                output[first:],
                lse[..., first:].contiguous(),
            )
            of_query, of_key, of_value = attention_block_backward(grad[first:], residuals, scale, diagonal)
            query_grad[first:] += of_query
            if grad_transfer is not None:
                key_value_grad = grad_transfer.wait()
            key_value_grad[0, :keys] += of_key
            key_value_grad[1, :keys] += of_value
            if transfer is not None:
                key_value = transfer.wait()
            grad_transfer = _SendReceive(key_value_grad, group)
        if grad_transfer is not None:
            key_value_grad = grad_transfer.wait()
        return query_grad.to(query.dtype), key_value_grad[0], key_value_grad[1], None, None, None


def merge(output: Tensor, lse: Tensor, block_output: Tensor, block_lse: Tensor) -> None:
    """Take the attention over another block of keys into ``output`` and ``lse``, in place.

    Args:
        output: ``[s, b, n, d]`` in fp32.
        lse: ``[b, n, s]`` in fp32.
        block_output: like ``output``, in any dtype.
        block_lse: like ``lse``.
    """
    merged = torch.logaddexp(lse, block_lse)
    output.mul_(_share(lse - merged)).add_(block_output * _share(block_lse - merged))
    lse.copy_(merged)


def _share(logarithm: Tensor) -> Tensor:
    """``[b, n, s]`` to factors ``[s, b, n, 1]``."""
    return logarithm.exp().permute(2, 0, 1).unsqueeze(-1)
