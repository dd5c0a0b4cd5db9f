"""Attention: Transformers' through its registries, a user's by what it calls.

A model of Transformers asks a registry for its attention function by the name in its config, and another one
for the masks that this function takes. Both know ``NAME`` from the first swap on.
"""

from __future__ import annotations

import functools
import importlib
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron_npu import devices
from megatron_npu.ops.attention import attention
from megatron_npu.ops.caching import cache_on_tensor
from megatron_npu.ops.dispatch import report_fallback
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

NAME = "megatron_npu"

# What a module's calls turned out to be: {module: why its attention runs elsewhere}, read by the ledger.
calls_left: weakref.WeakKeyDictionary[nn.Module, str] = weakref.WeakKeyDictionary()


# -- Transformers -----------------------------------------------------------------------------------


def asks_the_registry(module: nn.Module) -> bool:
    """Return whether the module gets its attention function from Transformers' registry."""
    return "ALL_ATTENTION_FUNCTIONS" in names_in_forward(module)


def choose_in_configs(model: nn.Module) -> Iterator[tuple[str, str | Callable[[], None]]]:
    """Let the configs of Transformers' models in ``model`` name our attention.

    Yields:
        (path of the model, what undoes it, or why it is not done), for each config once.
    """
    seen: set[int] = set()
    for path, part in model.named_modules():
        config = getattr(part, "config", None)
        if not hasattr(type(part), "_can_set_attn_implementation") or config is None or id(config) in seen:
            continue
        seen.add(id(config))
        before = config._attn_implementation
        if before == NAME:
            continue
        if not type(part)._can_set_attn_implementation():
            yield path, "its attention does not come from Transformers' registry"
            continue
        _register()
        config._attn_implementation_internal = NAME  # the property would set nested configs, which come later
        yield path, functools.partial(setattr, config, "_attn_implementation_internal", before)


@functools.cache
def _sdpa() -> Callable[..., Any]:
    """Return the function of Transformers that was there when ours were registered."""
    function: Callable[..., Any] = importlib.import_module(
        "transformers.modeling_utils"
    ).ALL_ATTENTION_FUNCTIONS["sdpa"]
    return function


def _register() -> None:
    """Put our functions into the registries of Transformers, which is imported where a model of it is met."""
    masks = importlib.import_module("transformers.masking_utils")
    modeling = importlib.import_module("transformers.modeling_utils")
    _sdpa()
    if NAME not in modeling.ALL_ATTENTION_FUNCTIONS:
        modeling.ALL_ATTENTION_FUNCTIONS.register(NAME, attend)
        masks.ALL_MASK_ATTENTION_FUNCTIONS.register(NAME, make_mask)


def make_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: Any = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] | None = None,
    attention_mask: Tensor | None = None,
    **others: Any,
) -> Tensor | None:
    """Return a mask for ``attend``: as Transformers' for SDPA, True where a key is seen.

    Padding alone is ``[b, 1, 1, sk]``, also with the triangle of a decoder, which ``attend`` knows of: so no
    ``[b, 1, sq, sk]`` is built.
    """
    masks = importlib.import_module("transformers.masking_utils")
    triangle = mask_function is masks.causal_mask_function
    whole = not isinstance(q_offset, Tensor) and q_offset == kv_offset == 0 and q_length == kv_length
    limited = others.get("local_size") is not None or others.get("use_vmap", False)
    if (
        (triangle or mask_function is masks.bidirectional_mask_function)
        and (whole and not limited and not torch.compiler.is_compiling())
        and (attention_mask is not None and attention_mask.shape == (batch_size, kv_length))
    ):
        seen = attention_mask.to(torch.bool)[:, None, None, :]
        seen.__dict__["_triangle"] = triangle
        return None if seen.all() else seen
    return masks.sdpa_mask(
        batch_size=batch_size,
        q_length=q_length,
        kv_length=kv_length,
        q_offset=q_offset,
        kv_offset=kv_offset,
        mask_function=mask_function,
        attention_mask=attention_mask,
        **others,
    )


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    **others: Any,
) -> tuple[Tensor, Tensor | None]:
    """Attend, as the registry of Transformers wants it.

    Args:
        module: the layer; its ``is_causal`` holds where the argument of that name is None.
        query: ``[b, n, sq, d]``.
        key: ``[b, n or fewer, sk, d]``, with those of a cache.
        value: like ``key``.
        attention_mask: from ``make_mask``; None without.
        dropout: probability of dropping a weight.
        scaling: factor of the scores; None is ``1 / sqrt(d)``.
        is_causal: no key after the query's own position.
        others: what else models pass: position biases, soft caps, sinks.

    Returns:
        ``[b, sq, n, d]``, and None for the weights, which are never all there at once.
    """
    if torch.compiler.is_compiling():
        if dropout == 0.0 or query.device.type != "cpu":
            return _of_transformers(
                module, query, key, value, attention_mask, dropout, scaling, is_causal, others
            )
        return _outside_the_graph(
            module, query, key, value, attention_mask, dropout, scaling, is_causal, **others
        )
    reason = _not_ours(query, attention_mask, others)
    if reason is not None:
        if module not in calls_left:
            calls_left[module] = reason
        report_fallback(f"attention of {type(module).__name__}", reason, "stays Transformers' own")
        return _of_transformers(
            module, query, key, value, attention_mask, dropout, scaling, is_causal, others
        )
    if torch.is_autocast_enabled(query.device.type):  # as in torch's own: a rotary embedding may have widened
        dtype = torch.get_autocast_dtype(query.device.type)
        query, key, value = (t if t.dtype is torch.float64 else t.to(dtype) for t in (query, key, value))
    if query.size(0) != key.size(0):  # learned queries, the same for all batches
        query = query.expand(key.size(0), -1, -1, -1)
    output = attention(
        *(t.transpose(1, 2) for t in (query, key, value)),
        layout="BSND",
        scale=query.size(-1) ** -0.5 if scaling is None else scaling,
        causal=query.size(2) > 1 and _has_triangle(module, attention_mask, is_causal),
        mask=None if attention_mask is None else masked(attention_mask),
        dropout_p=dropout,
    )
    return output, None


def _has_triangle(module: nn.Module, mask: Tensor | None, is_causal: bool | None) -> bool:
    """Return whether no key after the query's own position is seen, beyond what the mask says."""
    if mask is not None and mask.size(2) > 1:
        return False  # a mask with a row for each query says all
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    return bool(causal if mask is None else getattr(mask, "_triangle", causal))


_outside_the_graph = torch.compiler.disable(attend, reason="blockwise attention with dropout is no graph")


def _not_ours(query: Tensor, mask: Tensor | None, others: dict[str, Any]) -> str | None:
    """Return why a call is not for the operation."""
    for name, what in (
        ("position_bias", "it adds a position bias to the scores"),
        ("softcap", "it caps the scores"),
        ("s_aux", "it has attention sinks"),
        ("cache", "its cache is paged"),
    ):
        if others.get(name) is not None:
            return what
    if others.get("output_attentions"):
        return "the attention weights are asked for"
    if mask is not None and (mask.dtype is not torch.bool or mask.dim() != 4):
        return f"its mask is {mask.dtype} in {mask.dim()} dimensions"
    if query.device.type != devices.current().name:
        return f"it is on {query.device.type}, the operations on {devices.current().name}"
    return None


def _of_transformers(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    dropout: float,
    scaling: float | None,
    is_causal: bool | None,
    others: dict[str, Any],
) -> Any:
    """Call the attention of Transformers that takes the call: SDPA's, or the one written out."""
    boolean = mask is not None and mask.dtype is torch.bool and mask.dim() == 4
    causal = query.size(2) > 1 and _has_triangle(module, mask if boolean else None, is_causal)
    if mask is not None and boolean and causal:
        queries, keys = query.size(2), key.size(2)
        mask = mask & torch.ones(queries, keys, dtype=torch.bool, device=mask.device).tril()
    written_out = others.get("softcap") is not None or others.get("s_aux") is not None
    if written_out or others.get("output_attentions"):
        return _written_out(module, query, key, value, mask, dropout, scaling, causal, others)
    return _sdpa()(
        module, query, key, value, mask, dropout=dropout, scaling=scaling, is_causal=is_causal, **others
    )


def _written_out(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    dropout: float,
    scaling: float | None,
    causal: bool,
    others: dict[str, Any],
) -> Any:
    """Call ``eager_attention_forward`` of the model's own file, whose masks are added to the scores."""
    if mask is None and causal:
        mask = torch.ones(query.size(2), key.size(2), dtype=torch.bool, device=query.device).tril()[
            None, None
        ]
    if mask is not None and mask.dtype is torch.bool:
        mask = torch.zeros(mask.shape, dtype=query.dtype, device=mask.device).masked_fill_(
            ~mask, torch.finfo(query.dtype).min
        )
    eager = importlib.import_module(type(module).__module__).eager_attention_forward
    return eager(module, query, key, value, mask, dropout=dropout, scaling=scaling, **others)


def masked(seen: Tensor) -> Tensor:
    """Return True where ``seen``, a mask of torch's convention, is False; for all layers once."""
    return cache_on_tensor(seen, "masked", lambda: ~seen)


# -- a user's own model -----------------------------------------------------------------------------


def recognise(module: nn.Module) -> Found:
    """Return what takes the place of torch's attention layer, or of a layer that calls torch's function."""
    if has_forward_of(module, nn.MultiheadAttention):
        reason = _beyond(module)
        return Left("attention", reason) if reason else Replacement("attention", "attention", _multihead)
    if "scaled_dot_product_attention" in names_in_forward(module) and not asks_the_registry(module):
        return Replacement("attention", "attention", _with_our_sdpa)
    return None


def _beyond(module: Any) -> str | None:
    if module.bias_k is not None or module.add_zero_attn:
        return "it adds keys of its own (add_bias_kv, add_zero_attn)"
    return None if module._qkv_same_embed_dim else "keys and values are of another width than queries"


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
    """``nn.MultiheadAttention``; its own forward runs where weights are wanted or a mask adds to scores."""
    padding, pairs = _forbidden(key_padding_mask), _forbidden(attn_mask)
    reason = None
    if need_weights:
        reason = "the attention weights are asked for (need_weights)"
    elif isinstance(padding, str) or isinstance(pairs, str):
        reason = "its mask adds to the scores"
    elif query.dim() != 3:
        reason = "there is no batch"
    if reason is not None or bound_elsewhere(query):
        if reason is not None and not torch.compiler.is_compiling():
            calls_left.setdefault(module, reason)
            report_fallback("attention of MultiheadAttention", reason, "stays torch's own")
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
    """Return a mask as True where a pair is forbidden; a word where it does more than forbid."""
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
    """``F.scaled_dot_product_attention``, ``theirs``, by the operation, where it takes the call."""
    forbidden = (
        None if attn_mask is None else _forbidden(~attn_mask if attn_mask.dtype is torch.bool else attn_mask)
    )
    four = query.dim() == key.dim() == value.dim() == 4
    same = four and query.size(0) == key.size(0) and (enable_gqa or query.size(1) == key.size(1))
    if not same or isinstance(forbidden, str) or query.device.type != devices.current().name:
        reason = (
            "its mask adds to the scores" if isinstance(forbidden, str) else "not [b, n, s, d] throughout"
        )
        report_fallback("scaled_dot_product_attention", reason, "stays torch's own")
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
