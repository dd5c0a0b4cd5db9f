"""16-bit training without DeepSpeed's engine: what crosses the model's border, and overflows of old NPUs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from megatron_npu import devices
from megatron_npu.adaptors.megatron_deepspeed.decorators import around, replace
from megatron_npu.adaptors.shared import mixed_precision
from megatron_npu.adaptors.shared.decorators import WITHOUT_CUDA

replace("megatron.model.module:fp32_to_float16", devices=WITHOUT_CUDA, why=mixed_precision.WHY_DTYPE)(
    mixed_precision.fp32_to_float16
)
replace("megatron.model.module:float16_to_fp32", devices=WITHOUT_CUDA, why=mixed_precision.WHY_DTYPE)(
    mixed_precision.float16_to_fp32
)


@around(
    "megatron.optimizer.optimizer:Float16OptimizerWithFloat16Params._unscale_main_grads_and_check_for_nan",
    devices=("npu",),
    why=mixed_precision.WHY_FLAG,
)
def heed_overflow_flag(original: Callable[..., bool], self: Any) -> bool:
    """Make an overflow that only the device's flag knows of visible to upstream's check."""
    if devices.current().overflowed():
        # upstream resets its own flag first; these gradients are thrown away in any case
        groups = (*self.fp32_from_float16_groups, *self.fp32_from_fp32_groups)
        grads = (parameter.grad for group in groups for parameter in group)
        next(grad for grad in grads if grad is not None).fill_(float("inf"))
    return original(self)


for _name in mixed_precision.SCHEDULES:
    around(f"megatron.schedules:{_name}", devices=("npu",), why=mixed_precision.WHY_CLEAR)(
        mixed_precision.clear_overflow_first
    )
