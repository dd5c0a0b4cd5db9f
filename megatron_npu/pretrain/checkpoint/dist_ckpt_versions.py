"""Request the sharded state from each version of megatron-core in the form that this version supports."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from megatron_npu.pretrain.checkpoint.checkpoint_files import OF_FSDP
from megatron_npu.pretrain.flags.checkpoint_parts import ShardFlags

Metadata = dict[str, Any]


def _version() -> tuple[int, int]:
    from megatron.core import package_info

    return package_info.MAJOR, package_info.MINOR


def metadata(flags: ShardFlags) -> Metadata:
    """Return the sharding metadata, which checkpoints store for use when they are loaded."""
    result: Metadata = {"singleton_local_shards": False, "chained_optim_avoid_prefix": True}
    if flags.fully_sharded == "megatron":
        return {"distrib_optim_sharding_type": OF_FSDP}
    if flags.use_distributed_optimizer:
        fully = flags.dist_ckpt_optim_fully_reshardable
        result["distrib_optim_sharding_type"] = _sharding_type(fully)
        if fully:
            result["distrib_optim_fully_reshardable_mem_efficient"] = False
    return result


def _sharding_type(fully_reshardable: bool) -> str:
    """Return the name of the distributed optimizer's sharding format.

    The name changed in 0.15.
    """
    if _version() >= (0, 15):
        return "fully_reshardable" if fully_reshardable else "dp_reshardable"
    return "fully_sharded_model_space" if fully_reshardable else "dp_zero_gather_scatter"


def module_metadata(described: Metadata) -> Metadata:
    """Return the sharding metadata for modules.

    In 0.16 and later, they include the process group.
    """
    return described | {"dp_cp_group": _group()}


def _group() -> dist.ProcessGroup:
    from megatron.core import parallel_state

    return parallel_state.get_data_parallel_group(with_context_parallel=True)


def optimizer_keywords(described: Metadata) -> dict[str, Any]:
    """Return the arguments that select the sharding in the optimizer's ``sharded_state_dict``."""
    if _version() >= (0, 13):
        return {"metadata": module_metadata(described)}
    name = described.get("distrib_optim_sharding_type")
    return {} if name is None else {"sharding_type": name}


def save_keywords(described: Metadata, *, in_background: bool = False) -> dict[str, Any]:
    """Return the arguments that make ``dist_checkpointing.save`` store the metadata in the checkpoint.

    Args:
        described: the result of ``metadata``.
        in_background: whether to return a request for megatron-core's writer queue.
    """
    result: dict[str, Any] = {"content_metadata": described} if _version() >= (0, 13) else {}
    if in_background:
        result["async_sharded_save"] = True
        if _version() >= (0, 17):  # whose default is a package's queue
            result["async_strategy"] = "mcore"
    return result


def saved_metadata(path: str, optimizer_sharding: str | None) -> Metadata:
    """Return the sharding metadata of the checkpoint in ``path``.

    Args:
        path: the directory of the checkpoint.
        optimizer_sharding: the optimizer's format according to our description; used with 0.12, which does
            not store the format.
    """
    if _version() >= (0, 13):
        from megatron.core import dist_checkpointing

        return dist_checkpointing.load_content_metadata(path) or {}
    return {} if optimizer_sharding is None else {"distrib_optim_sharding_type": optimizer_sharding}
