"""The exponential of large tensors."""

from __future__ import annotations

import math

from torch import Tensor

_LOG2_E = math.log2(math.e)


def exponential_(tensor: Tensor) -> Tensor:
    """Replace the values by their exponentials, and return the tensor.

    On a cpu by powers of two: torch's ``exp`` is MKL's there, which takes three times as long as both steps
    on a processor that is not Intel's (an EPYC, torch 2.13). The product is rounded, so the result is off by
    up to |x| roundings.
    """
    return tensor.mul_(_LOG2_E).exp2_() if tensor.device.type == "cpu" else tensor.exp_()
