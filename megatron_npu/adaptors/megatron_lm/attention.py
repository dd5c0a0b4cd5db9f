"""Patch the core attention of all models of this checkout, and the unfused softmax."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from megatron_npu.adaptors.megatron_lm.decorators import around, records, replace
from megatron_npu.adaptors.shared import core_attention
from megatron_npu.adaptors.shared.core_attention import attend
from megatron_npu.options.attention_flags import AttentionFlags

_MODULE = "megatron.model.transformer"

core_attention.connect(records)


@replace(
    f"{_MODULE}:FlashSelfAttention",
    why="upstream's version needs the packages flash-attn and einops, half precision and CUDA",
)
class FlashSelfAttention(torch.nn.Module):
    """Fused attention with upstream's interface.

    Its window and layout are set from flags when it is built.

    Args:
        causal: whether to hide keys after the query's own position; queries are aligned with the last keys.
        softmax_scale: the factor of the scores. If None, 1 / sqrt(d).
        attention_dropout: the dropout probability in training.
        device, dtype: accepted for upstream's callers; upstream does not use them either.
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
        """Compute attention: map queries ``[b, sq, n, d]`` and keys and values ``[b, sk, n, d]`` to ``[b,
        sq, n, d]``.
        """
        query, key, value = (tensor.transpose(0, 1) for tensor in (q, k, v))
        return attend(
            query,
            key,
            value,
            flags=self.attention_flags,
            scale=q.size(-1) ** -0.5 if self.softmax_scale is None else self.softmax_scale,
            causal=self.causal,
            offset=k.size(1) - q.size(1) if self.causal else 0,
            dropout_p=self.dropout_p if self.training else 0.0,
        ).transpose(0, 1)


@around(
    f"{_MODULE}:ParallelAttention.__init__",
    why="--use-flash-attn requires two packages and uses a path that ignores masks; CoreAttention is fused "
    "anyway",
)
def initialise_fused(original: Callable[..., None], self: Any, *positional: Any, **keywords: Any) -> None:
    """Build the layer without upstream's flash-attention code, because CoreAttention is already fused."""
    with core_attention.without_flash("use_flash_attn") as asked:
        original(self, *positional, **keywords)
    core_attention.give_flags(self, self.core_attention)
    if asked:  # nothing of size [s, s] is kept, so there is nothing to gain from recomputing it
        self.checkpoint_core_attention = False


@around(
    "megatron.core.tensor_parallel.layers:LinearWithGradAccumulationAndAsyncCommunication.backward",
    why=(
        "upstream takes a view of the gradient, which fused attention returns in its own order of "
        "dimensions (the query of cross-attention)"
    ),
    order=1,  # what keeps weights lies inside
)
def with_contiguous_gradient(original: Callable[..., Any], ctx: Any, grad_output: Tensor) -> Any:
    """Make the gradient contiguous, and then call the original function."""
    return original(ctx, grad_output.contiguous())
