"""16-bit training: what crosses the model's border, and overflows that only the device's flag knows of."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from megatron_npu import devices
from megatron_npu.adaptors.megatron_lm.decorators import around, replace
from megatron_npu.adaptors.shared import mixed_precision
from megatron_npu.adaptors.shared.decorators import WITHOUT_CUDA

replace("megatron.model.module:fp32_to_float16", devices=WITHOUT_CUDA, why=mixed_precision.WHY_DTYPE)(
    mixed_precision.fp32_to_float16
)
replace("megatron.model.module:float16_to_fp32", devices=WITHOUT_CUDA, why=mixed_precision.WHY_DTYPE)(
    mixed_precision.float16_to_fp32
)


@around(
    "megatron.optimizer.optimizer:MixedPrecisionOptimizer._unscale_main_grads_and_check_for_nan",
    devices=("npu",),
    why=mixed_precision.WHY_FLAG,
)
def heed_overflow_flag(original: Callable[..., bool], self: Any) -> bool:
    """Make an overflow that only the device's flag knows of visible to upstream's check."""
    if devices.current().overflowed():
        # upstream resets its own flag first; these gradients are thrown away in any case
        self._collect_main_grad_data_for_unscaling()[0].fill_(float("inf"))
    return original(self)


for _name in mixed_precision.SCHEDULES:
    around(f"megatron.schedules:{_name}", devices=("npu",), why=mixed_precision.WHY_CLEAR)(
        mixed_precision.clear_overflow_first
    )
