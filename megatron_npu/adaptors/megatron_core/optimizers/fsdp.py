"""Support ``--use-megatron-fsdp``, ``--use-custom-fsdp`` and ``--use-torch-fsdp2``.

Patches ``distributed.fsdp`` (before 0.14 ``distributed.custom_fsdp``),
``distributed.torch_fully_sharded_data_parallel``, ``distributed.data_parallel_base`` and, for checkpoints,
``dist_checkpointing.optimizer`` of ``megatron.core``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed import device_mesh as meshes
from torch.distributed.device_mesh import DeviceMesh

from megatron_npu import devices
from megatron_npu.adaptors.megatron_core.decorators import NOT_FIXED, WITHOUT_CUDA, around, constant
from megatron_npu.base.errors import UsageError

_DISTRIBUTED = "megatron.core.distributed"
_MEGATRON_FSDP = f"{_DISTRIBUTED}.fsdp.src.megatron_fsdp"
_WRAPPER = "module."  # what each wrapper puts before a weight's name


@around(
    f"{_MEGATRON_FSDP}.param_and_grad_buffer:gradient_reduce_preprocessing",
    versions=">=0.16",
    devices=("cpu",),
    why="gloo cannot multiply in a reduction (PREMUL_SUM)",
)
def multiply_before_reduction(
    original: Callable[..., Any], grad_data: Tensor, scaling_factor: float | None, ddp_config: Any
) -> Any:
    """Make upstream scale the gradients before the reduction, as with ``--no-gradient-reduce-div-fusion``."""
    config = dataclasses.replace(ddp_config, gradient_reduce_div_fusion=False)
    return original(grad_data, scaling_factor, config)


_WRONG_GRADIENTS = (
    "gloo cannot multiply in a reduction, and before 0.16 upstream's own multiplication uses "
    "the wrong buffer: the gradients are one rank's times the number of ranks, which Adam "
    "hides"
)


@around(
    f"{_DISTRIBUTED}.custom_fsdp.fully_sharded_data_parallel:FullyShardedDataParallel.__init__",
    versions="<0.14",
    devices=("cpu",),
    until="0.16, which multiplies the correct buffer",
    why=_WRONG_GRADIENTS,
)
@around(
    f"{_DISTRIBUTED}.fsdp.mcore_fsdp_adapter:FullyShardedDataParallel.__init__",
    versions=">=0.14,<0.16",
    devices=("cpu",),
    until="0.16, which multiplies the correct buffer",
    why=_WRONG_GRADIENTS,
)
def refuse_on_a_cpu(original: Callable[..., None], self: Any, *args: Any, **kwargs: Any) -> NoReturn:
    """Reject Megatron's FSDP on a cpu device before anything is built."""
    raise UsageError(
        "Megatron's FSDP (--use-custom-fsdp, --use-megatron-fsdp) before 0.16 is not supported on the cpu "
        "device, because it multiplies gradients within the reduction, which gloo does not support. Use "
        "--use-torch-fsdp2 or --use-distributed-optimizer, or megatron-core 0.16."
    )


@around(
    f"{_MEGATRON_FSDP}.utils:get_mesh_names",
    versions=">=0.14,<0.15",
    upstream_bug=True,
    until="0.15, which queries the mesh itself",
    why="upstream reads a mesh table that torch 2.13 no longer has, which raises an AttributeError",
)
def names_from_mesh(
    original: Callable[..., list[str]], device_mesh: meshes.DeviceMesh | None = None
) -> list[str]:
    """Return those dimension names that the device mesh contains, as upstream does since 0.15."""
    if device_mesh is None or hasattr(meshes._mesh_resources, "child_to_root_mapping"):
        return original(device_mesh)
    own = list(device_mesh.mesh_dim_names or ())
    flattened = device_mesh._get_root_mesh()._flatten_mapping
    return [*own, *(name for name in flattened if name not in own)]


class Mesh:
    """Replacement for ``DeviceMesh`` that provides only the method ``from_group``, which upstream uses."""

    @staticmethod
    def from_group(group: ProcessGroup | list[ProcessGroup], device_type: str, **options: Any) -> DeviceMesh:
        """Return a mesh for this process's device, ignoring ``device_type``."""
        return DeviceMesh.from_group(group, devices.current().torch_device().type, **options)


constant(
    f"{_DISTRIBUTED}.torch_fully_sharded_data_parallel:DeviceMesh",
    Mesh,
    devices=WITHOUT_CUDA,
    why="upstream always names the mesh's device cuda",
)


@around(
    f"{_MEGATRON_FSDP}.experimental.fully_shard:fully_shard_context",
    versions=">=0.20",
    devices=("cpu",),
    why="--megatron-fsdp-version 2 accepts only a device that is called cuda (ValueError)",
)
def name_device_cuda(original: Callable[..., Any], device: torch.device | None = None, **options: Any) -> Any:
    """Give the default device the name that it has on CUDA, for streams, which a CPU does not have."""
    return original(device or torch.device("cuda", 0), **options)


@around(
    f"{_DISTRIBUTED}.data_parallel_base:_BaseDataParallel.finish_grad_sync",
    versions=">=0.16",
    upstream_bug=True,
    until=NOT_FIXED,
    why="finalize_model_grads passes force_all_reduce, which 0.16 forgot to accept here: torch's FSDP, "
    "which does not override the method, raises a TypeError",
)
def accept_force_all_reduce(
    original: Callable[[Any], None], self: Any, force_all_reduce: bool = False
) -> None:
    """Accept the argument ``force_all_reduce`` but ignore it, because this method reduces no gradients."""
    original(self)


@around(
    "megatron.core.transformer.fsdp_dtensor_checkpoint:handle_swiglu_in_state_dict",
    versions=">=0.16",
    upstream_bug=True,
    until=NOT_FIXED,
    why=(
        "upstream looks up gated MLPs in Megatron's FSDP under names with one wrapper too many or too "
        "few: with --swiglu no fsdp_dtensor checkpoint can be saved or loaded (AttributeError)"
    ),
)
def cut_whatever_the_wrappers(original: Callable[..., Any], model: Any, *args: Any, **kwargs: Any) -> Any:
    """Shard a view of the model in which weights are found regardless of how many wrappers enclose the
    model.
    """
    return original(_Parameters(model), *args, **kwargs)


class _Parameters:
    """View of a model that finds parameters by name regardless of how many wrappers enclose the model."""

    def __init__(self, model: Any) -> None:
        self.config, self.named_modules = model.config, model.named_modules
        self._found = {name.rpartition(_WRAPPER)[2]: own for name, own in model.named_parameters()}

    def get_parameter(self, name: str) -> Tensor:
        """Return the parameter with the given name, ignoring parts of the name that come from wrappers."""
        return self._found[name.rpartition(_WRAPPER)[2]]


@around(
    "megatron.core.dist_checkpointing.optimizer:get_optim_param_to_id_map",
    upstream_bug=True,
    until=NOT_FIXED,
    why="parameters of torch's FSDP are looked up by the identity of their shards, but since torch 2.13 "
    "to_local creates a new parameter from a shard: an optimizer cannot be saved (ValueError)",
)
def know_shards_again(
    original: Callable[[Iterable[Tensor]], dict[int, int]], optim_params_iter: Iterable[Tensor]
) -> dict[int, int]:
    """Pass the shards to upstream's function, which already receives the shards of the weights."""
    return original([getattr(parameter, "_local_tensor", parameter) for parameter in optim_params_iter])
