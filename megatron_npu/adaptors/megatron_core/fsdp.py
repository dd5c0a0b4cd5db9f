"""Fully sharded data parallelism, Megatron's own and torch's: ``core.distributed``."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed import device_mesh as meshes
from torch.distributed.device_mesh import DeviceMesh

from megatron_npu import devices
from megatron_npu.adaptors.megatron_core.decorators import WITHOUT_CUDA, constant, wrap
from megatron_npu.errors import UsageError

_DISTRIBUTED = "megatron.core.distributed"
_MODULE = f"{_DISTRIBUTED}.fsdp.src.megatron_fsdp"


@wrap(
    f"{_MODULE}.param_and_grad_buffer:gradient_reduce_preprocessing",
    versions=">=0.16",
    devices=("cpu",),
    why="gloo cannot multiply in a reduction (PREMUL_SUM)",
)
def multiply_first(original: Callable[..., Any]) -> Callable[..., Any]:
    """Let upstream multiply the gradients itself, as under ``--no-gradient-reduce-div-fusion``."""

    @functools.wraps(original)
    def gradient_reduce_preprocessing(
        grad_data: Tensor, scaling_factor: float | None, ddp_config: Any
    ) -> Any:
        config = dataclasses.replace(ddp_config, gradient_reduce_div_fusion=False)
        return original(grad_data, scaling_factor, config)

    return gradient_reduce_preprocessing


_refused = functools.partial(
    wrap,
    devices=("cpu",),
    why="gloo cannot multiply in a reduction, and before 0.16 upstream's own product is of the wrong buffer: "
    "the gradients are those of one rank times the number of ranks, which Adam hides",
)


@_refused(
    f"{_DISTRIBUTED}.custom_fsdp.fully_sharded_data_parallel:FullyShardedDataParallel.__init__",
    versions="<0.14",
)
@_refused(
    f"{_DISTRIBUTED}.fsdp.mcore_fsdp_adapter:FullyShardedDataParallel.__init__", versions=">=0.14,<0.16"
)
def refuse_on_a_cpu(original: Callable[..., None]) -> Callable[..., None]:
    """Say so at once."""

    @functools.wraps(original)
    def initialise(self: Any, *args: Any, **kwargs: Any) -> None:
        raise UsageError(
            "Megatron's FSDP (--use-custom-fsdp, --use-megatron-fsdp) before 0.16 on the cpu device",
            "a reduction that multiplies, which gloo has not",
            "Use --use-torch-fsdp2 or --use-distributed-optimizer, or megatron-core 0.16.",
        )

    return initialise


@wrap(
    f"{_MODULE}.utils:get_mesh_names",
    versions=">=0.14,<0.15",
    why="it reads a table of meshes that torch 2.13 does not have: AttributeError",
)
def names_from_mesh(original: Callable[..., list[str]]) -> Callable[..., list[str]]:
    """Ask the mesh itself, as upstream does since 0.15."""

    @functools.wraps(original)
    def get_mesh_names(device_mesh: meshes.DeviceMesh | None = None) -> list[str]:
        if device_mesh is None or hasattr(meshes._mesh_resources, "child_to_root_mapping"):
            return original(device_mesh)
        own = list(device_mesh.mesh_dim_names or ())
        flattened = device_mesh._get_root_mesh()._flatten_mapping
        return [*own, *(name for name in flattened if name not in own)]

    return get_mesh_names


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


@wrap(
    "megatron.core.distributed.data_parallel_base:_BaseDataParallel.finish_grad_sync",
    versions=">=0.16",
    why="finalize_model_grads passes force_all_reduce, which 0.16 has forgotten here: torch's FSDP, which "
    "has no method of its own, ends in a TypeError",
)
def accept_force_all_reduce(original: Callable[[Any], None]) -> Callable[..., None]:
    """Take the argument, which means nothing where nothing is reduced."""

    @functools.wraps(original)
    def finish_grad_sync(self: Any, force_all_reduce: bool = False) -> None:
        original(self)

    return finish_grad_sync
