"""Fix the T5 model in ``megatron.model.t5_model``, whose calls no longer match upstream's functions.

``--decoder-num-layers`` has no default (see ``arguments.py``), the cross-attention mask is passed in place of
a retriever's ids, and the expert losses are returned even if they were not requested.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from megatron_npu.adaptors.deepspeed.megatron_deepspeed_core.decorators import UNTIL, around

_MASK = 6  # the position of encoder_decoder_attn_mask, as T5Model passes it


@around(
    "megatron.model.language_model:TransformerLanguageModel.forward",
    why="T5 passes the cross-attention mask in the positional argument that now holds the retriever's ids, "
    "so padding is attended to",
    upstream_bug=True,
    until=UNTIL,
)
def with_mask_of_cross_attention(
    original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any
) -> tuple[Any, ...]:
    """Pass the cross-attention mask ``[b, 1, sd, se]`` as a keyword argument."""
    if self.add_decoder and len(args) > _MASK and not self.add_retriever:
        kwargs["enc_dec_attn_mask"], args = args[_MASK], args[:_MASK]
    outputs: tuple[Any, ...] = original(self, *args, **kwargs)
    return outputs


@around(
    "megatron.model.t5_model:T5Model.forward",
    why="the model also returns the experts' losses, on which pretrain_t5.py raises an AttributeError",
    upstream_bug=True,
    until=UNTIL,
)
def without_losses_of_experts(original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
    """Return the losses ``[b, s]``, and the expert losses only if the caller requests them."""
    output = original(self, *args, **kwargs)
    losses = isinstance(output, tuple) and self.post_process and self.add_decoder
    if losses and not self.return_moe_loss:
        only: Tensor = output[0]
        return only
    return output
