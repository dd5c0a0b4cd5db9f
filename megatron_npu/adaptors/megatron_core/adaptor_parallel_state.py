"""``megatron.core.parallel_state``: the process groups."""

from __future__ import annotations

from typing import Any

from megatron_npu.adaptors.megatron_core.decorators import WITHOUT_CUDA, replace


@replace(
    "megatron.core.parallel_state:get_nccl_options",
    devices=WITHOUT_CUDA,
    why="torch has ProcessGroupNCCL only where it was built with CUDA; FSDP asks it for streams "
    "of high priority",
)
def get_nccl_options(pg_name: str, nccl_comm_cfgs: dict[str, Any]) -> None:
    """Return None: gloo and HCCL have no options of NCCL."""
