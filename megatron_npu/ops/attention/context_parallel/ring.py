"""Compute ring attention (p2p): each rank keeps its queries and receives the other ranks' keys and values.

Liu, Zaharia, Abbeel 2023, "Ring Attention with Blockwise Transformers for Near-Infinite Context", with
megatron-core's load-balanced order (``visible``). Without a window, keys are passed from rank to rank. With a
window, most ranks see few or none of each other's keys: only those keys are sent, directly from the rank that
holds them to the ranks that see them, at the step at which the ring would have delivered them. A rank never
holds more than its own keys and those of two others.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_npu.ops.attention.block import Residuals, attention_block, attention_block_backward
from megatron_npu.ops.attention.context_parallel.visible import (
    Document,
    Part,
    Spans,
    union,
    visible_parts,
    within,
)
from megatron_npu.ops.attention.sink import absorb, gradient
from megatron_npu.ops.attention.spec import AttentionSpec, Window
from megatron_npu.ops.caching import lru_cache_tensors
from megatron_npu.options.attention_flags import DEFAULTS, AttentionFlags


def ring_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    scale: float,
    causal: bool,
    group: dist.ProcessGroup,
    window: Window = (None, None),
    documents: Sequence[Document] | None = None,
    dropout_p: float = 0.0,
    sink: Tensor | None = None,
    flags: AttentionFlags = DEFAULTS,
) -> Tensor:
    """Return the attention of this rank's queries over the keys of all ranks as a contiguous tensor ``[s, b,
    n, d]``.

    Args:
        query: this rank's part of the sequence, ``[s, b, n, d]``; fp32, bf16 or fp16; s is even.
        key: this rank's keys, ``[s, b, g, d]``, where g divides n.
        value: like ``key``.
        scale: the factor applied to the scores, usually 1 / sqrt(d).
        causal: whether to hide the keys after a query's position in the whole sequence.
        group: the ranks that share the sequence, in sequence order.
        window: the number of tokens that a query sees back and ahead; None means no limit.
        documents: the packed sequences, concatenated on each rank, with b = 1. If None, there is one
            sequence.
        dropout_p: the probability of dropping an attention weight, in [0, 1); masks are drawn from the
            device's generator block by block, so the dropped weights depend on the number of ranks.
        sink: ``[n]``, one extra score per head, without a value; its gradient is that of this rank's queries.
        flags: the run's flags; see ``attention``.

    Raises:
        ValueError: the number of tokens is odd, so that they cannot be split into two chunks, or the
            documents do not cover the tokens.
    """
    tokens, size = query.size(0), group.size()
    documents = (Document(tokens, size * tokens),) if documents is None else tuple(documents)
    _require_chunks(documents, tokens)
    longest = max(each.tokens for each in documents) * size
    left, right = (None if limit is None or limit >= longest - 1 else limit for limit in window)
    if causal and right is not None:
        right = None if right >= 0 else right
    route = Route(group, documents, causal, (left, right))
    return _Ring.apply(query.contiguous(), key, value, sink, scale, dropout_p, route, flags)


def _require_chunks(documents: Sequence[Document], tokens: int) -> None:
    if any(each.tokens % 2 for each in documents):
        raise ValueError(f"the {tokens} tokens on this rank cannot be split into two equal chunks")
    there = sum(each.tokens for each in documents)
    if there != tokens:
        raise ValueError(f"the documents have {there} tokens in total, but the tensors have {tokens}")


class Route(NamedTuple):
    """The routing of keys to the queries of each rank, for every step of the ring.

    The description is identical on all ranks except for ``rank``.
    """

    group: dist.ProcessGroup
    documents: tuple[Document, ...]
    causal: bool
    window: Window

    @property
    def goes_round(self) -> bool:
        """True if keys are passed from rank to rank around the ring.

        Otherwise they are sent directly to the ranks that need them.
        """
        return self.window == (None, None)

    def parts(self, step: int) -> tuple[Part, ...]:
        """Return the attention blocks of this rank at ``step``, which use the keys of rank ``rank -
        step``.
        """
        rank, size = self.group.rank(), self.group.size()
        return self._visible(rank, (rank - step) % size)

    def fetched(self, step: int) -> Spans:
        """Return the keys of rank ``rank - step`` that this rank's queries attend to."""
        return union(span for part in self.parts(step) for span in part.keys)

    def sent(self, step: int) -> Spans:
        """Return the keys of this rank that the queries of rank ``rank + step`` attend to."""
        rank, size = self.group.rank(), self.group.size()
        return union(span for part in self._visible((rank + step) % size, rank) for span in part.keys)

    def _visible(self, rank: int, source: int) -> tuple[Part, ...]:
        return visible_parts(rank, source, self.group.size(), self.documents, self.causal, self.window)


class _Transfer:
    """A tensor sent to the rank ``hops`` ahead, and a tensor received from the rank ``hops`` behind."""

    def __init__(
        self, sent: Tensor | None, received: Tensor | None, hops: int, group: dist.ProcessGroup
    ) -> None:
        rank, size = group.rank(), group.size()
        after, before = (dist.get_global_rank(group, (rank + hop) % size) for hop in (hops, -hops))
        self.sent = None if sent is None else sent.contiguous()  # must live until it has left
        self.received = received
        operations = []
        if self.sent is not None:
            operations.append(dist.P2POp(dist.isend, self.sent, after, group))
        if received is not None:
            operations.append(dist.P2POp(dist.irecv, received, before, group))
        self.requests = dist.batch_isend_irecv(operations) if operations else []

    def wait(self) -> Tensor | None:
        """Wait until one tensor is sent and another is received, and return the received tensor."""
        for request in self.requests:
            request.wait()
        return self.received

    def arrived(self) -> Tensor:
        """Wait for the received tensor, and return it."""
        received = self.wait()
        assert received is not None
        return received


def _arrivals(key_value: Tensor, route: Route) -> Iterator[tuple[Tensor, tuple[Part, ...]]]:
    """Yield, for each step, the keys and values ``[2, s, b, g, d]`` and the attention blocks that use them.

    The tensors of the next step are already in transit. Steps at which this rank sees no keys have no parts,
    but they are yielded too, because all ranks must start their transfers in the same order.
    """
    own = key_value
    transfer: _Transfer | None = None
    for step in range(route.group.size()):
        arrived = transfer.wait() if transfer is not None else None
        parts = route.parts(step)
        if step and not route.goes_round:
            whole = route.fetched(step)
            parts = tuple(part._replace(keys=within(part.keys, whole)) for part in parts)
        key_value = key_value if arrived is None else arrived
        transfer = _fetch(own if not route.goes_round else key_value, step + 1, route)
        yield key_value, parts


def _fetch(key_value: Tensor, step: int, route: Route) -> _Transfer | None:
    """Start exchanging the keys that a ring step needs."""
    if step == route.group.size():
        return None
    if route.goes_round:
        return _Transfer(key_value, torch.empty_like(key_value), 1, route.group)
    sent, fetched = route.sent(step), route.fetched(step)
    message = torch.cat([key_value[:, first:last] for first, last in sent], dim=1) if sent else None
    shape = key_value.size(0), _count(fetched), *key_value.shape[2:]
    return _Transfer(message, key_value.new_empty(shape) if fetched else None, step, route.group)


# Keys, and the gradients of these and of their values.
_KeyGradients = tuple[Spans, Tensor, Tensor]


def _add_all(total: Tensor, found: list[_KeyGradients]) -> Tensor:
    """Add gradients to the total gradients of keys and values, ``[2, s, b, g, d]``, in place."""
    for spans, of_key, of_value in found:
        _add(total[0], spans, of_key)
        _add(total[1], spans, of_value)
    return total


class _Homeward:
    """Gradients of keys and values, ``[2, s, b, g, d]``, in transit to the rank that owns the keys.

    The gradients are sent in the dtype of the keys and are rounded at each rank, as in a reduce-scatter of
    gradients.
    """

    def __init__(self, key_value: Tensor, route: Route) -> None:
        self.route = route
        self.own = torch.zeros_like(key_value)
        self.transfer: _Transfer | None = None
        self.expected: Spans = ()

    def send(self, step: int, arrived: Tensor, found: list[_KeyGradients]) -> None:
        """Send the gradients of the keys that were received at ``step`` to the rank that owns these keys.

        If keys are passed around a ring, the gradients of earlier steps are added first.
        """
        if self.route.goes_round:
            if self.transfer is not None:
                self.own = self.transfer.arrived()
            _add_all(self.own, found)
            self.transfer = _Transfer(self.own, torch.empty_like(self.own), 1, self.route.group)
        elif not step:
            _add_all(self.own, found)
        else:
            self._take()
            sent = _add_all(torch.zeros_like(arrived), found) if found else None
            self.expected = self.route.sent(step)
            shape = self.own.size(0), _count(self.expected), *self.own.shape[2:]
            received = self.own.new_empty(shape) if self.expected else None
            self.transfer = _Transfer(sent, received, -step, self.route.group)

    def _take(self) -> None:
        if self.transfer is None:
            return
        received = self.transfer.wait()
        if received is None:
            return
        first = 0
        for start, end in self.expected:
            self.own[:, start:end] += received[:, first : first + end - start]
            first += end - start

    def arrive(self) -> Tensor:
        """Wait for the gradients from the other ranks, and return the complete gradients of this rank's
        keys and values.
        """
        if self.route.goes_round:
            return self.own if self.transfer is None else self.transfer.arrived()
        self._take()
        return self.own


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        sink: Tensor | None,
        scale: float,
        dropout_p: float,
        route: Route,
        flags: AttentionFlags,
    ) -> Tensor:
        key_value = torch.stack((key, value))  # one message
        result: tuple[Tensor, Tensor] | None = None
        drawn = []
        for arrived, parts in _arrivals(key_value, route):
            for part in parts:
                spec = _spec(query, key, part, scale, dropout_p, flags)
                rows = _take(query, part.queries)
                *block, masks = attention_block(rows, *(_take(t, part.keys) for t in arrived), spec)
                drawn.append(masks)
                if result is None and _count(part.queries) == query.size(0):
                    result = block[0].to(block[1].dtype), block[1]
                    continue
                result = _nothing(query) if result is None else result
                _merge_rows(*result, part.queries, *block)
        output, lse = _nothing(query) if result is None else result
        if sink is not None:
            output, lse = absorb(output, lse, sink.to(lse.dtype))
        output = output.to(query.dtype)
        ctx.save_for_backward(query, key, value, output, lse, sink)
        ctx.options = scale, dropout_p, route, flags, drawn
        return output

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, output, lse, sink = ctx.saved_tensors
        scale, dropout_p, route, flags, drawn = ctx.options
        drawn = iter(drawn)
        key_value = torch.stack((key, value))
        query_grad = torch.zeros_like(query, dtype=lse.dtype)
        homeward = _Homeward(key_value, route)
        for step, (arrived, parts) in enumerate(_arrivals(key_value, route)):
            found: list[_KeyGradients] = []
            for part in parts:
                residuals = Residuals(
                    _take(query, part.queries),
                    _take(arrived[0], part.keys),
                    _take(arrived[1], part.keys),
                    _take(output, part.queries),
                    _take(lse, part.queries, 2).contiguous(),
                )
                grads = attention_block_backward(
                    _take(grad, part.queries),
                    residuals,
                    _spec(query, key, part, scale, dropout_p, flags),
                    next(drawn),
                )
                _add(query_grad, part.queries, grads[0])
                found.append((part.keys, *grads[1:]))
            homeward.send(step, arrived, found)
        of_key, of_value = homeward.arrive()
        of_sink = None
        if ctx.needs_input_grad[3]:
            of_sink = gradient(grad, output, lse, sink.to(lse.dtype)).to(sink.dtype)
        return query_grad.to(query.dtype), of_key, of_value, of_sink, None, None, None, None


def _spec(
    query: Tensor, key: Tensor, part: Part, scale: float, dropout_p: float, flags: AttentionFlags
) -> AttentionSpec:
    return AttentionSpec(
        "SBND",
        query.size(2),
        key.size(2),
        float(scale),
        part.segments,
        packed=len(part.segments) > 1,
        dropout_p=dropout_p,
        flags=flags,
    )


def _nothing(query: Tensor) -> tuple[Tensor, Tensor]:
    """Return the initial output and log-sum-exp for queries that have not attended to any key yet."""
    precise = torch.promote_types(query.dtype, torch.float32)
    lse = query.new_full((query.size(1), query.size(2), query.size(0)), float("-inf"), dtype=precise)
    return torch.zeros_like(query, dtype=precise), lse


def _count(spans: Spans) -> int:
    return sum(last - first for first, last in spans)


def _take(tensor: Tensor, spans: Spans, dim: int = 0) -> Tensor:
    """Return the tokens in ``spans`` along ``dim``: a view for a single span, and a copy for several."""
    if len(spans) == 1:
        return tensor.narrow(dim, spans[0][0], spans[0][1] - spans[0][0])
    return tensor.index_select(dim, _index(spans, tensor.device))


def _add(total: Tensor, spans: Spans, part: Tensor) -> None:
    """Add the tensor ``part`` to the tokens of ``total`` that ``spans`` selects."""
    if len(spans) == 1:
        total[spans[0][0] : spans[0][1]] += part
    else:
        total.index_add_(0, _index(spans, total.device), part.to(total.dtype))


@lru_cache_tensors(maxsize=32)  # every layer of a batch asks for the same
def _index(spans: Spans, device: torch.device) -> Tensor:
    return torch.cat([torch.arange(first, last) for first, last in spans]).to(device)


def _merge_rows(output: Tensor, lse: Tensor, spans: Spans, block_output: Tensor, block_lse: Tensor) -> None:
    """Merge the attention over a block of keys into the queries in ``spans``, as ``merge`` does for all
    queries.
    """
    rows, totals = _take(output, spans), _take(lse, spans, 2)
    merge(rows, totals, block_output, block_lse)
    if len(spans) > 1:
        output.index_copy_(0, _index(spans, output.device), rows)
        lse.index_copy_(2, _index(spans, lse.device), totals)


def merge(output: Tensor, lse: Tensor, block_output: Tensor, block_lse: Tensor) -> None:
    """Merge the attention over another block of keys into ``output`` and ``lse`` (log-sum-exp), in place.

    Args:
        output: ``[s, b, n, d]`` in fp32.
        lse: ``[b, n, s]`` in fp32; -inf for queries that have seen no key yet.
        block_output: like ``output``, in any dtype.
        block_lse: like ``lse``, finite.
    """
    merged = torch.logaddexp(lse, block_lse)
    output.mul_(_share(lse - merged)).add_(block_output * _share(block_lse - merged))
    lse.copy_(merged)


def _share(logarithm: Tensor) -> Tensor:
    """Reshape per-query factors ``[b, n, s]`` to ``[s, b, n, 1]``, so that they broadcast over the
    attention output.
    """
    return logarithm.exp().permute(2, 0, 1).unsqueeze(-1)
