"""``megatron.model.transformer``: attention and MLP of every model of this tree."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from megatron_npu import attention_flags
from megatron_npu.adaptors.megatron_lm.decorators import replace, watch, wrap
from megatron_npu.adaptors.shared.core_attention import attend, dropout_generator
from megatron_npu.ops.attention import Window
from megatron_npu.ops.dropout import bias_dropout_add

_MODULE = "megatron.model.transformer"

watch(
    f"{_MODULE}:ParallelMLP.__init__",
    why="it only builds the two linear layers; the activation is adapted in megatron.model.fused_bias_gelu",
)
watch(
    f"{_MODULE}:ParallelMLP.forward",
    why="its activation is adapted where it is defined, in megatron.model.fused_bias_gelu",
)
watch(
    f"{_MODULE}:ParallelAttention.forward",
    why="it splits heads and keeps the key-value cache; all arithmetic is in CoreAttention",
)


@replace(
    f"{_MODULE}:CoreAttention.forward",
    why="upstream materialises the scores [b, n, sq, sk]; the device has fused attention",
)
def forward(
    self: Any, query_layer: Tensor, key_layer: Tensor, value_layer: Tensor, attention_mask: Tensor | None
) -> Tensor:
    """``[sq, b, n, d]`` and ``[sk, b, n, d]`` to ``[sq, b, n * d]``."""
    causal = self.attn_mask_type.name == "causal"
    dropout_p = self.attention_dropout.p if self.training else 0.0
    with dropout_generator(dropout_p, self.sequence_parallel):
        return attend(
            query_layer,
            key_layer,
            value_layer,
            # apply_query_key_layer_scaling divides by the layer's number and multiplies by it again
            scale=(self.scale_mask_softmax.scale or 1.0) / self.norm_factor,
            causal=causal,
            window=(None, None) if getattr(self, "is_cross_attention", False) else _window(),
            offset=key_layer.size(0) - query_layer.size(0) if causal else 0,
            mask=attention_mask if not causal or _more_is_masked_than_the_future() else None,
            dropout_p=dropout_p,
        ).flatten(2)


def _window() -> Window:
    """Return how far a query sees: ``--pre-tockens`` and ``--next-tockens``."""
    return attention_flags.CURRENT.pre_tokens, attention_flags.CURRENT.next_tokens


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
    """Fused attention with upstream's interface.

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
        super().__init__()
        self.causal, self.softmax_scale, self.dropout_p = causal, softmax_scale, attention_dropout

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """``[b, sq, n, d]`` and ``[b, sk, n, d]`` to ``[b, sq, n, d]``."""
        query, key, value = (tensor.transpose(0, 1) for tensor in (q, k, v))
        return attend(
            query,
            key,
            value,
            scale=q.size(-1) ** -0.5 if self.softmax_scale is None else self.softmax_scale,
            causal=self.causal,
            window=_window(),
            offset=k.size(1) - q.size(1) if self.causal else 0,
            dropout_p=self.dropout_p if self.training else 0.0,
        ).transpose(0, 1)


@wrap(
    f"{_MODULE}:ParallelAttention.__init__",
    why="--use-flash-attn asks for two packages and takes a path that ignores masks; CoreAttention is fused",
)
def initialise_fused(original: Callable[..., Any]) -> Callable[..., Any]:
    """Build the layer without upstream's flash path, which CoreAttention makes superfluous."""

    @functools.wraps(original)
    def __init__(self: Any, *positional: Any, **keywords: Any) -> None:  # noqa: N807
        from megatron import get_args

        args = get_args()
        flash, args.use_flash_attn = args.use_flash_attn, False
        try:
            original(self, *positional, **keywords)
        finally:
            args.use_flash_attn = flash
        self.core_attention.is_cross_attention = self.attention_type.name == "cross_attn"
        if flash:  # nothing of size [s, s] is kept, so there is nothing to gain from recomputing it
            self.checkpoint_core_attention = False

    return __init__


_COMPILED_ANEW = (
    "three passes; and TorchScript compiles it in every process anew, rounding bf16 otherwise until it has: "
    "a resumed run would not be the interrupted one to the bit"
)


@replace(f"{_MODULE}:bias_dropout_add_fused_train", why=_COMPILED_ANEW)
def bias_dropout_add_fused_train(x: Tensor, bias: Tensor, residual: Tensor, prob: float) -> Tensor:
    """``residual + dropout(x + bias)``, ``[s, b, h]`` throughout; no random number is drawn for prob 0."""
    return _bias_dropout_add(x, bias, residual, prob, True)


@replace(f"{_MODULE}:bias_dropout_add_fused_inference", why=_COMPILED_ANEW)
def bias_dropout_add_fused_inference(x: Tensor, bias: Tensor, residual: Tensor, prob: float) -> Tensor:
    """``residual + x + bias``, ``[s, b, h]`` throughout."""
    return _bias_dropout_add(x, bias, residual, prob, False)


def _bias_dropout_add(x: Tensor, bias: Tensor, residual: Tensor, prob: float, training: bool) -> Tensor:
    # upstream hands over bias.expand_as(residual), whose base is the parameter [h] itself
    base = bias._base
    if base is not None and base.shape == bias.shape[-1:] and not any(bias.stride()[:-1]):
        return bias_dropout_add(x, base, residual, prob, training)
    return bias_dropout_add(x + bias, None, residual, prob, training)
