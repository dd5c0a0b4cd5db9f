"""Split an fp32 number exactly into a bf16 number, to which it is rounded, and a 16-bit remainder.

``weight`` is the bf16 number nearest to ``main`` (ties to even, as ``Tensor.to`` rounds). With both read as
integers, ``main = (weight << 16) + remainder``, and the remainder is from -32768 to 32768, one value more
than 16 bits can represent. So 32768, a tie that was rounded down, is stored as -32768 with a flag. The idea
comes from ``--reuse-fp32-param`` in Ascend's MindSpeed and ``store_param_remainders`` in TransformerEngine
2.1, which rounds ties up and therefore differs from Megatron's bf16 weights in one of 131,072 values.
"""

from __future__ import annotations

import torch
from torch import Tensor

_TIE = 1 << 15


def split(main: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the bf16 roundings of fp32 numbers, the int16 remainders, and flags for ties that were rounded
    down.

    Args:
        main: fp32, of any shape, contiguous. NaN stays NaN, though its bits may change.
    """
    weight = main.to(torch.bfloat16)
    left = main.view(torch.int32) - weight.float().view(torch.int32)
    # The cast wraps: 32768 becomes -32768.
    return weight, left.to(torch.int16), left == _TIE


def join(weight: Tensor, remainder: Tensor, rounded_down: Tensor) -> Tensor:
    """Reconstruct the fp32 numbers that ``split`` has split, in a new tensor."""
    bits = weight.float().view(torch.int32)
    bits.add_(remainder).add_(rounded_down, alpha=2 * _TIE)
    return bits.view(torch.float32)
