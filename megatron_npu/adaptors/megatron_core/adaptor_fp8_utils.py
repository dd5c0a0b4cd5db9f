"""``megatron.core.fp8_utils``: fp8 parameters, which need TransformerEngine."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from megatron_npu.adaptors.megatron_core.decorators import wrap


@wrap(
    "megatron.core.fp8_utils:_quantize_param_shard_impl",
    versions="<0.13",
    why="without TransformerEngine 0.12's raises for every step of the distributed optimizer, which has no "
    "fp8 parameter to give it",
)
def nothing_to_quantize(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return at once when there is no parameter."""

    @functools.wraps(original)
    def quantize(model_params: list[Any], *args: Any, **kwargs: Any) -> Any:
        return original(model_params, *args, **kwargs) if model_params else None

    return quantize
