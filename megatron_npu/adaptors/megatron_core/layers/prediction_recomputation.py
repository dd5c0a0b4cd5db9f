"""Patch ``megatron.core.transformer.multi_token_prediction`` to recompute an additional layer that has a
padding mask.

In 0.18, ``MultiTokenPredictionLayer.forward`` passes the mask to ``_checkpointed_forward``, which has no such
parameter.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor

from megatron_npu.adaptors.megatron_core.decorators import around
from megatron_npu.base.object_view import View


@around(
    "megatron.core.transformer.multi_token_prediction:MultiTokenPredictionLayer._checkpointed_forward",
    versions=">=0.18,<0.19",
    upstream_bug=True,
    until="0.19.0",
    order=1,  # outside of the backport that chooses the group of FP8 activations
    why="--mtp-num-layers with --recompute-granularity full raises a TypeError, because the recomputation "
    "of an additional layer does not take its padding mask",
)
def recompute_with_padding(
    original: Callable[..., Any],
    self: Any,
    hidden_states: Tensor,
    decoder_input: Tensor,
    *args: Any,
    padding_mask: Tensor | None = None,
    **kwargs: Any,
) -> Any:
    """Recompute an additional layer, and pass the padding mask to the layer itself.

    Args:
        original: upstream's method, which has no ``padding_mask``.
        self: the layer.
        hidden_states: ``[s, b, h]``.
        decoder_input: the embeddings of the next tokens, ``[s, b, h]``.
        args: upstream's further positional arguments.
        padding_mask: a boolean mask, ``[b, s]``, that is true at padding (default: no padding). No gradient
            flows through it, so it need not be an input of the recomputed function.
        kwargs: upstream's further keyword arguments.
    """
    recomputed = partial(self._proj_and_transformer_layer, padding_mask=padding_mask)
    layer = View(self, _proj_and_transformer_layer=recomputed)
    return original(layer, hidden_states, decoder_input, *args, **kwargs)
