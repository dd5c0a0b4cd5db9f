"""Core attention of every model of this tree, and the softmax for what does not go through it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from megatron_npu.adaptors.megatron_lm.decorators import around, replace
from megatron_npu.adaptors.shared.core_attention import attend, dropout_generator, forward_fused_softmax
from megatron_npu.attention_flags import AttentionFlags

_MODULE = "megatron.model.transformer"


@replace(
    f"{_MODULE}:CoreAttention.forward",
    why="upstream materialises the scores [b, n, sq, sk]; the device has fused attention",
)
def forward(
    self: Any, query_layer: Tensor, key_layer: Tensor, value_layer: Tensor, attention_mask: Tensor | None
) -> Tensor:
    """``[sq, b, n, d]`` and ``[sk, b, n, d]`` to ``[sq, b, n * d]``."""
    flags: AttentionFlags = getattr(self, "attention_flags", AttentionFlags())  # see initialise_fused
    causal = self.attn_mask_type.name == "causal"
    dropout_p = self.attention_dropout.p if self.training else 0.0
    with dropout_generator(dropout_p, self.sequence_parallel):
        return attend(
            query_layer,
            key_layer,
            value_layer,
            shape_order=flags.shape_order,
            # apply_query_key_layer_scaling divides by the layer's number and multiplies by it again
            scale=(self.scale_mask_softmax.scale or 1.0) / self.norm_factor,
            causal=causal,
            window=flags.window,
            offset=key_layer.size(0) - query_layer.size(0) if causal else 0,
            mask=attention_mask if not causal or _more_is_masked_than_the_future() else None,
            dropout_p=dropout_p,
        ).flatten(2)


def _more_is_masked_than_the_future() -> bool:
    """Return whether a causal layer's mask holds more than the causal triangle.

    So it is with ``--reset-attention-mask`` (documents in one sample) and in T5's decoder (padding).
    """
    from megatron import get_args

    args = get_args()
    model_type = getattr(args, "model_type", None)  # set by get_model; absent where a layer is built alone
    return args.reset_attention_mask or getattr(model_type, "name", "") == "encoder_and_decoder"


@replace(
    f"{_MODULE}:FlashSelfAttention",
    why="upstream's needs the packages flash-attn and einops, half precision and CUDA",
)
class FlashSelfAttention(torch.nn.Module):
    """Fused attention with upstream's interface, and the window and layout of the flags in force when built.

    Args:
        causal: no key after the query's own position; queries stand at the end of longer keys.
        softmax_scale: factor of the scores; None is 1 / sqrt(d).
        attention_dropout: probability in training.
        device, dtype: for upstream's callers; not used there either.
    """

    def __init__(
        self,
        causal: bool = False,
        softmax_scale: float | None = None,
        attention_dropout: float = 0.0,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        from megatron import get_args

        super().__init__()
        self.attention_flags = AttentionFlags.from_args(get_args())
        self.causal, self.softmax_scale, self.dropout_p = causal, softmax_scale, attention_dropout

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """``[b, sq, n, d]`` and ``[b, sk, n, d]`` to ``[b, sq, n, d]``."""
        query, key, value = (tensor.transpose(0, 1) for tensor in (q, k, v))
        return attend(
            query,
            key,
            value,
            shape_order=self.attention_flags.shape_order,
            scale=q.size(-1) ** -0.5 if self.softmax_scale is None else self.softmax_scale,
            causal=self.causal,
            window=self.attention_flags.window,
            offset=k.size(1) - q.size(1) if self.causal else 0,
            dropout_p=self.dropout_p if self.training else 0.0,
        ).transpose(0, 1)


@around(
    f"{_MODULE}:ParallelAttention.__init__",
    why="--use-flash-attn asks for two packages and takes a path that ignores masks; CoreAttention is fused",
)
def initialise_fused(original: Callable[..., None], self: Any, *positional: Any, **keywords: Any) -> None:
    """Build the layer without upstream's flash path, which CoreAttention makes superfluous.

    The layer takes the window and the layout from the flags as they are now; cross-attention has no window.
    """
    from megatron import get_args

    args = get_args()
    flash, args.use_flash_attn = args.use_flash_attn, False
    try:
        original(self, *positional, **keywords)
    finally:
        args.use_flash_attn = flash
    flags = AttentionFlags.from_args(args)
    if self.attention_type.name == "cross_attn":
        flags = AttentionFlags(shape_order=flags.shape_order)
    self.core_attention.attention_flags = flags
    if flash:  # nothing of size [s, s] is kept, so there is nothing to gain from recomputing it
        self.checkpoint_core_attention = False


_WHY_SOFTMAX = "upstream's kernels are CUDA extensions that it compiles at start"


@replace("megatron.model.fused_softmax:FusedScaleMaskSoftmax.is_kernel_available", why=_WHY_SOFTMAX)
def is_kernel_available(self: Any, mask: Tensor | None, b: int, np: int, sq: int, sk: int) -> bool:
    """Return whether ``forward_fused_softmax`` means the same as upstream's torch path for this call."""
    return self.scaled_masked_softmax_fusion and (self.attn_mask_type.name != "causal" or sq == sk)


replace("megatron.model.fused_softmax:FusedScaleMaskSoftmax.forward_fused_softmax", why=_WHY_SOFTMAX)(
    forward_fused_softmax
)


@around(
    "megatron.core.tensor_parallel.layers:LinearWithGradAccumulationAndAsyncCommunication.backward",
    why="it takes a view of the gradient, which fused attention leaves in its own order of dimensions (the "
    "query of cross-attention)",
)
def with_contiguous_gradient(original: Callable[..., Any], ctx: Any, grad_output: Tensor) -> Any:
    """Bring the gradient into the order of the output first."""
    return original(ctx, grad_output.contiguous())
