"""Define a reference kernel for the merge step of ring attention, which combines results over different
keys.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_npu.sim.kernels.attention import layouts
from megatron_npu.sim.kernels.registry import kernel


@kernel("npu_ring_attention_update")
def npu_ring_attention_update(
    prev_attn_out: Tensor,
    prev_softmax_max: Tensor,
    prev_softmax_sum: Tensor,
    cur_attn_out: Tensor,
    cur_softmax_max: Tensor,
    cur_softmax_sum: Tensor,
    *,
    actual_seq_qlen: Tensor | None = None,
    input_layout: str = "SBH",
    input_softmax_layout: str = "",
) -> tuple[Tensor, Tensor, Tensor]:
    """Merge two attention results over different keys, and return the output and the softmax maximum and sum.

    Statistics are ``[b, n, s, 8]`` for SBH ``[s, b, h]`` and ``[t, n, 8]`` for TND ``[t, n, d]``. For TND,
    they are ordered by head within each sequence unless ``input_softmax_layout`` is TND.
    """
    maximum = torch.maximum(prev_softmax_max, cur_softmax_max)
    previous = prev_softmax_sum * torch.exp(prev_softmax_max - maximum)
    current = cur_softmax_sum * torch.exp(cur_softmax_max - maximum)
    total = previous + current
    merged = torch.zeros_like(prev_attn_out, dtype=torch.float32)
    for attention, part in ((prev_attn_out, previous), (cur_attn_out, current)):
        share = part / total
        if input_layout == "SBH":
            merged += attention.float() * _share_sbh(share, attention)
        else:
            merged += attention.float() * _share_tnd(share, actual_seq_qlen, input_softmax_layout)
    return merged.to(prev_attn_out.dtype), maximum, total


def _share_sbh(share: Tensor, attention: Tensor) -> Tensor:
    """Expand factors ``[b, n, s, 8]`` to ``[s, b, h]``."""
    width = attention.size(2) // share.size(1)
    return share[..., 0].permute(2, 0, 1).repeat_interleave(width, dim=2)


def _share_tnd(share: Tensor, ends: Tensor | None, softmax_layout: str) -> Tensor:
    """Convert factors ``[t, n, 8]`` to ``[t, n, 1]``, which broadcasts to ``[t, n, d]``.

    ``ends`` starts with 0.
    """
    if softmax_layout == "TND":
        return share[..., :1]
    assert ends is not None  # by the limits
    rows = layouts.spans([int(end) for end in ends][1:])
    parts = layouts.unpack_statistics(share, rows, softmax_layout)
    return torch.cat([part.transpose(0, 1) for part in parts])[..., :1]
