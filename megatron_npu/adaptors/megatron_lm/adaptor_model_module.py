"""``megatron.model.module``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from megatron_npu.adaptors.megatron_lm.decorators import WITHOUT_CUDA, replace

_WHY = (
    "upstream compares with torch.cuda's tensor types as they were when it was imported; the dtype says it "
    "on every device"
)


@replace("megatron.model.module:fp32_to_float16", devices=WITHOUT_CUDA, why=_WHY)
def fp32_to_float16(val: Any, float16_convertor: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Convert every fp32 tensor of a nested tuple or list; leave everything else as it is."""
    return _convert(val, (torch.float32,), float16_convertor)


@replace("megatron.model.module:float16_to_fp32", devices=WITHOUT_CUDA, why=_WHY)
def float16_to_fp32(val: Any) -> Any:
    """Convert every fp16 or bf16 tensor of a nested tuple or list to fp32."""
    return _convert(val, (torch.float16, torch.bfloat16), torch.Tensor.float)


def _convert(val: Any, dtypes: tuple[torch.dtype, ...], convertor: Callable[..., Any]) -> Any:
    from megatron.model.module import conversion_helper

    def convert(leaf: Any) -> Any:
        return convertor(leaf) if isinstance(leaf, torch.Tensor) and leaf.dtype in dtypes else leaf

    return conversion_helper(val, convert)
