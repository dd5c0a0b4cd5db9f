"""Load values other than tensors from checkpoints of older Megatron versions without executing code."""

from __future__ import annotations

import argparse
import contextlib
import pickle
from collections.abc import Iterator
from typing import Any

import numpy

from megatron_npu.base.errors import UsageError
from megatron_npu.safe_files import safe_load


@contextlib.contextmanager
def data_only(load_dir: str, *kinds: Any) -> Iterator[None]:
    """Restrict upstream's loading of checkpoints inside the ``with`` block to tensors, numbers and arguments.

    Args:
        load_dir: the folder of the checkpoint.
        kinds: additional classes that this checkout stores (``harmless``).

    Raises:
        UsageError: the checkpoint contains something else, or cannot be read; upstream would print the error
            and exit with code 0.
    """
    with safe_load.allowing(*harmless(), *kinds), safe_load.weights_only():
        try:
            yield
        except (SystemExit, pickle.UnpicklingError, EOFError) as error:
            cause = error.__context__ if isinstance(error, SystemExit) else error
            reason = safe_load.refused_name(cause) if cause else "see upstream's message above"
            raise UsageError(
                f"the checkpoint in {load_dir} cannot be read ({type(cause).__name__}: {reason}); "
                "a checkpoint must contain only tensors and Megatron's arguments",
                remedy="Check that its files are complete; never load a checkpoint from a source that "
                "you do not trust.",
            ) from cause


def harmless() -> list[Any]:
    """Return the types that torch may construct: arguments, numpy's random state and old loss scalers."""
    from megatron.fp16_deprecated import loss_scaler

    multiarray = getattr(numpy, "_core", None) or numpy.core
    reconstruct, scalar = multiarray.multiarray._reconstruct, multiarray.multiarray.scalar
    dtypes = [type(numpy.dtype(name)) for name in ("uint32", "int32", "int64", "float32", "float64")]
    scalers = [
        (getattr(loss_scaler, name), f"{module}.loss_scaler.{name}")
        for name in ("LossScaler", "DynamicLossScaler")
        for module in ("fp16", "megatron.fp16")  # where they lived when NVIDIA's 345M model was saved
    ]
    return [
        argparse.Namespace,
        numpy.ndarray,
        numpy.dtype,
        *dtypes,
        *(
            (function, f"numpy.{core}.multiarray.{name}")
            for core in ("core", "_core")
            for function, name in ((reconstruct, "_reconstruct"), (scalar, "scalar"))
        ),
        *scalers,
    ]
