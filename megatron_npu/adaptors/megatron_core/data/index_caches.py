"""Patch ``megatron.core.datasets`` to load cached index files without pickle, and to rebuild damaged ones.

Also patches ``megatron.legacy.data`` in the Megatron-LM trees that have it: its indices are read without
pickle.
"""

from __future__ import annotations

import logging
import platform
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy
import torch.distributed as dist

from megatron_npu.adaptors.megatron_core.data import private_caches
from megatron_npu.adaptors.megatron_core.decorators import NOT_FIXED, around, constant, records
from megatron_npu.adaptors.shared import data, questions
from megatron_npu.base.errors import UsageError
from megatron_npu.safe_files import safe_numpy, safe_pickle
from megatron_npu.safe_files.safe_numpy import DamagedIndexError

logger = logging.getLogger(__name__)

_PICKLES = (
    "upstream loads index files with allow_pickle=True, which executes any code in them, and writes "
    "them in place"
)
for _module in ("gpt_dataset", "blended_dataset", "masked_dataset"):
    constant(
        f"megatron.core.datasets.{_module}:numpy",
        safe_numpy,
        why=_PICKLES,
        upstream_bug=True,
        until=NOT_FIXED,
    )
    constant(
        f"megatron.core.datasets.{_module}:safe_numpy_load",
        safe_numpy.load,
        versions=">=0.19",
        why=(
            "upstream's reader, used instead of numpy for index files, unpickles tensors from them, and a"
            " truncated file ends the training"
        ),
    )
# ICT, REALM's retriever and T5 of --use-legacy-models
for _module in ("dataset_utils", "biencoder_dataset_utils", "realm_dataset_utils"):
    constant(
        f"megatron.legacy.data.{_module}:np",
        safe_numpy,
        versions="<0.17",
        why=_PICKLES,
        upstream_bug=True,
        until="0.17, which has no such modules",
    )
constant(
    "megatron.legacy.data.realm_index:pickle",
    safe_pickle,
    versions="<0.17",
    why=data.WHY_EMBEDDINGS,
    upstream_bug=True,
    until="0.17, which has no such module",
)
questions.connect(
    records, "tasks.orqa.unsupervised.nq", versions="==0.12.*", until="0.13, which has no such tasks"
)
_PART = 1 << 20  # entries that are looked at together


@around(
    "megatron.core.datasets.gpt_dataset:GPTDataset._build_document_sample_shuffle_indices",
    why="a cached index that is truncated or points outside the data ends the training with a traceback, or "
    "makes it train on wrong tokens",
    upstream_bug=True,
    until=NOT_FIXED,
)
def sound_gpt_indices(original: Callable[[Any], Any], self: Any) -> Any:
    """Check the cached indices of a GPT dataset, and rebuild them if they are invalid.

    Raises:
        UsageError: they are damaged, and with ``--dataloader-fast-cache-load`` upstream builds none.
    """
    fast = getattr(self.config, "fast_cache_load", False)
    try:
        return _sound(lambda: original(self), lambda indices: _check_gpt(self, *indices), rebuilds=not fast)
    except DamagedIndexError as error:
        if not fast:
            raise
        remedy = "Run once without --dataloader-fast-cache-load, which builds it again."
        raise UsageError(error.given, remedy=remedy) from error


@around(
    "megatron.core.datasets.blended_dataset:BlendedDataset._build_indices",
    why="same as for the indices of a GPT dataset",
    upstream_bug=True,
    until=NOT_FIXED,
)
def sound_blending_indices(original: Callable[[Any], Any], self: Any) -> Any:
    """Check the cached indices of a blended dataset, and rebuild them if they are invalid."""
    return _sound(lambda: original(self), lambda indices: _check_blend(self, *indices))


@around(
    "megatron.core.datasets.masked_dataset:MaskedWordPieceDataset._build_sample_index",
    why="same as for the indices of a GPT dataset",
    upstream_bug=True,
    until=NOT_FIXED,
)
def sound_masked_index(original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
    """Rebuild the cached index of a masked dataset if it cannot be read."""
    return _sound(lambda: original(self, *args, **kwargs), lambda index: None)


def _sound(build: Callable[[], Any], check: Callable[[Any], None], *, rebuilds: bool = True) -> Any:
    """Return the indices that upstream builds or reads, deleting and rebuilding a damaged cache if possible.

    On a machine that does not see the files of rank 0, one of its ranks builds them again. Only the first
    rank checks the indices, because upstream waits for it before the other ranks read them.
    """
    first = not dist.is_initialized() or dist.get_rank() == 0
    try:
        indices = build() if first else private_caches.read(build)
        if first:
            check(indices)
    except DamagedIndexError as error:
        if not (first and rebuilds):
            raise
        logger.warning("%s; rebuilding it", error.given)
        for file in error.file.parent.glob(f"{error.file.name.rpartition('-')[0]}-*"):
            file.unlink()
        return build()
    except FileNotFoundError as error:
        if first:
            raise
        raise _unseen(Path(error.filename)) from error
    return indices


def _unseen(file: Path) -> UsageError:
    """Return the error for a rank that does not see a file that rank 0 has written."""
    return UsageError(
        f"{file}, which rank 0 wrote, is not visible on {platform.node()} (rank {dist.get_rank()}); the "
        "folder for dataset indices must be shared by all machines. Pass a shared folder with "
        "--data-cache-path, or copy the files from rank 0's machine."
    )


def _check_gpt(dataset: Any, documents: Any, samples: Any, shuffled: Any) -> None:
    """Check the cached indices of a ``GPTDataset``.

    Args:
        dataset: the dataset; its ``indices`` are the documents of its split, or None with
            ``--dataloader-fast-cache-load``, which always takes all documents.
        documents: [documents of all epochs], each the index of a document.
        samples: [samples + 1, 2], where each sample begins: the index into ``documents``, and the token in
            that document.
        shuffled: [samples], each the index of a sample.

    Raises:
        DamagedIndexError: an index is invalid; the error names the file.
    """
    if not isinstance(samples, numpy.memmap):  # built just now, or read later
        return
    _require(documents, documents.ndim == 1 and documents.size > 0)
    _require(samples, samples.ndim == 2 and samples.shape[1:] == (2,) and len(samples) > 1)
    _require(shuffled, shuffled.ndim == 1)
    lengths = dataset.dataset.sequence_lengths
    part = dataset.indices
    first, last = (0, len(lengths) - 1) if part is None else (numpy.min(part), numpy.max(part))
    for some in _parts(documents):
        _require(documents, _within(some, first, last))
    for some in _parts(samples):
        places, tokens = some[:, 0], some[:, 1]
        _require(samples, _within(places, 0, len(documents) - 1) and tokens.min() >= 0)
        _require(samples, bool((tokens <= lengths[documents[places]]).all()))
        _require(samples, bool((numpy.diff(places.astype(numpy.int64)) >= 0).all()))
    for some in _parts(shuffled):
        _require(shuffled, _within(some, 0, len(samples) - 2))


def _check_blend(blend: Any, numbers: Any, samples: Any) -> None:
    """Check the cached indices of a ``BlendedDataset``.

    Args:
        blend: the dataset, with its ``datasets``.
        numbers: [samples], each the index of a dataset.
        samples: [samples], each the index of a sample in that dataset.

    Raises:
        DamagedIndexError: an index is invalid; the error names the file.
    """
    if not isinstance(numbers, numpy.memmap):
        return
    sizes = numpy.array([len(dataset) for dataset in blend.datasets])
    _require(numbers, numbers.ndim == 1 and (blend.size is None or len(numbers) == blend.size))
    _require(samples, samples.shape == numbers.shape)
    for some, those in zip(_parts(numbers), _parts(samples), strict=True):
        _require(numbers, _within(some, 0, len(sizes) - 1))
        _require(samples, those.min() >= 0 and bool((those < sizes[some]).all()))


def _parts(index: numpy.ndarray) -> Iterator[numpy.ndarray]:
    return (numpy.asarray(index[start : start + _PART]) for start in range(0, len(index), _PART))


def _within(values: numpy.ndarray, least: int, most: int) -> bool:
    return numpy.issubdtype(values.dtype, numpy.integer) and values.min() >= least and values.max() <= most


def _require(index: numpy.memmap, sound: bool) -> None:
    if not sound:
        raise DamagedIndexError(Path(str(index.filename)), "the index file contains indices outside the data")
