"""Skip empty dataset splits that are not used, and raise an error for empty splits that are used.

Patches ``megatron.core.datasets.blended_megatron_dataset_builder``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from megatron_npu.adaptors.megatron_core.decorators import NOT_FIXED, around
from megatron_npu.adaptors.megatron_core.options.script_arguments import script_arguments
from megatron_npu.base.errors import UsageError

_IN_WORDS = {"train": "training", "valid": "validation", "test": "the test at the end"}


class Part(NamedTuple):
    """The arguments that upstream passes to the dataset class of one split, in upstream's order.

    Attributes:
        source: the opened data.
        prefix: the path prefix of its files; None for generated data.
        documents: the indices of the split's documents; None if an existing index contains them.
        size: the number of samples requested; None means one pass over the data.
        split: upstream's enumerator ``train``, ``valid`` or ``test``.
        config: the dataset's configuration; its ``split`` is the value of the flag.
    """

    source: Any
    prefix: str | None
    documents: Any
    size: int | None
    split: Any
    config: Any


@around(
    "megatron.core.datasets.blended_megatron_dataset_builder:"
    "BlendedMegatronDatasetBuilder.build_generic_dataset",
    upstream_bug=True,
    until=NOT_FIXED,
    why="for a split without documents, such as 1 in 1000 of 100 documents, upstream counts the passes "
    "needed for the requested samples, which never suffice: an endless loop at 100 % of a core",
)
def without_empty_parts(
    original: Callable[..., Any],
    cls: Any,
    is_built_on_rank: Callable[[], bool],
    synchronize_ranks: bool,
    *args: Any,
) -> Any:
    """Skip the construction of a dataset for a split that is empty and not used.

    All ranks still reach upstream's barriers.
    """
    if _is_empty(cls, args) and is_built_on_rank():
        cls = _nothing
    return original(cls, is_built_on_rank, synchronize_ranks, *args)


def _is_empty(cls: Any, args: tuple[Any, ...]) -> bool:
    """Return True if the dataset is an empty split or a blend that includes an empty split.

    Raises:
        UsageError: the empty split is read.
    """
    from megatron.core.datasets.blended_dataset import BlendedDataset
    from megatron.core.datasets.megatron_dataset import MegatronDataset

    if not isinstance(cls, type):
        return False
    if issubclass(cls, BlendedDataset):
        return any(dataset is None for dataset in args[0])
    if not issubclass(cls, MegatronDataset):
        return False
    part = Part(*args)
    if part.prefix is None or part.documents is None or part.size is None or len(part.documents):
        return False
    if _is_read(part):
        kind: Any = cls
        _refuse(part, kind.numel_low_level_dataset(part.source))
    return True


def _is_read(part: Part) -> bool:
    if part.split.name == "train" and getattr(script_arguments(), "skip_train", False):
        return False
    return bool(part.size)


def _refuse(part: Part, documents: int) -> None:
    """Raise an error that names the empty split and explains how to avoid it.

    Raises:
        UsageError: always.
    """
    alone = part.split.name == "train" or script_arguments() is None
    raise UsageError(
        f"--split {part.config.split!r} leaves none of the {documents} documents in {part.prefix} for "
        f"{_IN_WORDS[part.split.name]}, but each split that is used must have at least one. Provide more "
        "documents or another split" + ("." if alone else ", or pass --eval-iters 0.")
    )


def _nothing(*_: Any) -> None:
    """Return None in place of a dataset."""
