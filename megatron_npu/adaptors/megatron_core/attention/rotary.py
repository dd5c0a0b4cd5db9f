"""Patch ``megatron.core.models.common.embeddings.rope_utils`` for fused and unfused rotary embedding."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from megatron_npu.adaptors.megatron_core.decorators import (
    constant,
    replace,
    transformer_engine_present,
)
from megatron_npu.adaptors.shared.decorators import upstream_compiles
from megatron_npu.ops.caching import cache_on_tensor
from megatron_npu.ops.rotary import rotary

_MODULE = "megatron.core.models.common.embeddings.rope_utils"


_unfused = partial(
    replace,
    f"{_MODULE}:_apply_rotary_pos_emb_bshd",
    condition=upstream_compiles,
    why="upstream recomputes sine and cosine in every layer and makes five passes over the tensor",
)


@_unfused(versions=">=0.20")
def apply_rotary_either_way(
    t: Tensor,
    freqs: Tensor,
    rotary_interleaved: bool = False,
    mla_rotary_interleaved: bool = False,
    mscale: float = 1.0,
    inverse: bool = False,
    mla_output_remove_interleaving: bool = False,
    multi_latent_attention: bool | None = None,
) -> Tensor:
    """Apply rotary embedding or its inverse, like ``_apply_rotary_pos_emb_bshd`` since 0.20.

    Args:
        t: ``[s, b, n, d]``, or ``[s, b, d]``.
        freqs: ``[s, 1, 1, r]``.
        inverse: whether to rotate by the negative angles.
        mla_output_remove_interleaving: whether to return ``t`` in its original order, in which pairs are
            interleaved.
    """
    latent = mla_rotary_interleaved if multi_latent_attention is None else multi_latent_attention
    headless = freqs.dim() == t.dim() + 1 and freqs.size(-2) == 1
    x = t.unsqueeze(-2) if headless else t
    angles = cache_on_tensor(freqs, "turned_back", lambda: -freqs) if inverse else freqs
    turned = _apply_rotary_pos_emb_bshd(x, angles, rotary_interleaved, latent, mscale)
    if latent and mla_output_remove_interleaving:
        size = freqs.shape[-1]
        pairs = torch.stack(turned[..., :size].chunk(2, -1), -1)
        turned = torch.cat((pairs.flatten(-2), turned[..., size:]), -1)
    return turned.squeeze(-2) if headless else turned


@_unfused(versions=">=0.19,<0.20")
def apply_rotary_with_either_name(
    t: Tensor,
    freqs: Tensor,
    rotary_interleaved: bool = False,
    mla_rotary_interleaved: bool = False,
    mscale: float = 1.0,
    multi_latent_attention: bool | None = None,
) -> Tensor:
    """Apply rotary embedding like ``_apply_rotary_pos_emb_bshd``.

    Both names of an argument that 0.19 renamed are accepted.
    """
    latent = mla_rotary_interleaved if multi_latent_attention is None else multi_latent_attention
    return _apply_rotary_pos_emb_bshd(t, freqs, rotary_interleaved, latent, mscale)


@_unfused(versions="<0.19")
def _apply_rotary_pos_emb_bshd(
    t: Tensor,
    freqs: Tensor,
    rotary_interleaved: bool = False,
    multi_latent_attention: bool = False,
    mscale: float = 1.0,
) -> Tensor:
    """Apply rotary embedding to ``[s, b, n, d]`` with the angles ``[s, 1, 1, r]``."""
    if multi_latent_attention:  # its pairs lie side by side, and are wanted apart
        size = freqs.shape[-1]
        t = torch.cat((t[..., 0:size:2], t[..., 1:size:2], t[..., size:]), -1)
    return rotary(t, freqs, rotary_interleaved, mscale)


def fused_apply_rotary_pos_emb(
    t: Tensor, freqs: Tensor, transpose_output_memory: bool = False, interleaved: bool = False
) -> Tensor:
    """Apply rotary embedding in place of TransformerEngine's function, for ``--apply-rope-fusion``.

    The memory order of the result is ours.
    """
    return rotary(t, freqs, interleaved)


def fused_apply_rotary_pos_emb_thd(
    t: Tensor,
    cu_seqlens: Tensor,
    freqs: Tensor,
    cp_size: int = 1,
    cp_rank: int = 0,
    interleaved: bool = False,
) -> Tensor:
    """Apply rotary embedding to packed sequences ``[t, n, d]`` with the boundaries ``[b + 1]``, as
    TransformerEngine does.

    Args:
        interleaved: the value of ``--rotary-interleaved``, which 0.17 and newer pass.
    """
    from megatron.core.models.common.embeddings.rope_utils import _get_thd_freqs_on_this_cp_rank

    lengths = ((cu_seqlens[1:] - cu_seqlens[:-1]) // cp_size).tolist()
    angles = [_get_thd_freqs_on_this_cp_rank(cp_rank, cp_size, x, freqs) for x in t.split(lengths)]
    return rotary(t.unsqueeze(1), torch.cat(angles), interleaved).squeeze(1)


for _function in (fused_apply_rotary_pos_emb, fused_apply_rotary_pos_emb_thd):
    constant(
        f"{_MODULE}:{_function.__name__}",
        _function,
        why="--apply-rope-fusion is rejected without TransformerEngine",
        condition=transformer_engine_present,
    )
