"""``megatron.optimizer`` and ``megatron.optimizer.optimizer``."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch import Tensor

from megatron_npu import devices
from megatron_npu.adaptors.megatron_lm.decorators import replace, watch, wrap
from megatron_npu.ops import multi_tensor

watch(
    "megatron.optimizer:Adam",
    why="it is apex's FusedAdam: the real one where apex is installed, else our operation under that name",
)
watch(
    "megatron.optimizer.optimizer:Float16OptimizerWithFloat16Params.__init__",
    why="it sorts parameters by type(), which names torch.cuda inside Megatron",
)


@wrap(
    "megatron.optimizer.optimizer:MixedPrecisionOptimizer._unscale_main_grads_and_check_for_nan",
    devices=("npu",),
    why="Ascend chips before 910B saturate instead of returning inf: only the overflow flag tells",
)
def heed_overflow_flag(original: Callable[..., Any]) -> Callable[..., Any]:
    """Make an overflow that only the device's flag knows of visible to upstream's check."""

    @functools.wraps(original)
    def _unscale_main_grads_and_check_for_nan(self: Any) -> bool:
        if devices.current().overflowed():
            # upstream resets its own flag first; these gradients are thrown away in any case
            self._collect_main_grad_data_for_unscaling()[0].fill_(float("inf"))
        return original(self)

    return _unscale_main_grads_and_check_for_nan


@replace(
    "megatron.optimizer.optimizer:_multi_tensor_copy_this_to_that",
    why="upstream copies bf16 tensor by tensor: a launch for each parameter of the model",
)
def copy_all(this: list[Tensor], that: list[Tensor], overflow_buf: Tensor | None = None) -> None:
    """Copy each tensor of ``this`` to its partner in ``that``."""
    multi_tensor.copy_all(this, that, overflow_buf)
