"""Compute exponentials of large tensors faster than torch does."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from megatron_npu.ops import compiled

_LOG2_E = math.log2(math.e)


def exponential_of_difference_(tensor: Tensor, subtrahend: Tensor) -> Tensor:
    """Replace ``tensor`` with ``exp(tensor - subtrahend)`` in place, and return it.

    On a cpu, this uses our compiled kernel or powers of two, because torch's ``exp`` uses MKL there, which
    takes three times as long on non-Intel processors (an EPYC, torch 2.13). With powers of two, the
    subtrahend is scaled beforehand, which saves a pass; both products are rounded, so the error is up to |x|
    + |subtrahend| roundings, as large as that of the logits being subtracted.

    Args:
        tensor: fp32 or fp64, changed in place.
        subtrahend: a tensor of the same dtype, broadcastable to ``tensor``.
    """
    if tensor.device.type != "cpu":
        return tensor.sub_(subtrahend).exp_()
    of_rows = tensor.dim() == 2 and subtrahend.shape == (tensor.size(0), 1)
    if of_rows and compiled.usable(tensor, subtrahend):
        reference = subtrahend.squeeze(1)
        compiled.exponentials_(tensor, reference, torch.zeros_like(reference))
        return tensor
    return torch.add(subtrahend * -_LOG2_E, tensor, alpha=_LOG2_E, out=tensor).exp2_()
