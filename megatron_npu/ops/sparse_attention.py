"""Compute DeepSeek's sparse attention over latent keys and values.

Each query attends to the keys that an indexer selects.

Source: the DeepSeek-V3.2-Exp report, section 2.1, in the absorbed form of megatron-core 0.19
(``transformer/experimental_attention_variant/dsa.py``): one key for all heads; its first channels are also
the value, its last ones are rotated.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_npu.ops.dispatch import Make, Operation


def sparse_latent_attention(
    query: Tensor, key: Tensor, indices: Tensor, scale: float, value_channels: int
) -> Tensor:
    """Return causal softmax(scale · q·k̃ᵀ)·ṽ over the selected keys k̃, with the softmax in fp32.

    Args:
        query: ``[s, b, n, c + r]``.
        key: ``[s, b, 1, c + r]``; its first c channels are the values.
        indices: ``[b, s, k]``, integers: the selected keys of each query, in any order, padded at the end
            with negative numbers. Keys after the query are not read.
        scale: factor applied to the scores.
        value_channels: c.

    Returns:
        ``[s, b, n, c]`` in the dtype of ``query``, contiguous; zeros if no key is selected.

    Raises:
        ValueError: the shapes do not match.
    """
    length, batch, _, width = query.shape
    if key.shape != (length, batch, 1, width) or indices.shape[:2] != (batch, length) or indices.dim() != 3:
        raise ValueError(
            "query, key and indices must have the shapes [s, b, n, c + r], [s, b, 1, c + r] and [b, s, k], "
            f"but got {tuple(query.shape)}, {tuple(key.shape)} and {tuple(indices.shape)}"
        )
    if not 0 < value_channels <= width:
        raise ValueError(f"{value_channels} value channels do not fit into keys with {width} channels")
    return _attend(query, key, indices, scale, value_channels)


def _reference(query: Tensor, key: Tensor, indices: Tensor, scale: float, value_channels: int) -> Tensor:
    wide = torch.promote_types(query.dtype, torch.float32)
    length, chosen = query.size(0), indices.long()
    position = torch.arange(length, device=query.device)[:, None]
    forbidden = (chosen < 0) | (chosen > position)
    batch = torch.arange(query.size(1), device=query.device)[:, None, None]
    rows = key[:, :, 0].transpose(0, 1).to(wide)[batch, chosen.clamp(min=0)]  # [b, s, k, c + r]
    scores = torch.einsum("sbnd,bskd->bsnk", query.to(wide), rows) * scale
    weights = scores.masked_fill(forbidden[:, :, None], float("-inf")).softmax(-1)
    weights = weights.masked_fill(forbidden[:, :, None], 0.0)  # also where nothing is chosen at all
    output = torch.einsum("bsnk,bskd->sbnd", weights, rows[..., :value_channels])
    return output.to(query.dtype).contiguous()


_attend = Operation("sparse_latent_attention", _reference)
_attend.on("cpu", "cuda", note="the selected rows, gathered")(_reference)

# torch_npu 2.13, npu_sparse_flash_attention; its sizes are in MindSpore's documentation of the same operation
_LATENT, _ROTATED = 512, 64
_HEADS = tuple(2**power for power in range(8))
_DTYPES = (torch.bfloat16, torch.float16)


def beyond_npu(query: Tensor, key: Tensor, indices: Tensor, scale: float, value_channels: int) -> str | None:
    """Return the documented limit of ``npu_sparse_flash_attention`` that the arguments exceed, or None."""
    kernel = "npu_sparse_flash_attention"
    if query.dtype not in _DTYPES:
        return f"{kernel} supports only bf16 and fp16, but the query is {query.dtype}"
    if (value_channels, query.size(3) - value_channels) != (_LATENT, _ROTATED):
        given = f"{value_channels} and {query.size(3) - value_channels}"
        return f"{kernel} supports only {_LATENT} latent and {_ROTATED} rotated channels, but got {given}"
    if query.size(2) not in _HEADS:
        return f"{kernel} supports only 1, 2, 4, … or {_HEADS[-1]} heads, but got {query.size(2)}"
    return None


@_attend.on(
    "npu",
    supports=beyond_npu,
    note="`npu_sparse_flash_attention`",
    limits=f"bf16 and fp16, {_LATENT} latent and {_ROTATED} rotated channels, 1, 2, 4 to {_HEADS[-1]} heads",
)
def _attend_npu(query: Tensor, key: Tensor, indices: Tensor, scale: float, value_channels: int) -> Tensor:
    import torch_npu

    query, key = query.transpose(0, 1), key.transpose(0, 1)
    latent, rotated = (part.contiguous() for part in query.split([value_channels, _ROTATED], dim=-1))
    values, rotated_key = (part.contiguous() for part in key.split([value_channels, _ROTATED], dim=-1))
    output, _, _ = torch_npu.npu_sparse_flash_attention(
        latent,
        values,
        values,
        indices.unsqueeze(2).to(torch.int32).contiguous(),
        scale,
        query_rope=rotated,
        key_rope=rotated_key,
        sparse_mode=3,  # right-down causal
        attention_mode=2,  # MLA, absorbed
        return_softmax_lse=True,  # for backward
    )
    return output.transpose(0, 1).contiguous()


@_attend.example()
def _example(make: Make) -> Tensor:
    query, key = make(5, 1, 2, _LATENT + _ROTATED), make(5, 1, 1, _LATENT + _ROTATED)
    chosen = torch.arange(5, device=query.device)
    indices = (chosen[:, None] - chosen).clamp(min=-1)[None, :, :3]  # the query itself and two before it
    return sparse_latent_attention(query, key, indices, 0.05, _LATENT)
