"""16-bit training without DeepSpeed's engine: overflows that only the flag of old NPUs knows of."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from megatron_npu import devices
from megatron_npu.adaptors.megatron_deepspeed_core.decorators import records
from megatron_npu.adaptors.shared import mixed_precision

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
