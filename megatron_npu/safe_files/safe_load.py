"""Load files that were written by torch or pickle without executing code.

``read`` is for files of Megatron-LM: Megatron and Python types become inert values, and names that are not
listed are rejected. ``allowing`` is for upstream's own loading.
"""

from __future__ import annotations

import contextlib
import io
import os
import pickletools
import re
import zipfile
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import torch
from torch import serialization

from megatron_npu.base.errors import UsageError
from megatron_npu.safe_files import checked_numpy, expanded_size

# What the scripts of core_v0.12 to 0.19 put into a checkpoint beside numbers and texts: enumerations, plain
# holders and random states; the slice is a part of a flat buffer, in local checkpoints of up to 0.15.
OF_STOCK_SCRIPTS = frozenset(
    """
    argparse.Namespace builtins.slice types.SimpleNamespace pathlib.PosixPath signal.Signals
    megatron.core.enums.ModelType megatron.core.transformer.enums.AttnBackend
    megatron.core.transformer.enums.CudaGraphScope megatron.core.transformer.enums.CudaGraphModule
    megatron.core.transformer.enums.InferenceCudaGraphScope
    megatron.core.optimizer.optimizer_config.OptimizerConfig
    megatron.core.rerun_state_machine.RerunDiagnostic megatron.core.rerun_state_machine.RerunMode
    megatron.core.rerun_state_machine.RerunState
    megatron.core.dist_checkpointing.tensor_aware_state_dict.MCoreTensorAwareStateDict
    megatron.core.dist_checkpointing.mapping.ShardedObject
    megatron.core.dist_checkpointing.mapping.ShardedTensor
    numpy.core.multiarray._reconstruct numpy._core.multiarray._reconstruct numpy.core.multiarray.scalar
    numpy._core.multiarray.scalar numpy.ndarray numpy.dtype numpy.dtypes.UInt32DType
    numpy.dtypes.Int32DType numpy.dtypes.Int64DType numpy.dtypes.Float32DType numpy.dtypes.Float64DType
    """.split()
)
_NAMED = re.compile(r"\bGLOBAL (\S+)")  # in torch's refusal


class Inert:
    """Placeholder for a value whose class is not imported.

    Attributes:
        given: the arguments for the class.
    """

    def __init__(self, *given: object) -> None:
        self.given = given

    def __setstate__(self, state: object) -> None:
        """Ignore the state that the file contains."""

    def __repr__(self) -> str:
        return f"{type(self).__name__}{self.given}"


def read(file: Path, harmless: frozenset[str]) -> Any:
    """Return the content of a file written by ``torch.save`` without executing code from it.

    Tensors are on the host, and memory-mapped if the format allows it.

    Args:
        harmless: the accepted names of classes and functions. ``argparse.Namespace`` is built, and the others
            become ``Inert`` values.

    Raises:
        UsageError: the file is damaged, or names other classes or functions.
    """
    return _read(file, file, harmless, mmap=_is_archive(file))


def _is_archive(file: Path) -> bool:
    try:
        return zipfile.is_zipfile(file)
    except zipfile.BadZipFile:  # of several disks, it says
        return False


def read_part(content: bytes, file: Path, harmless: frozenset[str]) -> Any:
    """Read bytes inside ``file`` as ``read`` does, including nested files written by ``torch.save``."""
    return _read(io.BytesIO(content), file, harmless, mmap=False)


def _read(source: Path | IO[bytes], file: Path, harmless: frozenset[str], *, mmap: bool) -> Any:
    if not hasattr(serialization, "get_unsafe_globals_in_checkpoint"):
        raise UsageError(
            f"{file} cannot be loaded safely with torch {torch.__version__}; torch 2.6 or newer is required",
            remedy="Update torch.",
        )
    inert = [(type(name, (Inert,), {}), name) for name in sorted(harmless - {"argparse.Namespace"})]
    try:
        with allowing(Namespace, *inert, alone=True), expanded_size.checked():
            return torch.load(source, map_location="cpu", weights_only=True, mmap=mmap)
    except expanded_size.ExpandedSizeError:
        raise
    except Exception as error:  # torch raises many kinds, with pages of advice
        raise refusal(file, refused_name(error)) from error


def refused_name(error: BaseException) -> str:
    """Return the name that torch refused to construct, or the reason why torch could not read the file."""
    text = str(error).partition("\n")[0] or type(error).__name__
    named = _NAMED.search(str(error))
    return f"the file refers to {named[1]}" if named else text


def names_in_pickle(stream: IO[bytes]) -> set[str]:
    """Return the names in a pickle without executing it.

    The set is empty if the data is not a pickle.
    """
    found: set[str] = set()
    texts: list[str] = []
    try:
        for code, value, _ in pickletools.genops(stream):
            if code.name in ("GLOBAL", "INST"):
                found.add(str(value).replace(" ", "."))
            elif code.name == "STACK_GLOBAL":
                found.add(".".join(texts[-2:]))
            elif isinstance(value, str):
                texts = [*texts[-1:], value]
    except ValueError:  # it ends, or is none
        pass
    return found


@contextlib.contextmanager
def weights_only() -> Iterator[None]:
    """Make ``torch.load`` read only data, regardless of its arguments and of the environment.

    numpy values are checked before they are built; see ``checked_numpy``.
    """
    names = {"TORCH_FORCE_WEIGHTS_ONLY_LOAD": "1", "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD": None}
    former = {name: os.environ.pop(name, None) for name in names}
    os.environ.update({name: value for name, value in names.items() if value is not None})
    others = [entry for entry in serialization.get_safe_globals() if not _is_numpys(entry)]
    try:
        with allowing(*others, *checked_numpy.ENTRIES, alone=True):
            yield
    finally:
        for name, value in former.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value


def _is_numpys(entry: Any) -> bool:
    """Return True if an entry in torch's list of safe globals belongs to numpy."""
    name = entry[1] if isinstance(entry, tuple) else f"{entry.__module__}."
    return name.partition(".")[0] == "numpy"


def refusal(file: Path, reason: str) -> UsageError:
    """Return the error that reports a file as rejected."""
    return UsageError(
        f"{file} cannot be loaded safely: {reason}; only types that Megatron-LM saves are accepted",
        remedy="Do not load a file that you do not trust.",
    )


@contextlib.contextmanager
def allowing(*entries: Any, alone: bool = False) -> Iterator[None]:
    """Allow torch to construct the given types inside the ``with`` block, and restore its previous list
    afterwards.

    ``torch.serialization.safe_globals`` (2.13) removes its entries afterwards, even if they were allowed
    before; megatron-core allows its classes for the whole process when it is imported.

    Args:
        entries: classes and functions, or pairs with their names in the file.
        alone: whether to allow nothing else.
    """
    before = serialization.get_safe_globals()
    if alone:
        serialization.clear_safe_globals()
    serialization.add_safe_globals(list(entries))
    try:
        yield
    finally:
        serialization.clear_safe_globals()
        serialization.add_safe_globals(before)
