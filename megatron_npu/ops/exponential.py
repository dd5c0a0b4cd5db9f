"""The exponential of large tensors."""

from __future__ import annotations

import math

import torch
from torch import Tensor

_LOG2_E = math.log2(math.e)


def exponential_(tensor: Tensor) -> Tensor:
    """Replace the values by their exponentials, and return the tensor.

    On a cpu by powers of two: torch's ``exp`` is MKL's there, which takes three times as long as both steps
    on a processor that is not Intel's (an EPYC, torch 2.13). The product is rounded, so the result is off by
    up to |x| roundings.
    """
    return tensor.mul_(_LOG2_E).exp2_() if tensor.device.type == "cpu" else tensor.exp_()


def exponential_of_difference_(tensor: Tensor, subtrahend: Tensor) -> Tensor:
    """Replace the values by the exponentials of their differences to ``subtrahend``, and return the tensor.

    On a cpu the subtrahend is multiplied beforehand, which saves a pass. Both products are rounded, so the
    result is off by up to |x| + |subtrahend| roundings: as much as those of the logits that are subtracted.

    Args:
        tensor: fp32 or fp64, changed in place.
        subtrahend: of its dtype, broadcast to it.
    """
    if tensor.device.type != "cpu":
        return tensor.sub_(subtrahend).exp_()
    return torch.add(subtrahend * -_LOG2_E, tensor, alpha=_LOG2_E, out=tensor).exp2_()
