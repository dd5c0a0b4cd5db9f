"""Compare the rotation angles of two models at the end of the longest text that they support.

The rest of the verification runs both models on a few tokens only, which does not show whether the scaling of
positions agrees beyond the original context length of the model.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megatron_npu.pretrain.flags import rotary_flags
from megatron_npu.pretrain.flags.frozen_flags import Flags

_POSITIONS = 64
_LONGEST = 1 << 17  # tokens, whose angles take some 100 MB


def length(args: Flags) -> int:
    """Return the length in tokens up to which rotation angles are compared."""
    return min(args.max_position_embeddings, _LONGEST)


def theirs(model: Any, args: Flags) -> Tensor | None:
    """Return the cosines and sines of a transformers model, ``[2, positions, hn / 2]``.

    Without RoPE, return None.

    Args:
        model: the whole model, on the host.
        args: the trainer's flags for the same model.
    """
    rotary = getattr(model.base_model, "rotary_emb", None)
    if rotary is None:
        return None
    positions = torch.arange(max(0, length(args) - _POSITIONS), length(args))[None]
    turned = torch.stack(rotary(torch.zeros(1), positions))[:, 0]
    result: Tensor = turned[..., : turned.size(-1) // 2]
    return result


def difference(gpt: Any, args: Flags, theirs: Tensor) -> float:
    """Return the largest difference between the given cosines and sines and those that a GPTModel uses.

    Args:
        gpt: the model, on its device.
        args: the flags of the model.
        theirs: the return value of the function ``theirs``.
    """
    angles = gpt.rotary_pos_emb(length(args))[-theirs.size(1) :, 0, 0].float().cpu()
    pairs = angles[:, ::2] if args.rotary_interleaved else angles[:, : angles.size(-1) // 2]
    factor = rotary_flags.concentration(args) if args.position_embedding_type == "yarn" else 1.0
    return (torch.stack([pairs.cos(), pairs.sin()]) * factor - theirs).abs().max().item()


def bound(tokens: int) -> float:
    """Return the fp32 rounding error of an angle, which is the product of a position and a frequency."""
    return 1e-5 + 4e-7 * tokens
