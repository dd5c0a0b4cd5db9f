"""``megatron.core.distributed.fsdp.src.megatron_fsdp``: --use-megatron-fsdp.

Before 0.14 it was ``megatron.core.distributed.custom_fsdp`` and --use-custom-fsdp.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.distributed import device_mesh as meshes

from megatron_npu.adaptors.megatron_core.decorators import wrap
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
