"""Support ``--experimental-attention-variant dsa`` by attending to all selected keys in one call.

Patches ``experimental_attention_variant.dsa`` and, since 0.19, ``dsa_masking``, where attention has a single
latent key. Older versions, and newer versions without weight absorption, have a key for every head, which
``npu_sparse_flash_attention`` does not support; this is logged. The indexer and its loss remain upstream's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from megatron_npu.adaptors.megatron_core.decorators import around, watch
from megatron_npu.adaptors.shared.decorators import LAUNCHES_COUNTED
from megatron_npu.ops import dispatch
from megatron_npu.ops.sparse_attention import beyond_npu, sparse_latent_attention

_DSA = "megatron.core.transformer.experimental_attention_variant"
_CAUSAL = "megatron_npu_causal"  # of the tensor of first visible keys


@around(
    f"{_DSA}.dsa_masking:build_dsattention_forward_mask",
    devices=("npu",),
    versions=">=0.19",
    why="only this function knows, without waiting for the device, that each query sees exactly the keys "
    "before it",
)
def note_plain_causal(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Mark query bounds that represent a plain causal mask."""
    mask, bounds, plain = original(*args, **kwargs)
    if plain and bounds is not None:
        setattr(bounds[0], _CAUSAL, True)
    return mask, bounds, plain


@around(
    f"{_DSA}.dsa:_unfused_absorbed_dsa_fn",
    devices=("npu",),
    versions=">=0.19",
    why="npu_sparse_flash_attention reads only the selected keys; upstream computes all scores of all heads "
    "in fp32 and masks them" + LAUNCHES_COUNTED,
)
def attend_to_chosen_keys(
    original: Callable[..., Tensor],
    query: Tensor,
    key: Tensor,
    topk_indices: Tensor,
    softmax_scale: float,
    v_channels: int,
    mask: Tensor | None = None,
    varlen_starts: Tensor | None = None,
    varlen_ends: Tensor | None = None,
    key_positions: Tensor | None = None,
) -> Tensor:
    """Attend to the selected keys: map queries ``[s, b, n, c + r]`` and the key ``[s, b, 1, c + r]`` to
    ``[s, b, n, c]``.
    """
    reason = beyond_npu(query, key, topk_indices, softmax_scale, v_channels)
    if mask is not None or not getattr(varlen_starts, _CAUSAL, False) or key.size(0) != query.size(0):
        reason = (
            "the attention is not plain causal, because of packed sequences, context parallelism or "
            "the data loader's mask"
        )
    if reason is not None:
        dispatch.report_fallback("sparse attention", reason, "runs Megatron's own attention over all keys")
        return original(
            query,
            key,
            topk_indices,
            softmax_scale,
            v_channels,
            mask=mask,
            varlen_starts=varlen_starts,
            varlen_ends=varlen_ends,
            key_positions=key_positions,
        )
    return sparse_latent_attention(query, key, topk_indices, softmax_scale, v_channels)


@around(
    f"{_DSA}.dsa:unfused_dsa_fn",
    devices=("npu",),
    versions=">=0.16",
    why="npu_sparse_flash_attention does not support separate keys and values per head, which is logged "
    "because users may expect it; upstream computes all scores of all heads in fp32 and masks them",
)
def report_keys_of_each_head(original: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
    """Log once why the attention kernel also reads keys that were not selected."""
    dispatch.report_fallback(
        "sparse attention",
        "npu_sparse_flash_attention supports one latent key for all heads, whose first channels are the "
        "values; here each head has its own keys and values, as in every megatron-core before 0.19",
        "runs Megatron's own attention over all keys",
    )
    return original(*args, **kwargs)


watch(
    f"{_DSA}.dsa:compute_dsa_indexer_loss",
    devices=("npu",),
    versions=">=0.16",
    why=(
        "the indexer's loss reads all scores of the indexer, of which npu_lightning_indexer returns only "
        "the selected ones; for npu_sparse_lightning_indexer_grad_kl_loss the wheel documents neither the"
        " formula nor how ranks that share heads sum their targets"
    ),
)
