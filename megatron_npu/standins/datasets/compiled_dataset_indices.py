"""Call the compiled ``dataset_indices.cpp``, which gives the results of ``dataset_helpers`` in less time."""

from __future__ import annotations

import ctypes
import functools
import logging
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron_npu.base import settings
from megatron_npu.base.errors import UsageError
from megatron_npu.process import cached_library, user_cache

SOURCE = Path(__file__).with_name("dataset_indices.cpp")
# Nothing is fused: the rounding of each product decides which dataset is next.
_FLAGS = (
    *("-std=c++17", "-O3", "-march=native", "-ffp-contract=off", "-Wall", "-Wextra", "-Wno-psabi"),
    *("-fno-math-errno", "-fno-trapping-math", "-shared", "-fPIC"),
)
_LANES = 8  # kLanes
_AT_A_TIME = 1 << 21  # samples: Ctrl-C is heard between them
_BLENDS = {np.dtype(np.uint8): "blend_uint8", np.dtype(np.int16): "blend_int16"}
_logger = logging.getLogger(__name__)

Int64 = NDArray[np.int64]


class _Blend(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("weights", "taken", "limits")),
        *((name, ctypes.c_int64) for name in ("datasets", "room")),
    )


class _Sentences(ctypes.Structure):
    _fields_ = (
        ("docs", ctypes.c_void_p),
        ("documents", ctypes.c_int64),
        ("sizes", ctypes.c_void_p),
        ("titles", ctypes.c_void_p),
        ("epochs", ctypes.c_int64),
        ("most", ctypes.c_uint64),
        *((name, ctypes.c_int64) for name in ("length", "ratio", "seed", "least")),
    )


@functools.cache
def library() -> ctypes.CDLL | None:
    """Return the library of compiled functions, or None if compiling is disabled or fails.

    A failure is logged.
    """
    if not settings.COMPILED.enabled():
        return None
    folder, without = user_cache.root() / "datasets", f"set {settings.COMPILED.name}=0"
    try:
        found = cached_library.load(cached_library.Recipe(folder, (SOURCE,), (), _FLAGS, (), without))
    except UsageError as error:
        _logger.warning(
            "dataset indices are computed in Python, which takes minutes for blends of many datasets: %s. "
            "%s.",
            error.given,
            error.remedy,
        )
        return None
    _declare(found)
    return found


def _declare(found: ctypes.CDLL) -> None:
    pointer, number = ctypes.c_void_p, ctypes.c_int64
    for blend in _BLENDS.values():
        getattr(found, blend).argtypes = [ctypes.POINTER(_Blend), number, number, pointer, pointer]
        getattr(found, blend).restype = None
    found.samples_of_documents.argtypes = [pointer, pointer, *[number] * 4, pointer]
    found.samples_of_documents.restype = None
    size = ctypes.POINTER(number)
    found.make_rows.argtypes = [ctypes.POINTER(_Sentences), ctypes.c_int, ctypes.c_int, size]
    found.make_rows.restype = pointer
    found.take_rows.argtypes = [pointer, ctypes.c_int, pointer]
    found.take_rows.restype = None
    found.size_of_blend.restype = found.size_of_sentences.restype = number
    sizes = found.size_of_blend(), found.size_of_sentences()
    assert sizes == (ctypes.sizeof(_Blend), ctypes.sizeof(_Sentences)), sizes


def blend(
    dataset_index: NDArray[Any],
    dataset_sample_index: NDArray[Any],
    weights: NDArray[np.float64],
    size: int,
    limits: NDArray[np.int64] | None = None,
) -> Int64:
    """Fill the index arrays of a blend of datasets.

    Return the number of samples of each dataset.

    The library must be available.

    Args:
        dataset_index: ``[size]`` or more, of a dtype for which ``blends`` returns True.
        dataset_sample_index: ``[size]`` or more, int64.
        weights: ``[datasets]``, at least one.
        size: the number of samples.
        limits: ``[datasets]``, the number of samples in each dataset, ``size`` in total. If None, there are
            no limits.
    """
    count = len(weights)
    room = -(-count // _LANES) * _LANES
    # what fills up the last lanes is never taken, nor is a dataset without samples
    own, taken, ends = np.zeros(room), np.full(room, np.inf), np.zeros(room)
    own[:count], taken[:count] = weights, 0.0
    if limits is not None:
        ends[:count] = limits
        own[:count][limits == 0], taken[:count][limits == 0] = 0.0, np.inf
    loaded = library()
    assert loaded is not None
    last = ends.ctypes.data if limits is not None else None
    given = _Blend(own.ctypes.data, taken.ctypes.data, last, count, room)
    function = getattr(loaded, _BLENDS[dataset_index.dtype])
    for begin in range(0, size, _AT_A_TIME):
        end = min(begin + _AT_A_TIME, size)
        function(given, begin, end, dataset_index.ctypes.data, dataset_sample_index.ctypes.data)
    return taken[:count].astype(np.int64) if limits is None else limits


def blends(dataset_index: NDArray[Any], dataset_sample_index: NDArray[Any], datasets: int, size: int) -> bool:
    """Return True if ``blend`` is able to fill the given arrays."""
    return (
        datasets > 0
        and dataset_index.dtype in _BLENDS
        and dataset_sample_index.dtype == np.int64
        and all(_is_room(array, size) for array in (dataset_index, dataset_sample_index))
        and library() is not None
    )


def _is_room(array: NDArray[Any], size: int) -> bool:
    return array.ndim == 1 and len(array) >= size and array.flags.c_contiguous and array.flags.writeable


def samples_of_documents(
    sizes: NDArray[Any], order: NDArray[Any], samples: int, length: int, extra: int
) -> Int64 | None:
    """Return the positions at which samples begin, ``[samples + 1, 2]``.

    Return None if the Python implementation is required.

    Args:
        sizes: ``[documents]``, the number of tokens in each document.
        order: the document at each position.
        samples: the number of samples.
        length: the number of tokens from the beginning of one sample to that of the next.
        extra: the number of additional tokens per sample.
    """
    loaded = library()
    if loaded is None or not len(order) or samples < 0:
        return None
    sizes, order = _contiguous(sizes, np.int32), _contiguous(order, np.int32)
    _require(order.min() >= 0 and order.max() < len(sizes), "documents", len(sizes))
    result = np.empty((samples + 1, 2), np.int64)
    arguments = len(order), samples, length, extra, result.ctypes.data
    loaded.samples_of_documents(sizes.ctypes.data, order.ctypes.data, *arguments)
    return result


def rows_of_sentences(
    docs: NDArray[Any],
    sizes: NDArray[Any],
    titles: NDArray[Any] | None,
    *,
    epochs: int,
    most: int,
    length: int,
    ratio: int,
    seed: int,
    least: int,
) -> NDArray[np.generic] | None:
    """Return samples of sentences, ``[samples, 3]``, or blocks, ``[blocks, 4]``, in shuffled order.

    Return None if the Python implementation must be used.

    Args:
        docs: ``[documents + 1]``, the first sentence of each document.
        sizes: ``[sentences]``, the number of tokens in each sentence.
        titles: ``[documents]``, the number of tokens in each title, if blocks are requested; None if samples
            are requested.
        epochs, most: limits on epochs and samples; the first limit that is reached ends the work after its
            epoch.
        length: the target number of tokens in a sample.
        ratio: one in this many samples has a smaller target; with 0, no sample has.
        seed: the seed of the random numbers.
        least: the minimum number of sentences in a sample.
    """
    loaded = library()
    if loaded is None or length < 2 or least < 1 or most < 0 or len(docs) < 2:
        return None
    wide = len(sizes) > np.iinfo(np.uint32).max
    docs, sizes = _documents_of_sentences(docs, sizes)
    titles = None if titles is None else _titles_of(docs, titles)
    where = None if titles is None else titles.ctypes.data
    given = _Sentences(
        *(docs.ctypes.data, len(docs) - 1, sizes.ctypes.data, where, epochs, most),
        *(length, ratio, seed, least),
    )
    size = ctypes.c_int64()
    made = loaded.make_rows(given, titles is not None, wide, ctypes.byref(size))
    if made is None:
        raise MemoryError("there is not enough memory to index the sentences of the dataset")
    columns = 3 if titles is None else 4
    result = np.empty((size.value // columns, columns), np.uint64 if wide else np.uint32)
    loaded.take_rows(made, wide, result.ctypes.data)
    return result


def _documents_of_sentences(docs: NDArray[Any], sizes: NDArray[Any]) -> tuple[NDArray[Any], NDArray[Any]]:
    """Check the arrays of documents and sentences, and return them in the form that the C++ code requires."""
    docs, sizes = _contiguous(docs, np.int64), _contiguous(sizes, np.int32)
    _require(docs[0] >= 0 and bool((docs[1:] >= docs[:-1]).all()), "documents in order", docs[:4])
    _require(docs[-1] <= len(sizes), "sentences", len(sizes))
    return docs, sizes


def _titles_of(docs: NDArray[Any], titles: NDArray[Any]) -> NDArray[Any]:
    titles = _contiguous(titles, np.int32)
    _require(len(titles) >= len(docs) - 1, "titles, one per document", len(titles))
    return titles


def _contiguous(array: NDArray[Any], dtype: type[np.generic]) -> NDArray[Any]:
    return np.ascontiguousarray(array, dtype=dtype)


def _require(fits: bool | np.bool_, what: str, found: object) -> None:
    if not fits:
        raise UsageError(
            f"the index of a dataset does not match its {what} ({found}); its files must belong to the same "
            "dataset. Create the dataset again."
        )
