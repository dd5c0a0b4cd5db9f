"""Checkpoints that Megatron-LM's own scripts have saved (``torch_dist``), as the driver describes its own.

Where the driver writes ``arguments.json``, they keep their argparse.Namespace in ``common.pt``, a pickle. It
is read with torch's ``weights_only``, and what it names of Megatron and Python is replaced by inert values:
nothing that the file names is imported or called.
"""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path
from typing import Any

import torch
from torch import serialization

from megatron_npu import safe_load
from megatron_npu.errors import UsageError
from megatron_npu.training import checkpoint_files, stock_arguments

COMMON = "common.pt"  # megatron-core's name for what is not sharded
_LEGACY = "mp_rank_*"  # directories of the format "torch"
# What the scripts of core_v0.12 to 0.16 put there beside numbers and texts: enumerations and plain holders.
# megatron-core builds the real ones when it loads, which runs nothing of a file's own either.
_HARMLESS = frozenset(
    """
    argparse.Namespace types.SimpleNamespace pathlib.PosixPath signal.Signals
    megatron.core.enums.ModelType megatron.core.transformer.enums.AttnBackend
    megatron.core.transformer.enums.CudaGraphScope megatron.core.optimizer.optimizer_config.OptimizerConfig
    megatron.core.rerun_state_machine.RerunDiagnostic megatron.core.rerun_state_machine.RerunMode
    megatron.core.rerun_state_machine.RerunState
    numpy.core.multiarray._reconstruct numpy._core.multiarray._reconstruct numpy.core.multiarray.scalar
    numpy._core.multiarray.scalar numpy.ndarray numpy.dtype numpy.dtypes.UInt32DType
    """.split()
)


class _Inert:
    """Stands for a value whose class is not imported.

    Attributes:
        given: what the class would have been called with.
    """

    def __init__(self, *given: object) -> None:
        self.given = given

    def __setstate__(self, state: object) -> None:
        """Forget what the class would have been told further."""

    def __repr__(self) -> str:
        return f"{type(self).__name__}{self.given}"


def find(root: str | Path) -> checkpoint_files.CheckpointInfo | None:
    """Return the newest checkpoint under ``root``, the driver's or a stock script's; None if there is none.

    A stock script's is good for its weights alone: optimizer and random numbers are not offered. What follows
    from its tokenizer is not among its arguments yet.

    Raises:
        UsageError: it cannot be read, or holds a model that the driver does not have.
    """
    path = checkpoint_files.newest(root)
    if path is None or (path / checkpoint_files.DESCRIPTION).is_file() or not (path / COMMON).is_file():
        _require_sharded(path)
        return checkpoint_files.find(root)
    values = read_common(path / COMMON)
    if not isinstance(values.get("args"), Namespace):
        raise UsageError(
            f"{path / COMMON} holds no arguments",
            "a checkpoint of pretrain_gpt.py or of `megatron-npu pretrain`",
            "Load another one.",
        )
    return checkpoint_files.CheckpointInfo(
        path=path,
        iteration=int(values.get("iteration", 0)),
        consumed_train_samples=0,
        consumed_valid_samples=0,
        has_optimizer=False,
        has_rng=False,
        optimizer_sharding=None,
        arguments=stock_arguments.to_driver(vars(values["args"])),
    )


def _require_sharded(path: Path | None) -> None:
    if path is not None and any(path.glob(_LEGACY)):
        raise UsageError(
            f"{path} is a checkpoint of the format torch",
            "torch_dist",
            "Let Megatron-LM convert it: --ckpt-convert-format torch_dist --ckpt-convert-save DIR.",
        )


def read_common(file: Path) -> dict[str, Any]:
    """Return what a ``common.pt`` holds; nothing in it is executed.

    Raises:
        UsageError: it is broken, or names something that is not a plain value.
    """
    if not hasattr(serialization, "get_unsafe_globals_in_checkpoint"):
        raise UsageError(
            f"{file} with torch {torch.__version__}",
            "torch 2.6, which can look into it safely",
            "Update torch.",
        )
    try:
        with safe_load.allowing(alone=True):
            named = set(serialization.get_unsafe_globals_in_checkpoint(file))
        if foreign := sorted(named - _HARMLESS):
            raise _broken(file, f"it names {', '.join(foreign)}")
        inert = [(type(name, (_Inert,), {}), name) for name in named if name != "argparse.Namespace"]
        with safe_load.allowing(Namespace, *inert, alone=True):
            values = torch.load(file, map_location="cpu", weights_only=True)
    except UsageError:
        raise
    except Exception as error:  # torch raises many kinds, with pages of advice
        raise _broken(file, str(error).partition("\n")[0]) from error
    if not isinstance(values, dict):
        raise _broken(file, f"it holds a {type(values).__name__}")
    return values


def _broken(file: Path, reason: str) -> UsageError:
    return UsageError(f"{file}: {reason}", "what Megatron-LM saves", "Do not load it if you do not trust it.")
