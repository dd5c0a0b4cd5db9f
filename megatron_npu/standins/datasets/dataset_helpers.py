"""Stub for ``megatron.data.helpers``, upstream's C++ extension that builds dataset indices.

Upstream compiles the extension with make, inside the checkout, when training starts. This module computes
exactly the same values, so index files of one can be used with the other. Formats and names are those of
``megatron/data/helpers.cpp`` in 285068c8. If a compiler is available, ``compiled_dataset_indices`` does the
work. Otherwise, Python and numpy are used: sentences are looked up by bisection in cumulative lengths, so the
work grows with the number of samples, not with the number of sentences.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron_npu.standins.datasets import compiled_dataset_indices as compiled

LONG_SENTENCE = 512  # tokens; a document with a longer sentence is left out
_FEW_DATASETS = 12  # numpy takes longer to be called than Python to look at so many

Int64 = NDArray[np.int64]


def build_sample_idx(
    sizes: NDArray[np.int32],
    doc_idx: NDArray[np.int32],
    seq_length: int,
    num_epochs: int,
    tokens_per_epoch: int,
) -> NDArray[np.int32]:
    """Return the result of ``build_sample_idx_int64`` with default arguments and dtype int32."""
    return build_sample_idx_int64(sizes, doc_idx, seq_length, num_epochs, tokens_per_epoch).astype(np.int32)


def build_sample_idx_int64(
    sizes: NDArray[np.int32],
    document_idx: NDArray[np.int32],
    seq_length: int,
    num_epochs: int,
    tokens_per_epoch: int,
    drop_last_partial_sequence: bool = True,
    add_extra_token_to_sequence: int = 1,
) -> Int64:
    """Return the position at which each sample of a GPT dataset starts in the documents of all epochs.

    The name and the last two arguments are megatron-core's; 285068c8 always uses their defaults.

    Args:
        sizes: ``[documents]``, the number of tokens in each document.
        document_idx: ``[documents * epochs]``, the documents in order.
        seq_length: the number of tokens from the beginning of a sample to that of the next.
        num_epochs, tokens_per_epoch: their product is the number of tokens.
        drop_last_partial_sequence: whether to leave out a last sample that is too short.
        add_extra_token_to_sequence: 1 if a sample has one more token, the label of the last token; otherwise
            0.

    Returns:
        ``[samples + 1, 2]``: the index into ``document_idx``, and the offset in that document.
    """
    extra, tokens = add_extra_token_to_sequence, num_epochs * tokens_per_epoch
    if drop_last_partial_sequence:
        samples = (tokens - extra) // seq_length
    else:  # upstream divides in single precision
        samples = int(np.ceil(np.float32(tokens - extra) / np.float32(seq_length)))
    found = compiled.samples_of_documents(sizes, document_idx, samples, seq_length, extra)
    if found is not None:
        return found
    ends = np.cumsum(sizes[document_idx], dtype=np.int64)
    first_tokens = np.arange(samples + 1, dtype=np.int64) * seq_length
    # a sample ends in the first document that has its last token, and the next begins `extra` before its end
    documents = np.searchsorted(ends, first_tokens + extra, side="left")
    beyond = documents == len(ends)
    documents[beyond] = len(ends) - 1
    offsets = first_tokens - np.concatenate([[0], ends[:-1]])[documents]
    offsets[beyond] = sizes[document_idx[-1]] - extra
    documents[0] = offsets[0] = 0  # even where the first document is empty
    return np.stack([documents, offsets], axis=1)


def build_blending_indices(
    dataset_index: NDArray[np.uint8],
    dataset_sample_index: Int64,
    weights: NDArray[np.float64],
    num_datasets: int,
    size: int,
    verbose: bool,
) -> None:
    """Determine, for each of ``size`` samples, the dataset from which it comes and its index in that dataset.

    Each sample is taken from the dataset that is furthest behind its weight, and from the first one in a tie.

    Args:
        dataset_index: ``[size]``, filled by this function.
        dataset_sample_index: ``[size]``, filled by this function.
        weights: ``[num_datasets]``, which sum to 1.
    """
    shares = np.asarray(weights[:num_datasets], np.float64)
    if compiled.blends(dataset_index, dataset_sample_index, num_datasets, size):
        taken = compiled.blend(dataset_index, dataset_sample_index, shares, size).tolist()
    else:
        taken = _blend(dataset_index, dataset_sample_index, shares, size)
    if verbose:
        achieved = [count / max(size, 1) for count in taken]
        print(
            f"> blending {num_datasets} datasets: weights {shares.tolist()}, achieved {achieved}", flush=True
        )


def _blend(
    dataset_index: NDArray[Any], dataset_sample_index: Int64, shares: NDArray[np.float64], size: int
) -> list[int]:
    """Blend datasets in plain Python, or with numpy if there are many datasets.

    Return the number of samples of each dataset.
    """
    if len(shares) > _FEW_DATASETS:
        return _blend_of_many(dataset_index, dataset_sample_index, shares, size)
    weights, taken = shares.tolist(), [0] * len(shares)
    for sample in range(size):
        position = float(max(sample, 1))
        lags = [share * position - count for share, count in zip(weights, taken, strict=True)]
        chosen = lags.index(max(lags))
        dataset_index[sample] = chosen
        dataset_sample_index[sample] = taken[chosen]
        taken[chosen] += 1
    return taken


def _blend_of_many(
    dataset_index: NDArray[Any], dataset_sample_index: Int64, shares: NDArray[np.float64], size: int
) -> list[int]:
    taken, lags = np.zeros_like(shares), np.empty_like(shares)
    multiply, subtract, behind = np.multiply, np.subtract, lags.argmax
    for sample in range(size):
        multiply(shares, float(max(sample, 1)), lags)
        subtract(lags, taken, lags)
        chosen = behind()
        dataset_index[sample] = chosen
        dataset_sample_index[sample] = taken[chosen]
        taken[chosen] += 1
    return [int(count) for count in taken]


def build_mapping(
    docs: Int64,
    sizes: NDArray[np.int32],
    num_epochs: int,
    max_num_samples: int,
    max_seq_length: int,
    short_seq_prob: float,
    seed: int,
    verbose: bool,
    min_num_sent: int,
) -> NDArray[np.generic]:
    """Return the samples of a BERT or T5 dataset in shuffled order.

    Args:
        docs: ``[documents + 1]``, the first sentence of each document.
        sizes: ``[sentences]``, the number of tokens in each sentence.
        num_epochs, max_num_samples: the first limit that is reached ends the work, at the end of an epoch.
        max_seq_length: the target number of tokens in a sample.
        short_seq_prob: the probability that a sample has a smaller target.
        seed: the seed of both random sequences.
        verbose: whether to print the number of samples.
        min_num_sent: the minimum number of sentences in a sample.

    Returns:
        ``[samples, 3]``: the first sentence, the sentence after the last, and the target number of tokens.
    """
    ratio = math.floor(1.0 / short_seq_prob + 0.5) if short_seq_prob > 0 else 0  # C's round()
    found = compiled.rows_of_sentences(
        docs,
        sizes,
        None,
        epochs=num_epochs,
        most=max_num_samples,
        length=max_seq_length,
        ratio=ratio,
        seed=seed,
        least=min_num_sent,
    )
    if found is not None:
        return _told(found, verbose)
    numbers = _random32(seed)

    def target_length() -> int:
        if ratio == 0:
            return max_seq_length
        number = next(numbers)
        return 2 + number % (max_seq_length - 1) if number % ratio == 0 else max_seq_length

    spans = _usable_documents(docs, sizes, min_num_sent, checked_from=2)
    before = _tokens_before(sizes)
    samples: list[tuple[int, int, int]] = []
    for _ in range(num_epochs):
        if len(samples) >= max_num_samples or not spans:
            break
        for _, first, last in spans:
            target = target_length()
            while first < last:
                end = _end_of_sample(before, first, last, target, min_num_sent, left_over=1)
                samples.append((first, end, target))
                first, target = end, target_length()
    return _told(_shuffled(samples, 3, sizes, seed), verbose)


def build_blocks_mapping(
    docs: Int64,
    sizes: NDArray[np.int32],
    titles_sizes: NDArray[np.int32],
    num_epochs: int,
    max_num_samples: int,
    max_seq_length: int,
    seed: int,
    verbose: bool,
    use_one_sent_blocks: bool,
) -> NDArray[np.generic]:
    """Return the blocks of an ICT or REALM dataset in shuffled order.

    For the other arguments, see ``build_mapping``.

    Args:
        titles_sizes: ``[documents]``, the number of tokens in each title, for which a block leaves room.
        use_one_sent_blocks: whether a block may be a single sentence; otherwise it has two or more.

    Returns:
        ``[blocks, 4]``: the first sentence, the sentence after the last, the document, and the index of the
        block in its epoch.
    """
    least = 1 if use_one_sent_blocks else 2
    found = compiled.rows_of_sentences(
        docs,
        sizes,
        titles_sizes,
        epochs=num_epochs,
        most=max_num_samples,
        length=max_seq_length,
        ratio=0,
        seed=seed,
        least=least,
    )
    if found is not None:
        return _told(found, verbose)
    spans = _usable_documents(docs, sizes, least, checked_from=least)
    before = _tokens_before(sizes)
    blocks: list[tuple[int, int, int, int]] = []
    for _ in range(num_epochs):
        if len(blocks) >= max_num_samples or not spans:
            break
        before_epoch = len(blocks)
        for document, first, last in spans:
            target = max_seq_length - int(titles_sizes[document])
            while first < last:
                end = _end_of_sample(before, first, last, target, least, left_over=least - 1)
                blocks.append((first, end, document, len(blocks) - before_epoch))
                first = end
    return _told(_shuffled(blocks, 4, sizes, seed), verbose)


def _tokens_before(sizes: NDArray[np.int32]) -> Int64:
    """Return the number of tokens that precede each sentence, ``[sentences + 1]``."""
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(sizes, dtype=np.int64)])


def _usable_documents(
    docs: Int64, sizes: NDArray[np.int32], least: int, checked_from: int
) -> list[tuple[int, int, int]]:
    """Return (document, first sentence, end sentence) for each document from which samples can be made.

    A document must have at least ``least`` sentences; one with ``checked_from`` or more must not contain a
    long sentence.
    """
    long_before = np.concatenate([[0], np.cumsum(sizes > LONG_SENTENCE)])
    first, last = docs[:-1], docs[1:]
    count = last - first
    has_long = (long_before[last] > long_before[first]) & (count >= checked_from)
    usable = np.flatnonzero((count >= max(least, 1)) & ~has_long)
    return [(int(document), int(first[document]), int(last[document])) for document in usable]


def _end_of_sample(before: Int64, first: int, last: int, target: int, least: int, *, left_over: int) -> int:
    """Return the sentence that follows the sample beginning with ``first``.

    The sample has at least ``target`` tokens and ``least`` sentences, and leaves more than ``left_over``
    sentences of the document. If that is not possible, it takes the rest of the document.
    """
    reached = np.searchsorted(before[first : last + 1], before[first] + target, side="left")
    end = first + max(int(reached), least, 1)
    return end if last - end > left_over else last


def _told(rows: NDArray[np.generic], verbose: bool) -> NDArray[np.generic]:
    if verbose:
        print(f"   will create mapping for {len(rows)} samples", flush=True)
    return rows


def _shuffled(
    rows: Sequence[tuple[int, ...]], columns: int, sizes: NDArray[np.int32], seed: int
) -> NDArray[np.generic]:
    """Shuffle the rows by the Fisher-Yates algorithm with ``std::mt19937_64(seed + 1)``, and return them."""
    dtype = np.uint64 if len(sizes) > np.iinfo(np.uint32).max else np.uint32
    order = list(range(len(rows)))
    numbers = _random64(seed + 1)
    for last in range(len(rows) - 1, 0, -1):
        other = next(numbers) % (last + 1)
        order[last], order[other] = order[other], order[last]
    return np.array(rows, dtype=dtype).reshape(-1, columns)[order]


def _random32(seed: int) -> Iterator[int]:
    """Yield the random numbers of ``std::mt19937(seed)``.

    This is numpy's MT19937 with legacy seeding.
    """
    generator = np.random.MT19937()
    generator._legacy_seeding(seed)
    while True:
        yield from generator.random_raw(4096).tolist()


_WORDS, _MIDDLE = 312, 156  # of MT19937-64 (Nishimura 2000): size of the state, distance of the recurrence
_UPPER, _LOWER = np.uint64(0xFFFFFFFF80000000), np.uint64(0x7FFFFFFF)
_TWIST = np.uint64(0xB5026F5AA96619E9)


def _random64(seed: int) -> Iterator[int]:
    """Yield the random numbers of ``std::mt19937_64(seed)``, a generator that numpy does not have."""
    state = _seeded_state(seed)
    while True:
        # The first half needs old words only, the second the first half's new ones, the last word both.
        _twist(state, slice(0, _MIDDLE), slice(_MIDDLE, _WORDS))
        _twist(state, slice(_MIDDLE, _WORDS - 1), slice(0, _MIDDLE - 1))
        _twist(state, slice(_WORDS - 1, _WORDS), slice(_MIDDLE - 1, _MIDDLE))
        yield from _tempered(state).tolist()


def _seeded_state(seed: int) -> NDArray[np.uint64]:
    words = [seed & 0xFFFFFFFFFFFFFFFF]
    for position in range(1, _WORDS):
        last = words[-1]
        words.append((6364136223846793005 * (last ^ (last >> 62)) + position) & 0xFFFFFFFFFFFFFFFF)
    return np.array(words, dtype=np.uint64)


def _twist(state: NDArray[np.uint64], target: slice, distant: slice) -> None:
    following = np.arange(target.start + 1, target.stop + 1) % _WORDS
    mixed = (state[target] & _UPPER) | (state[following] & _LOWER)
    state[target] = state[distant] ^ (mixed >> np.uint64(1)) ^ ((mixed & np.uint64(1)) * _TWIST)


def _tempered(state: NDArray[np.uint64]) -> NDArray[np.uint64]:
    words = state ^ ((state >> np.uint64(29)) & np.uint64(0x5555555555555555))
    words ^= (words << np.uint64(17)) & np.uint64(0x71D67FFFEDA60000)
    words ^= (words << np.uint64(37)) & np.uint64(0xFFF7EEE000000000)
    return words ^ (words >> np.uint64(43))
