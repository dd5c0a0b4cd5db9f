"""Patch ``megatron.core.transformer.dot_product_attention``, which every local layer spec uses as core
attention.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_npu.adaptors.megatron_core.attention import context_parallel
from megatron_npu.adaptors.megatron_core.attention.attention_mask import packed_sequences, visible
from megatron_npu.adaptors.megatron_core.attention.call import CoreAttentionCall
from megatron_npu.adaptors.megatron_core.attention.layer_options import layer_options
from megatron_npu.adaptors.megatron_core.decorators import around
from megatron_npu.adaptors.shared import core_attention
from megatron_npu.adaptors.shared.core_attention import dropout_generator
from megatron_npu.adaptors.shared.decorators import MEMORY_COUNTED
from megatron_npu.base.errors import UsageError
from megatron_npu.ops.dispatch import report_fallback

_TARGET = "megatron.core.transformer.dot_product_attention:DotProductAttention"
# Names of AttnMaskType; padding_causal is the causal mask of packed sequences.
_CAUSAL = ("causal", "padding_causal", "causal_bottom_right")


@around(
    f"{_TARGET}.__init__",
    why="upstream leaves to TransformerEngine what our forward supports: context parallelism, windows "
    "before 0.15, and the two head sizes of multi-latent attention",
)
def accept_what_forward_has(
    original: Callable[..., None],
    self: Any,
    *args: Any,
    k_channels: int | None = None,  # by name alone: no version of upstream's local attention has the two
    v_channels: int | None = None,
    **kwargs: Any,
) -> None:
    """Hide from upstream's constructor the options that only our ``forward`` method supports.

    Unsupported options are rejected.
    """
    given = inspect.signature(original).bind(self, *args, **kwargs)
    given.apply_defaults()
    config = given.arguments["config"]
    _refuse_logit_maximum(config)
    hidden: dict[str, Any] = {"context_parallel_size": 1}
    if _window_is_ours(config):
        hidden["window_size"] = None
    with _instead(config, hidden):
        original(*given.args, **given.kwargs)
    self.layer_options = layer_options(self, given.arguments["cp_comm_type"])
    if v_channels is not None:  # the size of upstream's own result, and the default scale
        self.hidden_size_per_partition = v_channels * self.num_attention_heads_per_partition
    if k_channels is not None and given.arguments["softmax_scale"] is None:
        self.softmax_scale *= (self.hidden_size_per_attention_head / k_channels) ** 0.5


@contextlib.contextmanager
def _instead(config: Any, values: dict[str, Any]) -> Iterator[None]:
    """Set attributes of the configuration inside the ``with`` block, and restore them afterwards."""
    before = {name: getattr(config, name) for name in values}
    vars(config).update(values)
    try:
        yield
    finally:
        vars(config).update(before)


def _window_is_ours(config: Any) -> bool:
    """Return True if upstream, which supports windows only since 0.15, is unable to apply the window."""
    return not hasattr(config, "window_attn_skip_freq") and not _unfused_asked_for(config)


@around(
    f"{_TARGET}.__init__",
    versions=">=0.15",
    order=1,
    upstream_bug=True,
    until="not fixed up to 0.19.2, #7530",
    why="the learnable offset of --softmax-type is not marked as tensor-parallel: the gradient norm counts "
    "only the first rank's heads, and gradients are clipped less than requested; in 0.15 the offset is "
    "never initialized",
)
def mend_offset(original: Callable[..., None], self: Any, *args: Any, **kwargs: Any) -> None:
    """Initialize the offset of the softmax as a tensor-parallel parameter.

    Each rank has the offsets of its heads.
    """
    original(self, *args, **kwargs)
    offset = getattr(self, "softmax_offset", None)
    if not isinstance(offset, torch.nn.Parameter):
        return
    from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes

    set_tensor_model_parallel_attributes(offset, True, 0, 1)
    if not hasattr(self.config, "qk_clip") and self.config.perform_initialization:  # 0.16 has that
        self.config.init_method(offset)


def _refuse_logit_maximum(config: Any) -> None:
    for option in ("qk_clip", "log_max_attention_logit"):  # since 0.16
        if getattr(config, option, False):
            flag = "--" + option.replace("_", "-")
            raise UsageError(
                f"{flag} requires TransformerEngine, because it needs the largest attention "
                f"score, which this package's fused attention does not return. Remove {flag}; "
                "--qk-layernorm also keeps scores small."
            )


@around(
    f"{_TARGET}.forward",
    why="upstream materializes the scores [b, n, s, s], but the device has fused attention",
)
def fused_attention(
    original: Callable[..., Tensor],
    self: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    attn_mask_type: Any = None,
    attention_bias: Tensor | None = None,
    packed_seq_params: Any = None,
) -> Tensor:
    """Compute core attention with ``ops.attention``.

    In unsupported cases, call upstream's forward and log the reason.

    Queries ``[sq, b, n, d]`` and keys and values ``[sk, b, g, d]`` yield ``[sq, b, n * d]``; packed sequences
    ``[tq, n, d]`` and ``[tk, g, d]`` yield ``[tq, n * d]``.
    """
    if _unfused_asked_for(self.config) or _falls_back(self, attention_bias, packed_seq_params):
        return original(
            self, query, key, value, attention_mask, attn_mask_type, attention_bias, packed_seq_params
        )
    call = _call(self, attn_mask_type or self.attn_mask_type, query)
    group = context_parallel.group_of(self, packed_seq_params)
    with dropout_generator(call.dropout_p, self.config.sequence_parallel):
        if packed_seq_params is not None and _is_packed(packed_seq_params):
            return _packed(call, group, query, key, value, packed_seq_params)
        return _dense(call, group, query, key, value, attention_mask)


around(
    "megatron.core.transformer.attention:Attention._checkpointed_attention_forward",
    devices=("npu",),
    why="--recompute-modules core_attn saves the values as a view of the QKV projection's output, which "
    "keeps all of it alive; values are copied if their storage is larger than what is used of it"
    + MEMORY_COUNTED,
)(core_attention.recomputed)


def _unfused_asked_for(config: Any) -> bool:
    backend = getattr(config, "attention_backend", None)  # absent before 0.11
    return backend is not None and backend.name in ("unfused", "local") and config.context_parallel_size == 1


def _falls_back(self: Any, attention_bias: Tensor | None, packed_seq_params: Any) -> bool:
    _refuse_cut_batch(self, packed_seq_params)
    reason = None
    if attention_bias is not None:
        reason = "attention_bias was given"
    elif packed_seq_params is not None and not _means_something(packed_seq_params):
        reason = f"the packed sequences have the format {packed_seq_params.qkv_format}"
    if reason is None:
        return False
    if self.config.context_parallel_size > 1:
        raise NotImplementedError(
            f"context parallelism cannot be used in this layer, because {reason}; only upstream's attention "
            "supports this case, but it ignores context parallelism"
        )
    report_fallback("attention", reason)
    return True


def _means_something(packed_seq_params: Any) -> bool:
    return _is_packed(packed_seq_params) or _is_whole(packed_seq_params)


def _is_packed(packed_seq_params: Any) -> bool:
    return packed_seq_params.qkv_format == "thd"


def _is_whole(packed_seq_params: Any) -> bool:
    """Return True if the packed-sequence parameters only specify which ranks share one sequence.

    ``--hybrid-context-parallel`` creates such parameters.
    """
    local_size = getattr(packed_seq_params, "local_cp_size", None)
    return packed_seq_params.qkv_format == "sbhd" and local_size is not None


def _refuse_cut_batch(self: Any, packed_seq_params: Any) -> None:
    cp_group = getattr(packed_seq_params, "cp_group", None)  # since 0.16
    if self.layer_options.cp_comm_type is None and cp_group is not None and cp_group.size() > 1:
        raise UsageError(
            f"PackedSeqParams has a cp_group of {cp_group.size()} ranks, but context_parallel_size is 1; "
            "the two must match, or each rank must have full sequences. Set context_parallel_size in the "
            "configuration."
        )


def _call(self: Any, attn_mask_type: Any, query: Tensor) -> CoreAttentionCall:
    return CoreAttentionCall(
        options=self.layer_options,
        # apply_query_key_layer_scaling divides the one and multiplies by the other
        scale=self.softmax_scale * (self.scale_mask_softmax.scale or 1.0),
        dropout_p=self.attention_dropout.p if self.training else 0.0,
        causal=attn_mask_type.name in _CAUSAL,
        sink=_sink(self, query),
    )


def _sink(self: Any, query: Tensor) -> Tensor | None:
    """Return the softmax offset ``[n]`` that ``--softmax-type off-by-one`` or ``learnable`` requests
    (since 0.15).
    """
    offset: Tensor | None = getattr(self, "softmax_offset", None)
    if offset is not None and offset.device != query.device:
        offset = self.softmax_offset = offset.to(query.device)  # the zeros of 0.15 are made on the host
    return offset


def _dense(
    call: CoreAttentionCall,
    group: dist.ProcessGroup | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
) -> Tensor:
    if group is not None:
        return context_parallel.attend(call, group, query, key, value, mask)
    return call.attend(query, key, value, **visible(call, mask, query.size(1)))


def _packed(
    call: CoreAttentionCall,
    group: dist.ProcessGroup | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    packed_seq_params: Any,
) -> Tensor:
    if group is not None:
        return context_parallel.attend_packed(call, group, query, key, value, packed_seq_params)
    packed = packed_sequences(packed_seq_params, query.size(0), key.size(0))
    return call.attend_packed(query, key, value, packed)
