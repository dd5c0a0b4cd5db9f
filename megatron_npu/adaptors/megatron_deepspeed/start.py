"""What happens once: initialisation, kernels that need not be built, the line before the first step."""

from __future__ import annotations

import os
from collections.abc import Callable

from megatron_npu import deepspeed_device
from megatron_npu.adaptors.megatron_deepspeed.decorators import around, records
from megatron_npu.adaptors.shared import rendezvous
from megatron_npu.adaptors.shared.start import announce_first, connect_old_tree

connect_old_tree(records)

around(
    "megatron.training:train_step",
    why="the place to say once what was patched",
)(announce_first)


@around(
    "megatron.initialize:_initialize_distributed",
    why="DeepSpeed asks MPI who this process is unless a launcher says it, and compiles a communication over "
    "shared memory for inference at the first start on a CPU",
)
def meet(original: Callable[..., None]) -> None:
    """Tell a process that runs alone who it is; leave out what DeepSpeed would compile."""
    rendezvous.provide_address()
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "1"), ("LOCAL_RANK", "0")):
        os.environ.setdefault(name, value)
    deepspeed_device.compile_nothing()
    original()
