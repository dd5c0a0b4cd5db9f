"""Split an fp32 number exactly into its bf16 rounding and the 16 remaining bits.

With ``weight`` the bf16 nearest to ``main`` (ties to even, as ``Tensor.to`` rounds) and both read as
integers, ``main = (weight << 16) + remainder`` with a remainder from -32768 to 32768. That is one value more
than 16 bits hold: 32768, which is a tie that was rounded down, is kept as -32768 together with a flag. The
idea is that of ``--reuse-fp32-param`` in Ascend's MindSpeed and of ``store_param_remainders`` in
TransformerEngine 2.1, whose form rounds ties up and so differs from Megatron's bf16 weights in one number of
131,072.
"""

from __future__ import annotations

import torch
from torch import Tensor

_TIE = 1 << 15


def split(main: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the bf16 weight, the remainder (int16) and the flag of a tie that was rounded down (bool).

    Args:
        main: fp32, of any shape, contiguous. NaN stays NaN, whichever one.
    """
    weight = main.to(torch.bfloat16)
    left = main.view(torch.int32) - weight.float().view(torch.int32)
    # The cast wraps: 32768 becomes -32768.
    return weight, left.to(torch.int16), left == _TIE


def join(weight: Tensor, remainder: Tensor, rounded_down: Tensor) -> Tensor:
    """Return the fp32 number that ``split`` was given, in fresh memory."""
    bits = weight.float().view(torch.int32)
    bits.add_(remainder).add_(rounded_down, alpha=2 * _TIE)
    return bits.view(torch.float32)
