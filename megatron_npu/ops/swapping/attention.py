"""Replace the attention of Transformers models through Transformers' registries.

A Transformers model looks up its attention function in a registry by the name in its config, and the matching
masks in a second registry. Both contain ``NAME`` from the first swap on.
"""

from __future__ import annotations

import functools
import importlib
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from megatron_npu import devices
from megatron_npu.ops.attention import attention
from megatron_npu.ops.caching import cache_on_tensor
from megatron_npu.ops.dispatch import report_fallback
from megatron_npu.ops.swapping.found import names_in_forward

NAME = "megatron_npu"

# What a module's calls turned out to be: {module: why its attention runs elsewhere}, read by the ledger.
calls_left: weakref.WeakKeyDictionary[nn.Module, str] = weakref.WeakKeyDictionary()


def asks_the_registry(module: nn.Module) -> bool:
    """Return True if a module looks up its attention function in Transformers' registry."""
    return "ALL_ATTENTION_FUNCTIONS" in names_in_forward(module)


def choose_in_configs(model: nn.Module) -> Iterator[tuple[str, str | Callable[[], None]]]:
    """Select our attention in the config of each Transformers model inside ``model``.

    Yields:
        For each config, the path of the model, and either a function that undoes the change or the reason why
        it was not made.
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


_theirs: dict[str, Callable[..., Any]] = {}  # functions of Transformers, found once it is there


def _register() -> None:
    """Add our attention and mask functions to Transformers' registries.

    The registries are imported when a Transformers model is found.
    """
    masks = importlib.import_module("transformers.masking_utils")
    modeling = importlib.import_module("transformers.modeling_utils")
    _theirs["sdpa"] = modeling.ALL_ATTENTION_FUNCTIONS["sdpa"]
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
    """Return the mask for ``attend``, which is True for visible keys, like Transformers' mask for SDPA.

    A mask with padding only is ``[b, 1, 1, sk]``, also in a decoder, because ``attend`` applies the causal
    mask itself, so that no ``[b, 1, sq, sk]`` mask is built.
    """
    masks = importlib.import_module("transformers.masking_utils")
    triangle = mask_function is masks.causal_mask_function
    whole = not isinstance(q_offset, Tensor) and q_offset == kv_offset == 0 and q_length == kv_length
    plain = whole and mask_function in (masks.causal_mask_function, masks.bidirectional_mask_function)
    if (
        (plain and not _is_limited(others) and not torch.compiler.is_compiling())
        and attention_mask is not None
        and attention_mask.shape == (batch_size, kv_length)
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


def _is_limited(further: dict[str, Any]) -> bool:
    """Return True if the requested mask does more than hide padding and future keys."""
    return further.get("local_size") is not None or further.get("use_vmap", False)


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
    """Compute attention, with the signature that Transformers' registry requires.

    Args:
        module: the layer; its ``is_causal`` applies if the argument is None.
        query: ``[b, n, sq, d]``.
        key: ``[b, n or fewer, sk, d]``, including cached keys.
        value: like ``key``.
        attention_mask: the result of ``make_mask``, or None.
        dropout: the probability of dropping a weight.
        scaling: the factor applied to the scores. If None, ``1 / sqrt(d)``.
        is_causal: whether to hide the keys after the query's own position.
        others: other arguments that models pass, such as position biases, soft caps and sinks.

    Returns:
        ``[b, sq, n, d]``, and None in place of the attention weights, which are never materialized.
    """
    further = {"dropout": dropout, "scaling": scaling, **others}
    if torch.compiler.is_compiling():
        theirs = dropout == 0.0 or query.device.type != "cpu"
        call = _of_transformers if theirs else _outside_the_graph
        return call(module, query, key, value, attention_mask, is_causal=is_causal, **further)
    reason = _not_ours(query, attention_mask, others)
    if reason is not None:
        calls_left.setdefault(module, reason)
        report_fallback(f"attention of {type(module).__name__}", reason, "keeps Transformers' implementation")
        return _of_transformers(module, query, key, value, attention_mask, is_causal=is_causal, **further)
    query, key, value = _as_autocast_wants(query, key, value)
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


def _as_autocast_wants(*given: Tensor) -> tuple[Tensor, ...]:
    """Cast the tensors to the dtype that autocast requires, as torch's attention does.

    Rotary embedding may have widened some of them.
    """
    device = given[0].device.type
    if not torch.is_autocast_enabled(device):
        return given
    dtype = torch.get_autocast_dtype(device)
    return tuple(each if each.dtype is torch.float64 else each.to(dtype) for each in given)


def _has_triangle(module: nn.Module, mask: Tensor | None, is_causal: bool | None) -> bool:
    """Return True if future keys must be hidden in addition to the keys that the mask hides."""
    if mask is not None and mask.size(2) > 1:
        return False  # a mask with a row for each query says all
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    return bool(causal if mask is None else getattr(mask, "_triangle", causal))


_outside_the_graph = torch.compiler.disable(
    attend, reason="blockwise attention with dropout cannot be part of a graph"
)


def _not_ours(query: Tensor, mask: Tensor | None, others: dict[str, Any]) -> str | None:
    """Return the reason why our attention does not support a call, or None if it supports the call."""
    for name, what in (
        ("position_bias", "it adds a position bias to the scores"),
        ("softcap", "it caps the scores"),
        ("s_aux", "it has attention sinks"),
        ("cache", "its cache is paged"),
    ):
        if others.get(name) is not None:
            return what
    if others.get("output_attentions"):
        return "the attention weights are requested"
    if mask is not None and (mask.dtype is not torch.bool or mask.dim() != 4):
        return f"the mask is {mask.dtype} with {mask.dim()} dimensions"
    if query.device.type != devices.current().name:
        return f"the query is on {query.device.type}, but the operations run on {devices.current().name}"
    return None


def _of_transformers(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    *,
    is_causal: bool | None,
    **further: Any,
) -> Any:
    """Call the Transformers attention that supports the arguments, either SDPA or the eager
    implementation.
    """
    boolean = mask is not None and mask.dtype is torch.bool and mask.dim() == 4
    causal = query.size(2) > 1 and _has_triangle(module, mask if boolean else None, is_causal)
    if mask is not None and boolean and causal:
        queries, keys = query.size(2), key.size(2)
        mask = mask & torch.ones(queries, keys, dtype=torch.bool, device=mask.device).tril()
    written_out = further.get("softcap") is not None or further.get("s_aux") is not None
    if written_out or further.get("output_attentions"):
        return _written_out(module, query, key, value, mask, causal=causal, **further)
    return _theirs["sdpa"](module, query, key, value, mask, is_causal=is_causal, **further)


def _written_out(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    *,
    causal: bool,
    **further: Any,
) -> Any:
    """Call the function ``eager_attention_forward`` from the source file of the model.

    This function adds masks to the scores.
    """
    if mask is None and causal:
        mask = torch.ones(query.size(2), key.size(2), dtype=torch.bool, device=query.device).tril()[
            None, None
        ]
    if mask is not None and mask.dtype is torch.bool:
        mask = torch.zeros(mask.shape, dtype=query.dtype, device=mask.device).masked_fill_(
            ~mask, torch.finfo(query.dtype).min
        )
    eager = importlib.import_module(type(module).__module__).eager_attention_forward
    return eager(module, query, key, value, mask, **further)


def masked(seen: Tensor) -> Tensor:
    """Convert the mask ``seen``, which is True for visible keys, to torch's convention.

    The inverse is computed once for all layers.
    """
    return cache_on_tensor(seen, "masked", lambda: ~seen)
