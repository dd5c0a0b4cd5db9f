"""Read ``CUDA_VISIBLE_DEVICES`` and equivalent variables, which restrict a process to some devices."""

from __future__ import annotations

import os

from megatron_npu.base import digits

CUDA = "CUDA_VISIBLE_DEVICES"
ASCEND = "ASCEND_RT_VISIBLE_DEVICES"  # CANN's own


def listed(variable: str, total: int | None = None) -> list[int] | None:
    """Return the device indices that an environment variable lists, or None if it is unset or empty.

    As in CUDA and CANN, entries after an invalid device number or a word are ignored.

    Args:
        variable: one of the names above.
        total: the number of devices. If None, as many as are listed.
    """
    text = os.environ.get(variable, "").strip()
    if not text:
        return None
    found: list[int] = []
    for word in text.split(","):
        number = digits.number(word.strip())
        if number is None or number in found or (total is not None and number >= total):
            break
        found.append(number)
    return found


def name_for_ascend() -> bool:
    """Make ``CUDA_VISIBLE_DEVICES`` select NPUs in this process and its children.

    This has no effect if CANN's variable is set. CANN reads its variable when it starts, so call this before
    torch_npu is imported.

    Returns:
        True if CANN's variable was set.
    """
    chosen = os.environ.get(CUDA, "").strip()
    if not chosen or os.environ.get(ASCEND, "").strip():
        return False
    os.environ[ASCEND] = chosen
    return True
