"""Find which keys of another rank are visible to this rank's queries in one step of ring attention.

Each document (a whole sequence, or one of several packed sequences) is split into 2·size chunks; rank r holds
the concatenation of chunks r and 2·size - 1 - r of each document, and the documents are concatenated too.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import lru_cache
from typing import NamedTuple

from megatron_npu.ops.attention.spec import Segment, Window, dense_segments

Span = tuple[int, int]  # tokens [first, last)
Spans = tuple[Span, ...]  # in order, with gaps in between


class Document(NamedTuple):
    """The length of a sequence that is partitioned over the ranks.

    Attributes:
        tokens: number of its tokens on each rank, in two chunks of equal length.
        keys: number of keys of the whole sequence, excluding the padding at its end, which causal queries do
            not see.
    """

    tokens: int
    keys: int


class Part(NamedTuple):
    """The queries and keys that one kernel call processes.

    Attributes:
        queries: spans of this rank's tokens.
        keys: spans of the other rank's tokens.
        segments: which pairs are visible; positions are relative to the first of ``queries`` and ``keys``.
            Each of these queries sees a key.
    """

    queries: Spans
    keys: Spans
    segments: tuple[Segment, ...]


@lru_cache(maxsize=256)  # the same for every layer of a batch
def visible_parts(
    rank: int, source: int, size: int, documents: tuple[Document, ...], causal: bool, window: Window
) -> tuple[Part, ...]:
    """Return the parts of rank ``source``'s keys that are visible to queries of ``rank``.

    The result is empty if no key is visible.

    Args:
        rank: the rank that holds the queries.
        source: the rank that holds the keys.
        size: number of ranks.
        documents: the documents, as concatenated on each rank.
        causal: whether no query sees a later key.
        window: how far a query sees back and ahead in its document; None means no limit.
    """
    if window == (None, None):
        pairs = list(_plain_pairs(rank, source, size, documents, causal))
        return (_joined(pairs),) if pairs else ()
    return tuple(_joined([pair]) for pair in _band_pairs(rank, source, size, documents, causal, window))


# Tokens of queries, tokens of keys, and the window between them, counted from the first of both.
_Pair = tuple[Span, Span, Window]


def _plain_pairs(
    rank: int, source: int, size: int, documents: tuple[Document, ...], causal: bool
) -> Iterator[_Pair]:
    """Yield one pair per document: a range of queries and the range of keys that they attend to.

    Without a window, chunks need no separate treatment.

    In causal attention, an earlier rank's first chunk precedes all of our queries and its second chunk
    follows them; a later rank's chunks both lie between our two chunks.
    """
    first = 0
    for document in documents:
        middle, last = first + document.tokens // 2, first + document.tokens
        if not causal:
            keys = sum(count for _, count in _key_chunks(source, size, document))
            if keys and first < last:
                yield (first, last), (first, first + keys), (None, None)
        elif first == last:
            pass
        elif source == rank:
            yield (first, last), (first, last), (None, 0)
        else:
            earlier = source < rank
            yield (
                (first if earlier else middle, last),
                (first, middle if earlier else last),
                (None, None),
            )
        first = last


def _band_pairs(
    rank: int, source: int, size: int, documents: tuple[Document, ...], causal: bool, window: Window
) -> Iterator[_Pair]:
    """Yield pairs of chunks, limited to queries that see at least one key and to keys that at least one
    query sees.
    """
    first = 0
    for document in documents:
        chunk = document.tokens // 2
        for half, number in enumerate((rank, 2 * size - 1 - rank)):
            for other, (key_number, keys) in enumerate(_key_chunks(source, size, document)):
                offset = (number - key_number) * chunk
                if chunk and keys:
                    (segment,) = dense_segments(chunk, keys, causal, window, offset)
                    yield from _cut_down(segment, first + half * chunk, first + other * chunk)
        first += document.tokens


def _key_chunks(source: int, size: int, document: Document) -> Iterator[tuple[int, int]]:
    """Yield the indices of the two chunks of rank ``source``, each with its number of keys without
    padding.
    """
    chunk = document.tokens // 2
    for number in (source, 2 * size - 1 - source):
        yield number, min(max(document.keys - number * chunk, 0), chunk)


def _cut_down(segment: Segment, query: int, key: int) -> Iterator[_Pair]:
    """Yield the part of ``segment`` that has visible keys, as a pair of token ranges, unless this part is
    empty.
    """
    part = segment.part(*segment.rows_with_keys())
    if part is not None:
        window = part.window_left, part.window_right
        yield (query + part.q0, query + part.q1), (key + part.k0, key + part.k1), window


def _joined(pairs: Iterable[_Pair]) -> Part:
    """Concatenate the pairs so that a single kernel call can process them."""
    queries: list[Span] = []
    keys: list[Span] = []
    segments = []
    q = k = 0
    for query, key, (left, right) in pairs:
        queries.append(query)
        keys.append(key)
        rows, columns = query[1] - query[0], key[1] - key[0]
        segments.append(Segment(q, q + rows, k, k + columns, left, right))
        q, k = q + rows, k + columns
    return Part(union(queries), union(keys), tuple(segments))


def union(spans: Iterable[Span]) -> Spans:
    """Return ``spans`` in order, with overlapping and adjacent spans merged."""
    joined: list[Span] = []
    for first, last in sorted(spans):
        if joined and first <= joined[-1][1]:
            joined[-1] = joined[-1][0], max(last, joined[-1][1])
        else:
            joined.append((first, last))
    return tuple(joined)


def within(spans: Spans, whole: Spans) -> Spans:
    """Return the positions of ``spans`` in the concatenated tokens of the spans ``whole``.

    ``whole`` contains all of ``spans``.
    """
    places = []
    before = 0
    for first, last in whole:
        places += [(before + s - first, before + e - first) for s, e in spans if first <= s and e <= last]
        before += last - first
    return union(places)
