"""16-bit training of the older trees: what crosses the model's border, and the device's overflow flag."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from megatron_npu import devices

WHY_DTYPE = (
    "upstream compares with torch.cuda's tensor types as they were when it was imported; the dtype says it "
    "on every device"
)
WHY_FLAG = "Ascend chips before 910B saturate instead of returning inf: only the overflow flag tells"
WHY_CLEAR = "Ascend chips before 910B set a flag on overflow, which stays until it is cleared"
SCHEDULES = (
    "forward_backward_no_pipelining",
    "forward_backward_pipelining_without_interleaving",
    "forward_backward_pipelining_with_interleaving",
)


def fp32_to_float16(val: Any, float16_convertor: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Convert every fp32 tensor of a nested tuple or list; leave everything else as it is."""
    return _convert(val, (torch.float32,), float16_convertor)


def float16_to_fp32(val: Any) -> Any:
    """Convert every fp16 or bf16 tensor of a nested tuple or list to fp32."""
    return _convert(val, (torch.float16, torch.bfloat16), torch.Tensor.float)


def _convert(val: Any, dtypes: tuple[torch.dtype, ...], convertor: Callable[..., Any]) -> Any:
    from megatron.model.module import conversion_helper

    def convert(leaf: Any) -> Any:
        return convertor(leaf) if isinstance(leaf, torch.Tensor) and leaf.dtype in dtypes else leaf

    return conversion_helper(val, convert)


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
