"""``megatron.core.transformer.dot_product_attention``: the core attention of every local spec."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor

from megatron_npu.adaptors.megatron_core.attention import context_parallel
from megatron_npu.adaptors.megatron_core.attention.attention_mask import documents, visible, window_of
from megatron_npu.adaptors.megatron_core.decorators import wrap
from megatron_npu.adaptors.shared import core_attention
from megatron_npu.errors import UsageError
from megatron_npu.ops.attention import attention
from megatron_npu.ops.dispatch import report_fallback

_TARGET = "megatron.core.transformer.dot_product_attention:DotProductAttention"
# Names of AttnMaskType; padding_causal is the causal mask of packed sequences.
_CAUSAL = ("causal", "padding_causal", "causal_bottom_right")


@wrap(
    f"{_TARGET}.__init__",
    why="upstream leaves to TransformerEngine what the forward below has: context parallelism, windows "
    "before 0.15, and the two head sizes of multi-latent attention",
)
def accept_what_forward_has(original: Callable[..., Any]) -> Callable[..., Any]:
    """Hide from the constructor what it refuses; refuse what nobody computes here."""

    signature = inspect.signature(original)

    @functools.wraps(original)
    def initialise(
        self: Any,
        *args: Any,
        k_channels: int | None = None,  # by name alone: no version of upstream's local attention has the two
        v_channels: int | None = None,
        **kwargs: Any,
    ) -> None:
        given = signature.bind(self, *args, **kwargs)
        given.apply_defaults()
        config = given.arguments["config"]
        _refuse_logit_maximum(config)
        hidden = {"context_parallel_size": 1}
        if _window_is_ours(config):
            hidden["window_size"] = None
        with _instead(config, hidden):
            original(*given.args, **given.kwargs)
        self.communication = context_parallel.communication_of(config, given.arguments["cp_comm_type"])
        if v_channels is not None:  # the size of upstream's own result, and the default scale
            self.hidden_size_per_partition = v_channels * self.num_attention_heads_per_partition
        if k_channels is not None and given.arguments["softmax_scale"] is None:
            self.softmax_scale *= (self.hidden_size_per_attention_head / k_channels) ** 0.5

    return initialise


@contextlib.contextmanager
def _instead(config: Any, values: dict[str, Any]) -> Iterator[None]:
    """Set attributes of the configuration for a while."""
    before = {name: getattr(config, name) for name in values}
    vars(config).update(values)
    try:
        yield
    finally:
        vars(config).update(before)


def _window_is_ours(config: Any) -> bool:
    """Return whether upstream's attention has no windows (before 0.15), and will not be the one that runs."""
    return not hasattr(config, "window_attn_skip_freq") and not _unfused_asked_for(config)


def _refuse_logit_maximum(config: Any) -> None:
    for option in ("qk_clip", "log_max_attention_logit"):  # since 0.16
        if getattr(config, option, False):
            flag = "--" + option.replace("_", "-")
            raise UsageError(
                f"{flag} without TransformerEngine",
                "attention that reports the largest of its scores, which no fused attention here does",
                f"Leave {flag} away; --qk-layernorm keeps scores small, too.",
            )


@wrap(
    f"{_TARGET}.forward",
    why="upstream materialises the scores [b, n, s, s]; the device has fused attention",
)
def fused_attention(original: Callable[..., Any]) -> Callable[..., Any]:
    """Call ``ops.attention``; what it does not mean goes to upstream's forward, with the reason logged."""

    @functools.wraps(original)
    def forward(
        self: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        attn_mask_type: Any = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: Any = None,
    ) -> Tensor:
        if _unfused_asked_for(self.config) or _refused(self, attention_bias, packed_seq_params):
            return original(
                self, query, key, value, attention_mask, attn_mask_type, attention_bias, packed_seq_params
            )
        causal = (attn_mask_type or self.attn_mask_type).name in _CAUSAL
        if packed_seq_params is not None:
            return _packed(self, query, key, value, packed_seq_params, causal)
        return _dense(self, query, key, value, attention_mask, causal)

    return forward


def _unfused_asked_for(config: Any) -> bool:
    backend = getattr(config, "attention_backend", None)  # absent before 0.11
    return backend is not None and backend.name in ("unfused", "local") and config.context_parallel_size == 1


def _refused(self: Any, attention_bias: Tensor | None, packed_seq_params: Any) -> bool:
    cp_group = getattr(packed_seq_params, "cp_group", None)  # since 0.16
    if self.communication is None and cp_group is not None and cp_group.size() > 1:
        raise UsageError(
            f"PackedSeqParams with a cp_group of {cp_group.size()} ranks, and context_parallel_size 1",
            "sequences that are whole on each rank, or a configuration that says into how many they are cut",
            "Set context_parallel_size.",
        )
    reason = None
    if getattr(self, "softmax_offset", None) is not None:
        reason = f"softmax_type={self.config.softmax_type}"
    elif attention_bias is not None:
        reason = "attention_bias is given"
    elif packed_seq_params is not None and packed_seq_params.qkv_format != "thd":
        reason = f"packed sequences of format {packed_seq_params.qkv_format}"
    if reason is None:
        return False
    if self.config.context_parallel_size > 1:
        raise NotImplementedError(f"context parallelism with {reason}: upstream's forward would ignore it")
    report_fallback("attention", reason)
    return True


def _dense(self: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, causal: bool) -> Tensor:
    """``[sq, b, n, d]`` and ``[sk, b, g, d]`` to ``[sq, b, n * d]``."""
    call = _arguments(self)
    with core_attention.dropout_generator(call["dropout_p"], self.config.sequence_parallel):
        attend: Callable[..., Tensor] = functools.partial(_attend, **call)
        spread = (self, query, key, value, mask, causal, attend)
        if self.communication == "ring":
            return context_parallel.attend_in_a_ring(*spread, **call)
        if self.communication == "gather":
            return context_parallel.attend_to_gathered(*spread)
        if self.communication == "exchange":
            return context_parallel.attend_with_own_heads(*spread)
        return attend(query, key, value, **visible(self, mask, causal, query.size(1)))


def _packed(
    self: Any, query: Tensor, key: Tensor, value: Tensor, packed_seq_params: Any, causal: bool
) -> Tensor:
    """``[tq, n, d]`` and ``[tk, g, d]`` to ``[tq, n * d]``: documents one behind the other (thd)."""
    call = _arguments(self)
    attend: Callable[..., Tensor] = functools.partial(_attend_packed, causal=causal, **call)
    with core_attention.dropout_generator(call["dropout_p"], self.config.sequence_parallel):
        group = None
        if self.communication is not None:
            group = context_parallel.group_of_batch(self, packed_seq_params)
        if group is None:
            packed = documents(packed_seq_params, query.size(0), key.size(0))
            return attend(query, key, value, packed=packed)
        limited = call["window"] != (None, None)
        options = (packed_seq_params, causal, limited, self.communication, group)
        return context_parallel.attend_packed(query, key, value, *options, attend)


def _arguments(self: Any) -> dict[str, Any]:
    """Return the arguments of ``ops.attention`` that the module decides, whatever the batch."""
    # apply_query_key_layer_scaling divides the one and multiplies by the other
    scale = self.softmax_scale * (self.scale_mask_softmax.scale or 1.0)
    dropout_p = self.attention_dropout.p if self.training else 0.0
    return {"scale": scale, "window": window_of(self), "dropout_p": dropout_p}


def _attend(query: Tensor, key: Tensor, value: Tensor, **kwargs: Any) -> Tensor:
    """``[sq, b, n, d]`` to ``[sq, b, n * d]``."""
    return core_attention.attend(query, key, value, **kwargs).flatten(2)


def _attend_packed(query: Tensor, key: Tensor, value: Tensor, **kwargs: Any) -> Tensor:
    """``[tq, n, d]`` to ``[tq, n * d]``; the last query of a document stands at its last key."""
    return attention(query, key, value, layout="TND", offset="end", **kwargs).flatten(1)
