"""``--fine-grained-activation-offloading`` where Megatron has none: which modules' tensors move."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from megatron_npu import memory_flags
from megatron_npu.errors import UsageError
from megatron_npu.ops.activation_offload import Offload, moving
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
_WHY = "its backward reads main_grad off the weight that autograd hands out, which is another object then"


def connect(recorder: Recorder, versions: str = "") -> None:
    """Record what a linear layer needs whose input is moved.

    Args:
        recorder: of an upstream.
        versions: of it; all by default.
    """
    options: dict[str, Any] = {"devices": ("npu", "cuda"), "why": f"{_WHY} ({memory_flags.OFFLOADING})"}
    options |= {"versions": versions} if versions else {}
    recorder.around(f"{_FUNCTION}.forward", **options)(note_weight)
    recorder.around(f"{_FUNCTION}.backward", **options)(with_noted_weight)


def note_weight(original: Callable[..., Tensor], ctx: Any, input: Tensor, weight: Tensor, *args: Any) -> Any:
    """Keep the parameter itself for the backward pass where what is saved is moved."""
    if moving():
        ctx.megatron_npu_weight = weight
    return original(ctx, input, weight, *args)


def with_noted_weight(original: Callable[..., Any], ctx: Any, *grads: Tensor) -> Any:
    """Give it to upstream's own backward."""
    weight = getattr(ctx, "megatron_npu_weight", None)
    return original(ctx if weight is None else _Restored(ctx, weight), *grads)


class _Restored:
    """A context of autograd, whose second saved tensor is the parameter itself."""

    def __init__(self, ctx: Any, weight: Tensor) -> None:
        self.ctx = ctx
        self.weight = weight

    def __getattr__(self, name: str) -> Any:
        return getattr(self.ctx, name)

    @property
    def saved_tensors(self) -> tuple[Tensor, Tensor]:
        """Input and weight."""
        return self.ctx.saved_tensors[0], self.weight


def attach(layers: Sequence[Any], modules: Sequence[str], smallest: int) -> None:
    """Let what the modules of ``layers`` save be moved; not of the last, whose backward pass comes at once.

    Args:
        layers: of this stage or chunk of a pipeline.
        modules: words of ``--offload-modules``.
        smallest: how many numbers a tensor has that is moved.

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
        f"--offload-modules {name}, and a layer of {type(layer).__name__} without such a module",
        "modules that the layers have",
        f"Leave {name} out.",
    )
