"""Stub for ``megatron.mpu`` under ``megatron-npu train``, used if the installed Megatron does not have it.

Until 2022, ``mpu`` contained what is now in ``megatron.core.parallel_state`` and
``megatron.core.tensor_parallel``; scripts of that time use ``from megatron import mpu``. A name is looked up
in these modules when it is used.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from megatron_npu import devices
from megatron_npu.upstream import megatrons

NAME = "megatron.mpu"
_PLACES = ("megatron.core.parallel_state", "megatron.core.tensor_parallel")


def is_needed() -> bool:
    """Return True if the Megatron on the path has no module ``mpu``.

    Raises:
        UsageError: Megatron is not installed.
    """
    package = megatrons.find().root / "megatron"
    return not ((package / "mpu" / "__init__.py").is_file() or (package / "mpu.py").is_file())


def broadcast_data(
    keys: Sequence[str], data: Mapping[str, torch.Tensor] | None, datatype: torch.dtype
) -> dict[str, torch.Tensor]:
    """Return the first tensor-parallel rank's tensors on the device of this rank.

    Args:
        keys: the keys of ``data`` to return.
        data: tensors by name; None on ranks other than the first.
        datatype: the dtype of all tensors.

    Raises:
        TypeError: a tensor has another dtype, or there is no data and no other rank that could provide it.
    """
    from megatron.core import parallel_state, tensor_parallel

    if parallel_state.model_parallel_is_initialized():
        return tensor_parallel.broadcast_data(keys, data, datatype)
    if data is None:
        raise TypeError(
            "broadcast_data got None, but there are no other tensor-parallel ranks from which to receive data"
        )
    for key in keys:
        if data[key].dtype != datatype:
            raise TypeError(f"{key} must have data type {datatype}, but it has {data[key].dtype}")
    return {key: data[key].to(devices.current().torch_device()) for key in keys}


def __getattr__(name: str) -> Any:
    if not name.startswith("__"):
        for place in _PLACES:
            found = getattr(importlib.import_module(place), name, None)
            if found is not None:
                return found
    raise AttributeError(
        f"module {NAME!r} has no attribute {name!r}, and neither has any of {', '.join(_PLACES)}"
    )
