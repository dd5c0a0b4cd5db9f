"""Define reference kernels for the device's overflow flag.

An Atlas A2 or A3 in its default Inf/NaN mode never sets the flag: overflow becomes inf in the result. The
simulated device behaves in the same way. Programs check for inf, as torch_npu's own GradScaler does there.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_npu.sim.kernels.registry import kernel

WORDS = 8


@kernel("npu_alloc_float_status")
def npu_alloc_float_status(input: Tensor) -> Tensor:
    """Return eight zeros in fp32, as storage for the overflow flag."""
    return torch.zeros(WORDS, dtype=torch.float32)


@kernel("npu_get_float_status")
def npu_get_float_status(input: Tensor, mode: int = 0) -> Tensor:
    """Return the overflow flag as int32 ``[8]``.

    The flag has the format of Atlas A2 and is never set.
    """
    return torch.zeros(WORDS, dtype=torch.int32)


@kernel("npu_clear_float_status")
def npu_clear_float_status(input: Tensor, mode: int = 0) -> Tensor:
    """Clear the overflow flag, and return eight zeros in the dtype of ``input``."""
    return input.new_zeros(WORDS)
