"""What one call of attention asks for, in the form that every device reads."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from megatron_npu.ops.caching import lru_cache_tensors

Window = tuple[int | None, int | None]
Offset = int | Literal["end"]


class PackedSequences(NamedTuple):
    """Lengths, in tokens, of sequences that lie one behind the other (thd); numbers of the host.

    They are the differences of ``cu_seqlens``. Sequence n of the queries attends to sequence n of the keys
    and to nothing else. A length may be 0.
    """

    query_lengths: tuple[int, ...]
    key_lengths: tuple[int, ...]


class Segment(NamedTuple):
    """Queries ``[q0, q1)`` over keys ``[k0, k1)``.

    Query i, counted from q0, sees key j, counted from k0, when ``i + low <= j <= i + high``; None does not
    limit. ``causal``, ``window`` and ``offset`` of a call all come down to these two diagonals.
    """

    q0: int
    q1: int
    k0: int
    k1: int
    low: int | None
    high: int | None

    @property
    def excess(self) -> int:
        """Keys minus queries: the diagonal on which the last query meets the last key."""
        return (self.k1 - self.k0) - (self.q1 - self.q0)

    def seeing(self) -> tuple[int, int]:
        """Return the range of queries, counted from q0, that see a key; the others are blind."""
        queries, keys = self.q1 - self.q0, self.k1 - self.k0
        if keys == 0:
            return 0, 0
        first = 0 if self.high is None else max(0, -self.high)
        last = queries if self.low is None else min(queries, keys - self.low)
        return min(first, queries), max(last, min(first, queries))

    def has_blind_queries(self) -> bool:
        first, last = self.seeing()
        return last - first < self.q1 - self.q0

    def keys_of(self, first: int, last: int) -> tuple[int, int]:
        """Return the range of keys, counted from k0, that some query of ``[first, last)`` sees."""
        keys = self.k1 - self.k0
        begin = 0 if self.low is None else max(0, first + self.low)
        end = keys if self.high is None else min(keys, last + self.high)
        return begin, max(begin, end)


@dataclass(frozen=True)
class Case:
    """One call of attention without its tensors; see ``attention`` for the meaning of each field."""

    layout: str
    heads: int
    key_heads: int
    scale: float
    segments: tuple[Segment, ...]
    packed: bool = False
    mask: Tensor | None = None
    dropout_p: float = 0.0


@lru_cache(maxsize=16)
def dense_segments(
    queries: int, keys: int, causal: bool, window: Window, offset: Offset
) -> tuple[Segment, ...]:
    """Return the one segment of a call that is not packed."""
    return tuple(_limited([(0, queries, 0, keys)], causal, window, offset))


@lru_cache(maxsize=16)  # the same batch comes back at every layer
def packed_segments(
    packed: PackedSequences, causal: bool, window: Window, offset: Offset
) -> tuple[Segment, ...]:
    """Return the segment of each document; documents without queries are kept, in order."""
    spans, q, k = [], 0, 0
    for queries, keys in zip(packed.query_lengths, packed.key_lengths, strict=True):
        spans.append((q, q + queries, k, k + keys))
        q, k = q + queries, k + keys
    return tuple(_limited(spans or [(0, 0, 0, 0)], causal, window, offset))


def _limited(
    spans: list[tuple[int, int, int, int]], causal: bool, window: Window, offset: Offset
) -> list[Segment]:
    """Give each span its two diagonals; a limit that forbids nothing in any of them is dropped."""
    pre, after = window
    segments = []
    for q0, q1, k0, k1 in spans:
        position = (k1 - k0) - (q1 - q0) if offset == "end" else offset
        low = None if pre is None else position - pre
        high = None if after is None else position + after
        if causal:
            high = position if high is None else min(high, position)
        segments.append(Segment(q0, q1, k0, k1, low, high))
    if all(s.low is None or s.low + (s.q1 - s.q0) - 1 <= 0 for s in segments):
        segments = [s._replace(low=None) for s in segments]
    if all(s.high is None or s.high >= (s.k1 - s.k0) - 1 for s in segments):
        segments = [s._replace(high=None) for s in segments]
    return segments


def forbidden_pairs(segment: Segment, device: torch.device) -> Tensor | None:
    """Return ``[queries, keys]``, True where the diagonals forbid a pair; None if they forbid none.

    For references and small cases only: it grows with queries × keys.
    """
    if segment.low is None and segment.high is None:
        return None
    return _forbidden_pairs(
        segment.q1 - segment.q0, segment.k1 - segment.k0, segment.low, segment.high, device
    )


@lru_cache_tensors(maxsize=4)  # the same few shapes come back at every layer of every step
def _forbidden_pairs(
    queries: int, keys: int, low: int | None, high: int | None, device: torch.device
) -> Tensor:
    distance = torch.arange(keys, device=device) - torch.arange(queries, device=device)[:, None]
    forbidden = torch.zeros_like(distance, dtype=torch.bool)
    if low is not None:
        forbidden |= distance < low
    if high is not None:
        forbidden |= distance > high
    return forbidden


def window_from_the_end(segments: tuple[Segment, ...]) -> Window | None:
    """Return the window of all segments when the last query stands at the last key; None if they differ.

    The way flash-attn and torch_npu's band describe a window. Its limits are negative where the band lies
    wholly on one side of that diagonal.
    """
    windows = {
        (
            None if s.low is None else s.excess - s.low,
            None if s.high is None else s.high - s.excess,
        )
        for s in segments
        if s.q0 < s.q1 and s.k0 < s.k1
    }
    if len(windows) > 1:
        return None
    return windows.pop() if windows else (None, None)


def visible_ranges(segments: tuple[Segment, ...], device: torch.device) -> tuple[Tensor, Tensor]:
    """Return for each query the first key it sees and the first behind those, two ``[queries]`` int32."""
    begins, ends = [], []
    for s in segments:
        position = torch.arange(s.q1 - s.q0, dtype=torch.int32)
        first = position * 0 if s.low is None else position + s.low
        behind = position * 0 + (s.k1 - s.k0) if s.high is None else position + s.high + 1
        begins.append(s.k0 + first.clamp(0, s.k1 - s.k0))
        ends.append(s.k0 + behind.clamp(0, s.k1 - s.k0))
    return torch.cat(begins).to(device), torch.cat(ends).to(device)
