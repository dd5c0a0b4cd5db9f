"""Replace the attention of a custom model, which is recognized by the functions that it calls."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron_npu import devices
from megatron_npu.ops.attention import attention
from megatron_npu.ops.caching import cache_on_tensor
from megatron_npu.ops.dispatch import report_fallback
from megatron_npu.ops.swapping.attention import asks_the_registry, calls_left
from megatron_npu.ops.swapping.found import (
    Found,
    Left,
    Replacement,
    bound_elsewhere,
    called_as,
    has_forward_of,
    names_in_forward,
    own_forward,
)


def recognise(module: nn.Module) -> Found:
    """Return the replacement for torch's attention module, or for a module that calls torch's attention
    function.
    """
    if has_forward_of(module, nn.MultiheadAttention):
        reason = _beyond(module)
        return Left("attention", reason) if reason else Replacement("attention", "attention", _multihead)
    if "scaled_dot_product_attention" in names_in_forward(module) and not asks_the_registry(module):
        return Replacement("attention", "attention", _with_our_sdpa)
    return None


def _beyond(module: Any) -> str | None:
    if module.bias_k is not None or module.add_zero_attn:
        return "the layer adds keys (add_bias_kv, add_zero_attn)"
    return None if module._qkv_same_embed_dim else "keys and values have a different width from queries"


def _multihead(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_padding_mask: Tensor | None = None,
    need_weights: bool = True,
    attn_mask: Tensor | None = None,
    average_attn_weights: bool = True,
    is_causal: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Compute ``nn.MultiheadAttention`` with our operation.

    The original forward runs if weights are requested or a mask is added to the scores.
    """
    padding, pairs = _forbidden(key_padding_mask), _forbidden(attn_mask)
    reason = None
    if need_weights:
        reason = "the attention weights are requested (need_weights)"
    elif isinstance(padding, str) or isinstance(pairs, str):
        reason = "its mask is added to the scores"
    elif query.dim() != 3:
        reason = "there is no batch dimension"
    if reason is not None or bound_elsewhere(query):
        if reason is not None and not torch.compiler.is_compiling():
            calls_left.setdefault(module, reason)
            report_fallback("attention of MultiheadAttention", reason, "keeps torch's implementation")
        return own_forward(
            module,
            query,
            key,
            value,
            key_padding_mask,
            need_weights,
            attn_mask,
            average_attn_weights,
            is_causal,
        )
    return _multihead_by_us(module, query, key, value, padding, pairs), None


def _multihead_by_us(
    module: Any, query: Tensor, key: Tensor, value: Tensor, padding: Any, pairs: Any
) -> Tensor:
    heads = module.num_heads
    if query is key and key is value:
        projected = F.linear(query, module.in_proj_weight, module.in_proj_bias).chunk(3, -1)
    else:
        weights = module.in_proj_weight.chunk(3)
        biases = (None,) * 3 if module.in_proj_bias is None else module.in_proj_bias.chunk(3)
        projected = tuple(F.linear(*each) for each in zip((query, key, value), weights, biases, strict=True))
    mask = None if padding is None else padding[:, None, None, :]
    if pairs is not None:
        pairs = pairs.unflatten(0, (-1, heads)) if pairs.dim() == 3 else pairs
        pairs = pairs[(None,) * (4 - pairs.dim())]
        mask = pairs if mask is None else mask | pairs
    output = attention(
        *projected,
        layout="BSH" if module.batch_first else "SBH",
        num_heads=heads,
        scale=(query.size(-1) // heads) ** -0.5,
        mask=mask,
        dropout_p=module.dropout if module.training else 0.0,
    )
    return (
        module.out_proj(output)
        if _hooked(module.out_proj)
        else F.linear(output, module.out_proj.weight, module.out_proj.bias)
    )


def _hooked(module: nn.Module) -> bool:
    return bool(module._forward_hooks or module._forward_pre_hooks or "forward" in vars(module))


def _forbidden(mask: Tensor | None) -> Tensor | str | None:
    """Return a mask that is True for hidden query-key pairs.

    Return the reason as a string if the given mask does more than hide pairs.
    """
    if mask is None or mask.dtype is torch.bool:
        return mask
    # torch's layers hand over -inf and 0 for what they were given as booleans
    return cache_on_tensor(mask, "forbidden", lambda: _from_scores(mask))


def _from_scores(mask: Tensor) -> Tensor | str:
    forbidden = mask == float("-inf")
    return forbidden if bool((forbidden | (mask == 0)).all()) else "adds"


def _with_our_sdpa(module: Any, *args: Any, **kwargs: Any) -> Any:
    if torch.compiler.is_compiling():
        return own_forward(module, *args, **kwargs)
    with called_as("scaled_dot_product_attention", sdpa, module):
        return own_forward(module, *args, **kwargs)


def sdpa(
    theirs: Callable[..., Tensor],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Compute attention with our operation if possible, and otherwise with the original function
    ``theirs``.
    """
    forbidden = (
        None if attn_mask is None else _forbidden(~attn_mask if attn_mask.dtype is torch.bool else attn_mask)
    )
    four = query.dim() == key.dim() == value.dim() == 4
    same = four and query.size(0) == key.size(0) and (enable_gqa or query.size(1) == key.size(1))
    if not same or isinstance(forbidden, str) or query.device.type != devices.current().name:
        reason = (
            "its mask is added to the scores"
            if isinstance(forbidden, str)
            else "its tensors are not all [b, n, s, d]"
        )
        report_fallback("scaled_dot_product_attention", reason, "keeps torch's implementation")
        return theirs(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
    output = attention(
        *(t.transpose(1, 2) for t in (query, key, value)),
        layout="BSND",
        scale=query.size(-1) ** -0.5 if scale is None else scale,
        causal=is_causal,
        mask=forbidden,
        dropout_p=dropout_p,
    )
    return output.transpose(1, 2)
