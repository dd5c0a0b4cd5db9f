"""Describe an attention call in a form that the implementations for all devices share."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from megatron_npu.ops.caching import lru_cache_tensors
from megatron_npu.options.attention_flags import DEFAULTS, AttentionFlags

Window = tuple[int | None, int | None]  # (window_left, window_right), in tokens; None does not limit
Offset = int | Literal["end"]


class PackedSequences(NamedTuple):
    """The lengths in tokens, in host memory, of sequences that are concatenated in one tensor (layout thd).

    The lengths are the differences of ``cu_seqlens``. Sequence n of the queries attends only to sequence n of
    the keys. A length may be 0.
    """

    query_lengths: tuple[int, ...]
    key_lengths: tuple[int, ...]


class Segment(NamedTuple):
    """Queries ``[q0, q1)`` over keys ``[k0, k1)``: a whole attention call, or one of its packed sequences.

    Query i, counted from q0, sees key j, counted from k0, if ``i - window_left <= j <= i + window_right``;
    None means no limit. ``causal``, ``window`` and ``offset`` all reduce to these two numbers, which an
    offset may make negative: plain causal attention is (None, 0), as in flash-attn.
    """

    q0: int
    q1: int
    k0: int
    k1: int
    window_left: int | None
    window_right: int | None

    @property
    def excess(self) -> int:
        """The number of keys minus the number of queries, which is also the diagonal of the last query at
        the last key.
        """
        return (self.k1 - self.k0) - (self.q1 - self.q0)

    def sees_all_keys(self) -> bool:
        """Return True if every query attends to all keys."""
        return self.window_left is None and self.window_right is None

    def rows_with_keys(self) -> tuple[int, int]:
        """Return the range of queries, counted from q0, that attend to at least one key.

        All other queries are fully masked.
        """
        queries, keys = self.q1 - self.q0, self.k1 - self.k0
        if keys == 0:
            return 0, 0
        first = 0 if self.window_right is None else min(max(0, -self.window_right), queries)
        last = queries if self.window_left is None else min(queries, keys + self.window_left)
        return first, max(first, last)

    def has_fully_masked_rows(self) -> bool:
        """Return True if at least one query attends to no key."""
        first, last = self.rows_with_keys()
        return last - first < self.q1 - self.q0

    def visible_keys(self, first: int, last: int) -> tuple[int, int]:
        """Return the range of keys, counted from k0, to which at least one of the queries ``[first,
        last)`` attends.
        """
        keys = self.k1 - self.k0
        begin = 0 if self.window_left is None else max(0, first - self.window_left)
        end = keys if self.window_right is None else min(keys, last + self.window_right)
        return begin, max(begin, end)

    def part(self, first: int, last: int) -> Segment | None:
        """Return the segment of the queries ``[first, last)``, counted from q0, with all keys that they
        attend to.

        A window limit that hides nothing there becomes None. Returns None if no key is seen.
        """
        begin, end = self.visible_keys(first, last)
        if first >= last or begin >= end:
            return None
        left = None if self.window_left is None else self.window_left - first + begin
        right = None if self.window_right is None else self.window_right + first - begin
        return Segment(
            self.q0 + first,
            self.q0 + last,
            self.k0 + begin,
            self.k0 + end,
            None if left is None or left >= last - first - 1 else left,
            None if right is None or right >= end - begin - 1 else right,
        )

    @property
    def is_plain(self) -> bool:
        """True if kernels without window support can compute the segment, because its mask is square and
        causal or absent.
        """
        triangle = self.window_right == 0 and self.excess == 0
        return self.window_left is None and (self.window_right is None or triangle)


@dataclass(frozen=True)
class AttentionSpec:
    """The arguments of an attention call other than its tensors.

    ``attention`` documents the fields.

    Calls with equal specs, shapes and dtypes are computed the same way, so plans may be cached by them.

    Attributes:
        segments: one for the whole call, or one per packed sequence.
        masked: whether a mask ``[b or 1, n or 1, sq or 1, sk or 1]`` is passed alongside.
        flags: the run's flags, for a device's plan; window and layout of the call are in ``segments`` and
            ``layout``.
    """

    layout: str
    heads: int
    key_heads: int
    scale: float
    segments: tuple[Segment, ...]
    packed: bool = False
    masked: bool = False
    dropout_p: float = 0.0
    flags: AttentionFlags = DEFAULTS


@lru_cache(maxsize=16)
def dense_segments(
    queries: int, keys: int, causal: bool, window: Window, offset: Offset
) -> tuple[Segment, ...]:
    """Return the only segment of an attention call without packed sequences, as a list."""
    return tuple(_limited([(0, queries, 0, keys)], causal, window, offset))


@lru_cache(maxsize=16)  # the same batch comes back at every layer
def packed_segments(
    packed: PackedSequences, causal: bool, window: Window, offset: Offset
) -> tuple[Segment, ...]:
    """Return one segment per packed sequence, in order.

    Sequences without queries are included.
    """
    spans, q, k = [], 0, 0
    for queries, keys in zip(packed.query_lengths, packed.key_lengths, strict=True):
        spans.append((q, q + queries, k, k + keys))
        q, k = q + queries, k + keys
    return tuple(_limited(spans or [(0, 0, 0, 0)], causal, window, offset))


def _with_window(span: tuple[int, int, int, int], causal: bool, window: Window, offset: Offset) -> Segment:
    q0, q1, k0, k1 = span
    position = (k1 - k0) - (q1 - q0) if offset == "end" else offset
    left = None if window[0] is None else window[0] - position
    right = None if window[1] is None else window[1] + position
    if causal:
        right = position if right is None else min(right, position)
    return Segment(q0, q1, k0, k1, left, right)


def _limited(
    spans: list[tuple[int, int, int, int]], causal: bool, window: Window, offset: Offset
) -> list[Segment]:
    """Convert ranges of queries and keys to segments, and apply the attention window to them.

    A limit that hides no key in any span is dropped.
    """
    segments = [_with_window(span, causal, window, offset) for span in spans]
    if all(s.window_left is None or s.window_left >= s.q1 - s.q0 - 1 for s in segments):
        segments = [s._replace(window_left=None) for s in segments]
    if all(s.window_right is None or s.window_right >= s.k1 - s.k0 - 1 for s in segments):
        segments = [s._replace(window_right=None) for s in segments]
    return segments


def forbidden_pairs(segment: Segment, device: torch.device) -> Tensor | None:
    """Return a ``[queries, keys]`` mask that is True for pairs outside the window.

    Return None if all pairs are inside.

    Use this for references and small calls only: memory grows with queries × keys.
    """
    if segment.sees_all_keys():
        return None
    queries, keys = segment.q1 - segment.q0, segment.k1 - segment.k0
    return _forbidden_pairs(queries, keys, segment.window_left, segment.window_right, device)


@lru_cache_tensors(maxsize=4)  # the same few shapes come back at every layer of every step
def _forbidden_pairs(
    queries: int, keys: int, window_left: int | None, window_right: int | None, device: torch.device
) -> Tensor:
    distance = torch.arange(keys, device=device) - torch.arange(queries, device=device)[:, None]
    forbidden = torch.zeros_like(distance, dtype=torch.bool)
    if window_left is not None:
        forbidden |= distance < -window_left
    if window_right is not None:
        forbidden |= distance > window_right
    return forbidden


def window_from_end(segments: tuple[Segment, ...]) -> Window | None:
    """Return the window, counted from the last query at the last key, that all segments share, or None if
    they differ.

    flash-attn and torch_npu's band mode describe a window in this form. A limit is negative if the band lies
    entirely on one side of that diagonal.
    """
    windows = {
        (
            None if s.window_left is None else s.window_left + s.excess,
            None if s.window_right is None else s.window_right - s.excess,
        )
        for s in segments
        if s.q0 < s.q1 and s.k0 < s.k1
    }
    if len(windows) > 1:
        return None
    return windows.pop() if windows else (None, None)


def visible_ranges(segments: tuple[Segment, ...], device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the first visible key and the end of the visible keys of each query, as two int32 tensors
    ``[queries]``.
    """
    begins, ends = [], []
    for s in segments:
        position = torch.arange(s.q1 - s.q0, dtype=torch.int32)
        first = position * 0 if s.window_left is None else position - s.window_left
        behind = position * 0 + (s.k1 - s.k0) if s.window_right is None else position + s.window_right + 1
        begins.append(s.k0 + first.clamp(0, s.k1 - s.k0))
        ends.append(s.k0 + behind.clamp(0, s.k1 - s.k0))
    return torch.cat(begins).to(device), torch.cat(ends).to(device)
