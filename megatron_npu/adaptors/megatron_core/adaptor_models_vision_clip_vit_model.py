"""``megatron.core.models.vision.clip_vit_model``: the norms before and after the blocks."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch

from megatron_npu.adaptors.megatron_core.decorators import transformer_engine_present, wrap
from megatron_npu.adaptors.megatron_core.norm import Norm


@wrap(
    "megatron.core.models.vision.clip_vit_model:CLIPViTModel.__init__",
    condition=transformer_engine_present,
    why="without TransformerEngine its default norm is torch.nn.LayerNorm, which does not take the config "
    "that it is then given: TypeError",
)
def with_our_norm(original: Callable[..., None]) -> Callable[..., None]:
    """Take the norm of the local layers in its place."""
    signature = inspect.signature(original)

    @functools.wraps(original)
    def initialise(*args: Any, **kwargs: Any) -> None:
        given = signature.bind(*args, **kwargs)
        given.apply_defaults()
        for name in ("ln_pre_impl", "ln_post_impl"):
            if given.arguments.get(name) is torch.nn.LayerNorm:
                given.arguments[name] = Norm
        original(*given.args, **given.kwargs)

    return initialise
