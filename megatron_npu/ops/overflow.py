"""Overflow that does not show in the numbers: NPUs whose arithmetic saturates instead of giving inf and nan.

From Ascend 910B on, inf and nan are the default, and neither function does anything. With
``INF_NAN_MODE_FORCE_DISABLE=1``, or on an older chip, a sum that is too large becomes the largest number and
sets a flag on the device. torch_npu's own ``_amp_foreach_non_finite_check_and_unscale_``, which Megatron's
loss scaling and ``multi_tensor.unscale`` call, reads and clears the flag; these two are for what lies between
(a pipeline stage that overflows in forward, a step that is skipped).
"""

from __future__ import annotations

import torch

from megatron_npu import devices


def clear() -> None:
    """Forget overflows up to now."""
    if _saturates():
        import torch_npu

        torch_npu.npu_clear_float_status(torch.zeros(8, device="npu"))


def happened() -> bool:
    """Return whether an operation has overflowed since ``clear``; waits for the device."""
    if not _saturates():
        return False
    import torch_npu

    return bool(torch_npu.npu_get_float_status(torch.zeros(8, device="npu"))[0].item())


def _saturates() -> bool:
    if devices.current().name != "npu":
        return False
    import torch_npu

    return not torch_npu.npu.utils.is_support_inf_nan()
