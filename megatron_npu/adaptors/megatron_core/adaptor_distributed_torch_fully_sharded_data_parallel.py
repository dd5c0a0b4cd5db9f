"""``megatron.core.distributed.torch_fully_sharded_data_parallel``: --use-torch-fsdp2."""

from __future__ import annotations

from typing import Any

from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from megatron_npu import devices
from megatron_npu.adaptors.megatron_core.decorators import WITHOUT_CUDA, constant


class Mesh:
    """In place of ``DeviceMesh``, of which upstream uses ``from_group`` alone."""

    @staticmethod
    def from_group(group: ProcessGroup | list[ProcessGroup], device_type: str, **options: Any) -> DeviceMesh:
        """Return a mesh of this process's device, whatever ``device_type`` says."""
        return DeviceMesh.from_group(group, devices.current().torch_device().type, **options)


constant(
    "megatron.core.distributed.torch_fully_sharded_data_parallel:DeviceMesh",
    Mesh,
    devices=WITHOUT_CUDA,
    why="upstream names the device of the mesh cuda",
)
