"""Patch the start of a run: initialization, kernel compilation, which is skipped, and a log line before
the first step.
"""

from __future__ import annotations

from collections.abc import Callable

from megatron_npu.adaptors.megatron_lm.decorators import around, records
from megatron_npu.adaptors.shared import rendezvous
from megatron_npu.adaptors.shared.start import announce_first, connect_old_tree, keep_fusers

connect_old_tree(records)
keep_fusers(records)

around(
    "megatron.schedules:get_forward_backward_func",
    why="called before each step; hook point for logging once which functions were patched",
)(announce_first)


@around(
    "megatron.initialize:_initialize_distributed",
    why="init_process_group needs MASTER_ADDR and MASTER_PORT, which only a launcher sets",
)
def meet_oneself(original: Callable[..., None]) -> None:
    """Set a rendezvous address for a process that was started without a launcher."""
    rendezvous.provide_address()
    original()
