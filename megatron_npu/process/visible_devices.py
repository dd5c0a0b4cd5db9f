"""Which devices of a machine a process may use: ``CUDA_VISIBLE_DEVICES`` and what it means elsewhere."""

from __future__ import annotations

import os

CUDA = "CUDA_VISIBLE_DEVICES"
ASCEND = "ASCEND_RT_VISIBLE_DEVICES"  # CANN's own


def listed(variable: str, total: int | None = None) -> list[int] | None:
    """Return the devices that a variable lists, or None where it is not set or empty.

    As CUDA and CANN read it: what comes behind a number that no device has, or behind a word, is left out.

    Args:
        variable: one of the names above.
        total: how many devices there are; None: as many as are listed.
    """
    text = os.environ.get(variable, "").strip()
    if not text:
        return None
    found: list[int] = []
    for word in text.split(","):
        number = int(word) if word.strip().isdecimal() else -1
        if number < 0 or number in found or (total is not None and number >= total):
            break
        found.append(number)
    return found


def name_for_ascend() -> bool:
    """Let ``CUDA_VISIBLE_DEVICES`` choose NPUs in this process and its children, if CANN's name does not.

    CANN reads its variable when it starts, so this comes before torch_npu is imported.

    Returns:
        Whether it has set CANN's.
    """
    chosen = os.environ.get(CUDA, "").strip()
    if not chosen or os.environ.get(ASCEND, "").strip():
        return False
    os.environ[ASCEND] = chosen
    return True
