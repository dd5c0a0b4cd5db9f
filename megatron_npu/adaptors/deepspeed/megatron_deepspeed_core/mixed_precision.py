"""Support 16-bit training without DeepSpeed's engine: convert dtype names, and clear the overflow flag of
older NPUs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from megatron_npu import devices
from megatron_npu.adaptors.deepspeed.megatron_deepspeed_core.decorators import around, records
from megatron_npu.adaptors.shared import mixed_precision
from megatron_npu.adaptors.shared.decorators import WITHOUT_CUDA

mixed_precision.connect_overflow_check(records, "MixedPrecisionOptimizer")


def clear_overflow_first(original: Callable[..., Any], *, model: Any, **kwargs: Any) -> Any:
    """Clear the device's overflow flag before the first micro-batch of a step with loss scaling."""
    chunk = model[0] if isinstance(model, list) else model
    while hasattr(chunk, "module"):
        chunk = chunk.module
    if chunk.config.grad_scale_func is not None:
        devices.current().clear_overflow()
    return original(model=model, **kwargs)


for _name in mixed_precision.SCHEDULES:
    records.around(
        f"megatron.core.pipeline_parallel.schedules:{_name}", devices=("npu",), why=mixed_precision.WHY_CLEAR
    )(clear_overflow_first)


@around(
    "megatron.optimizer.optimizer:Float16OptimizerWithFloat16Params.__init__",
    devices=WITHOUT_CUDA,
    why=(
        "upstream compares Tensor.type(), which reports cuda to Megatron, with the name of DeepSpeed's device"
    ),
)
def compare_with_cuda(original: Callable[..., None], *args: Any, **kwargs: Any) -> None:
    """Report DeepSpeed's device name as cuda while upstream sorts parameters by their tensor type."""
    from megatron.optimizer import optimizer

    real = optimizer.get_accelerator
    optimizer.get_accelerator = lambda: _NamedCuda(real())
    try:
        original(*args, **kwargs)
    finally:
        optimizer.get_accelerator = real


class _NamedCuda:
    """View of DeepSpeed's accelerator object that reports the device name ``cuda``."""

    def __init__(self, real: Any) -> None:
        self._real = real

    def device_name(self) -> str:
        return "cuda"

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)
