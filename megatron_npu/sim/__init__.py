"""Simulate Ascend NPUs by running the real torch_npu wheel on a simulated CANN, with host memory as
device memory.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from megatron_npu.sim.counters import Counts


def counting() -> AbstractContextManager[Counts]:
    """Count launches, memory and communication inside the ``with`` block; see ``counters.Counts``.

    This works only in a process under ``megatron-npu sim``.
    """
    from megatron_npu.sim import counters

    return counters.counting()
