"""Restrict the types that torch's reader of distributed checkpoints may unpickle.

``torch.distributed.checkpoint`` unpickles two things without restrictions: ``.metadata``, and non-tensors
inside a ``.distcp`` file (such as random generator states). While the guard is on, torch's two modules use a
``pickle`` and a ``torch.load`` that build only listed types. All readers of such checkpoints use these
modules: the built-in trainer, megatron-core's stock scripts and their tools.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib
import io
import logging
import pickle
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import IO, Any

import torch
from torch import serialization

from megatron_npu.base import files
from megatron_npu.base.errors import UsageError
from megatron_npu.base.object_view import View
from megatron_npu.base.replaced import Replaced
from megatron_npu.safe_files import expanded_size, safe_load
from megatron_npu.safe_files.data_unpickler import DataUnpickler

_OF_MEGATRON = "megatron.core.dist_checkpointing.strategies.torch"
# Module -> what ``.metadata`` may name of it. Older torch kept some of it in other modules.
_OF_METADATA = {
    "torch.distributed.checkpoint.metadata": "Metadata TensorStorageMetadata BytesStorageMetadata "
    "ChunkStorageMetadata TensorProperties MetadataIndex StorageMeta _MEM_FORMAT_ENCODING",
    "torch.distributed._shard.sharded_tensor.metadata": "TensorProperties MEM_FORMAT_ENCODING",
    "torch.distributed.checkpoint.filesystem": "_StorageInfo _StoragePrefix",
    "torch.distributed.checkpoint.planner": "SavePlan WriteItem WriteItemType BytesIOWriteData "
    "TensorWriteData",
    _OF_MEGATRON: "MCoreSavePlan MCoreMetadata",
    "torch.serialization": "_get_layout",
    "torch": "Size",
    "pathlib": "PosixPath",
    "collections": "OrderedDict",
}
_MANY = 1000  # a file may be larger than memory; a name is not
_refusals: list[UsageError] = []  # the last one
_replaced = Replaced()


def refusal(what: str, reason: str) -> UsageError:
    """Return the error that reports part of a checkpoint as rejected.

    The error is also stored for ``last_refusal``.

    Args:
        what: the part.
        reason: the reason, such as ``it names os.system``.
    """
    error = UsageError(
        f"{what} cannot be loaded safely: {reason[:_MANY]}; only types that torch and Megatron write are "
        "accepted",
        remedy="Do not load a checkpoint that you do not trust; MEGATRON_NPU_TRUST_FILES=1 lets it run code.",
    )
    _refusals[:] = [error]
    return error


def last_refusal() -> UsageError | None:
    """Return the error that has been stored since the last call, or None.

    torch passes on only the message of an error.
    """
    return _refusals.pop() if _refusals else None


class _MetadataUnpickler(DataUnpickler):
    """Unpickler that constructs only the types that torch writes to ``.metadata``."""

    def find_class(self, module: str, name: str) -> Any:
        """Return a type that is listed in ``_OF_METADATA``.

        Raises:
            UsageError: the type is not allowed.
        """
        if name in _OF_METADATA.get(module, "").split():
            return getattr(importlib.import_module(module), name)
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        raise refusal("the checkpoint's .metadata", f"the file refers to {module}.{name}")

    def check_change(self, made: Any) -> None:
        """Check that state is set only on objects that this file has created.

        Raises:
            UsageError: ``made`` is something else, such as a class, which other code uses too.
        """
        # 0.16's MCoreSavePlan, with which it reads what 0.12 wrote, is no dataclass
        own = dataclasses.is_dataclass(made) or type(made).__module__ == _OF_MEGATRON
        if isinstance(made, type) or not own:
            raise refusal(
                "the checkpoint's .metadata",
                f"the file sets attributes of {made!r}, which a checkpoint must not do",
            )


def _load_metadata(stream: IO[bytes]) -> Any:
    try:
        metadata = _MetadataUnpickler(io.BytesIO(stream.read())).load()
        # 0.16 has a MCoreMetadata that is not one of torch's, to read what 0.15 wrote
        if not isinstance(getattr(metadata, "state_dict_metadata", None), dict):
            raise ValueError(
                f"the file must contain torch's Metadata, but it contains a {type(metadata).__name__}"
            )
        return metadata
    except (UsageError, OSError):
        raise
    except Exception as error:  # a broken pickle raises whatever it stumbles over
        reason = str(error).partition("\n")[0] or type(error).__name__
        raise ValueError(f"the checkpoint's .metadata is invalid: {reason[:_MANY]}") from error


def require_no_code(folder: Path) -> None:
    """Check that the index of a distributed checkpoint contains no code.

    Raises:
        UsageError: the index names a type that must not be built.
    """
    with contextlib.suppress(OSError, ValueError), files.regular(folder / ".metadata") as stream:
        _load_metadata(stream)


def stored_value(folder: Path, key: str) -> bytes:
    """Return the stored bytes of a non-tensor value in a distributed checkpoint, without unpickling them.

    Args:
        folder: the checkpoint's directory.
        key: the name of the value, such as ``common_state/shard_0_1``.

    Raises:
        UsageError: the index cannot be read or lacks the value, or no file contains it.
    """
    try:
        with files.regular(folder / ".metadata") as stream:
            index = _load_metadata(stream)
        place = next((place for name, place in index.storage_data.items() if name.fqn == key), None)
        if place is None:
            raise ValueError("the checkpoint's index lacks the position of a tensor")
        if Path(place.relative_path).name != place.relative_path:
            raise ValueError(f"{place.relative_path} is not a valid file name")
        file = folder / place.relative_path
        with files.regular(file) as stream:
            stream.seek(place.offset)
            return stream.read(min(place.length, file.stat().st_size))
    except (OSError, ValueError, TypeError, AttributeError, OverflowError) as error:
        raise refusal(f"{key} of the checkpoint {folder}", str(error) or type(error).__name__) from error


@functools.cache
def allow_values() -> None:
    """Allow torch to construct the values that Megatron scripts store beside tensors, as megatron-core 0.14
    does.

    Types that only a newer Megatron has, such as an enumeration of 0.18, become inert values, because weights
    do not need them.
    """
    for name in sorted(safe_load.OF_STOCK_SCRIPTS | {"_io.BytesIO"}):
        module, _, kind = name.rpartition(".")
        try:
            value = getattr(importlib.import_module(module), kind)
        except (ImportError, AttributeError):  # of another version of Megatron or numpy
            if name.startswith("megatron."):
                serialization.add_safe_globals([(type(kind, (safe_load.Inert,), {}), name)])
            continue
        serialization.add_safe_globals([value, (value, name)])


def _load_value(stream: Any, *args: Any, **kwargs: Any) -> Any:
    """Load a value other than a tensor from a Megatron checkpoint with ``torch.load``."""
    allow_values()
    return _load_plain(stream, *args, **kwargs)


def _load_plain(stream: Any, *args: Any, **kwargs: Any) -> Any:
    """Load a value other than a tensor with ``torch.load``."""
    try:
        with safe_load.weights_only():
            return torch.load(stream, *args, **{**kwargs, "weights_only": True})
    except (pickle.UnpicklingError, expanded_size.ExpandedSizeError) as error:
        raise refusal("a value in the checkpoint's .distcp files", safe_load.refused_name(error)) from error


def guard(of_megatron: bool = True) -> None:
    """Restrict torch's reader of distributed checkpoints to the listed types.

    Args:
        of_megatron: whether to also allow the types that Megatron scripts store beside tensors, for which
            Megatron is imported.
    """
    from torch.distributed.checkpoint import default_planner, filesystem

    release()
    expanded_size.check_in(_replaced)
    _put(filesystem, "pickle", load=_load_metadata)
    _put(default_planner, "torch", load=_load_value if of_megatron else _load_plain)


def _put(place: ModuleType, name: str, **own: Any) -> None:
    _replaced.set(place, name, View(getattr(place, name), **own))


@contextlib.contextmanager
def without_logged_tracebacks() -> Iterator[None]:
    """Prevent torch from logging a traceback for an unreadable ``.metadata`` file inside the ``with`` block.

    The error that it raises contains the same information.
    """
    root = logging.getLogger()
    root.addFilter(_not_of_torchs_loader)
    try:
        yield
    finally:
        root.removeFilter(_not_of_torchs_loader)


def _not_of_torchs_loader(record: logging.LogRecord) -> bool:
    return record.module != "state_dict_loader"


def guarding() -> bool:
    """Return True if torch's reader of distributed checkpoints is currently restricted."""
    return bool(_replaced)


def release() -> None:
    """Restore the original modules in torch's reader of distributed checkpoints."""
    _replaced.undo()
