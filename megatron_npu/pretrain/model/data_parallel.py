"""Wrap a model for data parallelism in Megatron's DDP, Megatron's FSDP or torch's FSDP."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import torch

from megatron_npu.pretrain.flags.frozen_flags import Flags

if TYPE_CHECKING:
    from megatron.core.transformer.transformer_config import TransformerConfig


def of_the_same_name(kind: type, flags: Flags) -> dict[str, Any]:
    """Return the flags that have the same names as fields of a megatron-core config."""
    return {
        field.name: getattr(flags, field.name) for field in dataclasses.fields(kind) if field.name in flags
    }


def wrap(flags: Flags, config: TransformerConfig, module: torch.nn.Module, stage: int | None) -> Any:
    """Wrap a model chunk in the data-parallel wrapper that ``fully_sharded`` selects.

    Args:
        module: the chunk, on its device and in its precision.
        stage: the number of the interleaved chunk; None without interleaving.
    """
    from megatron.core.distributed import DistributedDataParallel

    if flags.fully_sharded == "torch":
        return _torch_fsdp(config, module)
    # the first chunk's communication is overlapped bucket by bucket, that of the others by the first's
    later = {"disable_bucketing": bool(stage)}
    if flags.fully_sharded == "megatron":
        from megatron.core.distributed.fsdp.mcore_fsdp_adapter import FullyShardedDataParallel

        return FullyShardedDataParallel(config, _config(flags), module, **later)
    return DistributedDataParallel(config, _config(flags), module, **later)


def _config(flags: Flags) -> Any:
    from megatron.core.distributed import DistributedDataParallelConfig

    values = of_the_same_name(DistributedDataParallelConfig, flags)
    values["grad_reduce_in_fp32"] = flags.accumulate_allreduce_grads_in_fp32
    if flags.fully_sharded:
        values |= {"use_megatron_fsdp": True, "data_parallel_sharding_strategy": flags.fsdp_strategy}
    return DistributedDataParallelConfig(**values)


def _torch_fsdp(config: TransformerConfig, module: torch.nn.Module) -> Any:
    """Shard a model chunk with torch's FSDP, layer by layer, and return it.

    Weights outside the layers stay gathered during a forward or backward pass.

    Upstream would gather the embedding only while the embedding itself is computed, so that the output layer,
    which uses the same weight, would have only a shard of it.
    """
    from megatron.core.distributed import DistributedDataParallelConfig, TorchFullyShardedDataParallel
    from megatron.core.transformer.transformer_layer import TransformerLayer

    ours = DistributedDataParallelConfig()
    wrapped = TorchFullyShardedDataParallel(config, ours, module, sub_modules_to_wrap={TransformerLayer})
    wrapped.ddp_config = ours  # 0.12 forgets it, and its optimizer asks for it
    return wrapped
