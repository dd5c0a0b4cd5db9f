"""Select the device that DeepSpeed uses in this process, without changing DeepSpeed's device abstraction."""

from __future__ import annotations

import importlib
import os
from typing import Any

from megatron_npu.base.errors import UsageError
from megatron_npu.base.installed_packages import is_installed

VARIABLES = ("DS_ACCELERATOR", "ASCEND_HOME_PATH")  # that ``choose`` sets, of this process and its children
# What DeepSpeed puts into its files beside tensors, numbers and texts.
_HOLDERS = (
    "deepspeed.runtime.fp16.loss_scaler.LossScaler",
    "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler",
    "deepspeed.runtime.zero.config.ZeroStageEnum",
    "deepspeed.utils.tensor_fragment.fragment_address",
    "deepspeed.checkpoint.universal_checkpoint.SubparamShape",
)


def installed() -> bool:
    """Return True if DeepSpeed is installed, without importing it."""
    return is_installed("deepspeed")


def choose(device: str) -> None:
    """Make DeepSpeed use the device ``cpu``, ``cuda`` or ``npu``. Call this before DeepSpeed is imported.

    Raises:
        UsageError: DeepSpeed is not installed.
    """
    if not installed():
        raise UsageError(
            "this script uses DeepSpeed for training, but the deepspeed package is not installed",
            remedy="Install it: pip install 'megatron_npu[deepspeed]'.",
        )
    accelerator, toolkit = VARIABLES
    os.environ[accelerator] = device
    if device == "npu":  # DeepSpeed 0.19.8 looks there for its operations: without it, a KeyError
        os.environ.setdefault(toolkit, "/nowhere")


def compile_nothing() -> None:
    """Disable DeepSpeed's shared-memory communication, which would be compiled at its first start on a CPU.

    Only inference uses it, and an interrupted compilation blocks all later ones (``extension_locks``).
    """
    operations = importlib.import_module("deepspeed.ops")
    operations.__compatible_ops__["deepspeed_shm_comm"] = False


def harmless() -> list[Any]:
    """Return the classes that torch is allowed to construct when it reads DeepSpeed checkpoints."""
    names = (name.rpartition(".") for name in _HOLDERS)
    return [getattr(importlib.import_module(module), kind) for module, _, kind in names]
