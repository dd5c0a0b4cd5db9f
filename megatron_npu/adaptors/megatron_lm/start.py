"""What happens once: initialisation, kernels that need not be built, the line before the first step."""

from __future__ import annotations

from collections.abc import Callable

from megatron_npu.adaptors.megatron_lm.decorators import around, records, replace
from megatron_npu.adaptors.shared import rendezvous
from megatron_npu.adaptors.shared.start import announce_first, connect_old_tree

connect_old_tree(records)

around(
    "megatron.schedules:get_forward_backward_func",
    why="asked for before each step: the place to say once what was patched",
)(announce_first)


@around(
    "megatron.initialize:_initialize_distributed",
    why="init_process_group asks for MASTER_ADDR and MASTER_PORT, which only a launcher sets",
)
def meet_oneself(original: Callable[..., None]) -> None:
    """Give a process that runs alone an address to meet at."""
    rendezvous.provide_address()
    original()


@replace(
    "megatron.initialize:set_jit_fusion_options",
    why="it switches TorchScript's own fusers off in favour of nvfuser, which torch 2.2 removed, and warms "
    "up functions that are operations here",
)
def set_jit_fusion_options() -> None:
    """Leave torch's defaults."""
