"""Support ``--fine-grained-activation-offloading`` in Megatron versions without this flag."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from megatron_npu.base.errors import UsageError
from megatron_npu.ops.activation_offload import Offload
from megatron_npu.options import memory_flags
from megatron_npu.patching.registry import Recorder

# The words of --offload-modules, and where a layer has such a module: in megatron-core, and in 285068c8.
_PLACES = {
    "attn_norm": ("input_layernorm",),
    "qkv_linear": ("self_attention.linear_qkv", "self_attention.query_key_value"),
    "core_attn": ("self_attention.core_attention",),
    "attn_proj": ("self_attention.linear_proj", "self_attention.dense"),
    "mlp_norm": ("pre_mlp_layernorm", "post_attention_layernorm"),
}


_FUNCTION = "megatron.core.tensor_parallel.layers:LinearWithGradAccumulationAndAsyncCommunication"
_WHY = (
    "the layer's backward reads main_grad from the weight and marks there that the gradient has been "
    "added; hooks on what autograd saves return a different object"
)
# Of the innermost hooks on what autograd saves, the functions; None without hooks. Older torches lack it.
_hooks = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", lambda _: True)


def connect(recorder: Recorder) -> None:
    """Record the patch that linear layers require when saved tensors are offloaded."""
    options: dict[str, Any] = {"devices": ("npu", "cuda"), "why": f"{_WHY} ({memory_flags.OFFLOADING})"}
    recorder.around(f"{_FUNCTION}.forward", **options)(keep_weight)
    recorder.around(f"{_FUNCTION}.backward", **options)(with_kept_weight)


def keep_weight(original: Callable[..., Tensor], ctx: Any, *args: Any) -> Tensor:
    """Keep the weight parameter for the backward pass, bypassing the saved-tensor hooks."""
    return original(ctx if _hooks(False) is None else _Keeping(ctx), *args)


def with_kept_weight(original: Callable[..., Any], ctx: Any, *grads: Tensor) -> Any:
    """Pass the kept weight to upstream's own backward function."""
    return original(_Keeping(ctx) if hasattr(ctx, _WEIGHT) else ctx, *grads)


_WEIGHT = "megatron_npu_weight"


class _Keeping:
    """Wrapper of an autograd context that keeps a reference to the weight instead of saving it.

    With hooks, autograd returns a new tensor for everything that it has saved, even if the hooks return the
    tensor that they were given, so a parameter would lose its attributes. In addition, a hook cannot move a
    weight that is never passed to it.
    """

    def __init__(self, ctx: Any) -> None:
        object.__setattr__(self, "ctx", ctx)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.ctx, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self.ctx, name, value)

    def save_for_backward(self, input: Tensor, weight: Tensor) -> None:
        """Save the input with autograd, and the weight as a plain attribute of the context."""
        self.ctx.save_for_backward(input)
        setattr(self.ctx, _WEIGHT, weight)

    @property
    def saved_tensors(self) -> tuple[Tensor, Tensor]:
        """Return the input and the weight, as upstream's backward function expects."""
        return self.ctx.saved_tensors[0], getattr(self.ctx, _WEIGHT)


def attach(layers: Sequence[Any], modules: Sequence[str], smallest: int) -> None:
    """Offload the tensors that the modules of all ``layers`` except the last one save.

    The backward pass of the last layer runs next, so its tensors are not moved.

    Args:
        layers: the layers of this pipeline stage or chunk.
        modules: the values of ``--offload-modules``.
        smallest: the minimum number of elements that a tensor must have to be moved.

    Raises:
        UsageError: a layer has no such module.
    """
    offload = Offload(smallest)
    for place, layer in enumerate(list(layers)[:-1]):
        if not hasattr(layer, "self_attention"):  # one that does nothing
            continue
        for name in modules:
            offload.attach(_module(layer, name), name, place)


def _module(layer: Any, name: str) -> torch.nn.Module:
    for path in _PLACES[name]:
        found = layer
        for part in path.split("."):
            found = getattr(found, part, None)
        if isinstance(found, torch.nn.Module) and type(found).__name__ != "IdentityOp":
            return found
    raise UsageError(
        f"--offload-modules includes {name}, but {type(layer).__name__} has no such module. Remove {name}."
    )
