"""Support 16-bit training in older checkouts: convert inputs and outputs, and read the device's overflow
flag.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from megatron_npu import devices
from megatron_npu.adaptors.shared.decorators import WITHOUT_CUDA
from megatron_npu.patching.registry import Recorder

WHY_DTYPE = (
    "upstream compares with torch.cuda's tensor types as they were at import; the dtype gives the "
    "same answer on every device"
)
WHY_FLAG = "Ascend chips before 910B saturate instead of returning inf: only the overflow flag reveals it"
WHY_CLEAR = "Ascend chips before 910B set a flag on overflow, which remains set until it is cleared"
SCHEDULES = (
    "forward_backward_no_pipelining",
    "forward_backward_pipelining_without_interleaving",
    "forward_backward_pipelining_with_interleaving",
)


def connect(recorder: Recorder, optimizer: str) -> None:
    """Record the patches of this module for a checkout with ``megatron/schedules.py``.

    Args:
        recorder: the checkout's recorder.
        optimizer: the name of the class in ``megatron.optimizer.optimizer`` that unscales gradients.
    """
    for convert in (fp32_to_float16, float16_to_fp32):
        recorder.replace(f"megatron.model.module:{convert.__name__}", devices=WITHOUT_CUDA, why=WHY_DTYPE)(
            convert
        )
    connect_overflow_check(recorder, optimizer)
    for name in SCHEDULES:
        recorder.around(f"megatron.schedules:{name}", devices=("npu",), why=WHY_CLEAR)(clear_overflow_first)


def connect_overflow_check(recorder: Recorder, optimizer: str) -> None:
    """Record a patch that makes the optimizer's overflow check also read the device's flag."""
    recorder.around(
        f"megatron.optimizer.optimizer:{optimizer}._unscale_main_grads_and_check_for_nan",
        devices=("npu",),
        why=WHY_FLAG,
    )(heed_overflow_flag)


def fp32_to_float16(val: Any, float16_convertor: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Convert every fp32 tensor in a nested tuple or list, leaving all other values unchanged."""
    return _convert(val, (torch.float32,), float16_convertor)


def float16_to_fp32(val: Any) -> Any:
    """Convert every fp16 or bf16 tensor in a nested tuple or list to fp32."""
    return _convert(val, (torch.float16, torch.bfloat16), torch.Tensor.float)


def _convert(val: Any, dtypes: tuple[torch.dtype, ...], convertor: Callable[..., Any]) -> Any:
    from megatron.model.module import conversion_helper

    def convert(leaf: Any) -> Any:
        return convertor(leaf) if isinstance(leaf, torch.Tensor) and leaf.dtype in dtypes else leaf

    return conversion_helper(val, convert)


def heed_overflow_flag(original: Callable[..., bool], self: Any) -> bool:
    """Make upstream's overflow check also detect overflows that only the device's flag reports."""
    if devices.current().overflowed():
        # upstream resets its own flag first; these gradients are thrown away in any case
        groups = self.optimizer.param_groups
        grads = (parameter.grad for group in groups for parameter in group["params"])
        next(grad for grad in grads if grad is not None).fill_(float("inf"))
    return original(self)


def clear_overflow_first(
    original: Callable[..., Any],
    forward_step_func: Any,
    data_iterator: Any,
    model: Any,
    optimizer: Any,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Clear the device's overflow flag before the first micro-batch of a step with loss scaling."""
    if getattr(optimizer, "grad_scaler", None) is not None:
        devices.current().clear_overflow()
    return original(forward_step_func, data_iterator, model, optimizer, *args, **kwargs)
