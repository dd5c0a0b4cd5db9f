"""What checkpoints of Megatron's older trees hold beside tensors."""

from __future__ import annotations

import argparse
from typing import Any

import numpy


def harmless() -> list[Any]:
    """Return what torch may build of them: arguments, numpy's random state, loss scalers of old."""
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
