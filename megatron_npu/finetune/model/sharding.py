"""Apply data parallelism and sharding with torch's DDP and FSDP2 (``fully_shard``)."""

from __future__ import annotations

import contextlib
import inspect
import warnings
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.tensor import DTensor

from megatron_npu.base.errors import UsageError
from megatron_npu.devices import gloo
from megatron_npu.finetune.model.blocks import own_blocks
from megatron_npu.finetune.model.precision import dtype_of
from megatron_npu.options.switches import Switches


class DataParallel(nn.parallel.DistributedDataParallel):
    """DDP that forwards attributes of the wrapped model, such as ``config`` and ``generate``."""

    __init__ = gloo.outlive_reducer(nn.parallel.DistributedDataParallel.__init__)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("module"), name)


def data_parallel(model: nn.Module) -> DataParallel:
    """Wrap a model in DDP, allowing batches that leave parts of the model unused.

    Raises:
        UsageError: torch 2.13 would crash (SIGSEGV, also without this package): the groups are gloo's and
            TORCH_DISTRIBUTED_DEBUG is DETAIL.
    """
    norms = any(isinstance(part, nn.modules.batchnorm._BatchNorm) for part in model.modules())
    known = inspect.signature(nn.parallel.DistributedDataParallel).parameters
    buffers = "forward_sync_buffers" if "forward_sync_buffers" in known else "broadcast_buffers"  # torch 2.13
    is_detailed = dist.is_initialized() and dist.get_debug_level() == dist.DebugLevel.DETAIL
    if is_detailed and buffers == "forward_sync_buffers" and dist.get_backend() == "gloo":
        raise UsageError(
            "with TORCH_DISTRIBUTED_DEBUG=DETAIL and gloo, torch's DistributedDataParallel crashes",
            remedy="Set it to INFO, or unset it.",
        )
    options: dict[str, Any] = {buffers: norms}
    return DataParallel(model, find_unused_parameters=True, gradient_as_bucket_view=True, **options)


def mesh_of(device: torch.device) -> DeviceMesh:
    """Return a device mesh that contains all ranks."""
    return init_device_mesh(device.type, (dist.get_world_size(),), mesh_dim_names=("dp",))


def shard_fully(model: nn.Module, switches: Switches, device: torch.device) -> str:
    """Shard parameters, gradients and optimizer states in place, block by block.

    Return a log line.

    Each repeated block is gathered before its forward pass. ``zero-3`` and ``fsdp`` free the block afterwards
    and gather it again for its backward pass; ``zero-2`` keeps it gathered in between. Everything outside the
    blocks forms one more unit, which stays gathered from the forward pass to the backward pass. A model on
    the host is moved to the device block by block.
    """
    mesh = mesh_of(device)
    reshard = switches.sharding != "zero-2"
    options: dict[str, Any] = {"mesh": mesh, "mp_policy": _precision(switches)}
    options["offload_policy"] = CPUOffloadPolicy() if switches.cpu_offload else OffloadPolicy()
    blocks = own_blocks(model)
    for _, block in blocks:
        same_everywhere(block, device)
        fully_shard(block, reshard_after_forward=reshard, **options)
    same_everywhere(model, device)
    fully_shard(model, reshard_after_forward=None if reshard else False, **options)
    units = (
        f"{len(blocks)} blocks and the rest"
        if blocks
        else "the model as a whole, because it has no repeated blocks"
    )
    kept = "" if reshard else ", kept gathered from the forward to the backward pass"
    where = ", stored in host memory" if switches.cpu_offload else ""
    return (
        f"{switches.sharding}: fully_shard shards parameters, gradients and optimizer states over "
        f"{mesh.size()} ranks ({units}{kept}{where})"
    )


def silence_views() -> None:
    """Silence ``fully_shard``'s warning about models whose outputs are views.

    An in-place write to such an output would remove its hook (torch 2.13). The tasks of this project only
    read outputs. For scripts that write to outputs, and for models that write to the outputs of their blocks,
    torch still warns.
    """
    whole = r"FSDP2-wrapped module \(FSDP\w+(For\w+|HeadModel)\) returned a view"
    warnings.filterwarnings("ignore", whole, UserWarning)


def _precision(switches: Switches) -> MixedPrecisionPolicy:
    """Return a mixed-precision policy that gathers weights in 16 bits and reduces gradients in fp32."""
    if switches.mixed_precision is None:
        return MixedPrecisionPolicy()
    return MixedPrecisionPolicy(
        param_dtype=dtype_of(switches.mixed_precision), reduce_dtype=torch.float32, cast_forward_inputs=True
    )


def same_everywhere(module: nn.Module, device: torch.device) -> None:
    """Copy the values of unsharded tensors from rank 0 to all ranks, as the constructor of DDP does.

    Without this call, ``fully_shard`` would keep each rank's own values.
    """
    with torch.no_grad():
        for tensor in (*module.parameters(), *module.buffers()):
            if not isinstance(tensor, DTensor):
                values = tensor.to(device).contiguous()
                dist.broadcast(values, src=0)
                tensor.copy_(values)


@contextlib.contextmanager
def accumulating(model: nn.Module, last: bool, keep_gathered: bool) -> Iterator[None]:
    """Reduce the gradients of a micro-batch over the ranks only when this is necessary.

    DDP reduces gradients only in the last micro-batch of a step. ``fully_shard`` reduces them in each
    micro-batch, because no rank keeps whole gradients; with ``keep_gathered`` (zero-2), weights stay gathered
    until the last micro-batch.
    """
    if isinstance(model, DataParallel) and not last:
        with model.no_sync():
            yield
        return
    if isinstance(model, FSDPModule):
        model.set_is_last_backward(last)
        if keep_gathered:
            model.set_reshard_after_backward(last)
    yield
