"""``megatron.core.dist_checkpointing``: old versions on a torch that is newer than they are."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

from megatron_npu.adaptors.megatron_core.decorators import wrap


@wrap(
    "megatron.core.dist_checkpointing.strategies.filesystem_async:_write_item",
    versions="<0.13",
    why="torch 2.7 gave its private function a sixth argument, the format, which 0.12 does not pass",
)
def write_as_torch_save(original: Callable[..., Any]) -> Callable[..., Any]:
    """Pass the format that 0.12 has always written."""
    if "serialization_format" not in inspect.signature(original).parameters:
        return original
    from torch.distributed.checkpoint.filesystem import SerializationFormat

    return functools.partial(original, serialization_format=SerializationFormat.TORCH_SAVE)


@wrap(
    "megatron.core.dist_checkpointing.strategies.torch:FileSystemWriter",
    why="remove_sharded_tensors moves the file at a path of torch's writer that newer torch does not have",
)
def writer_with_metadata_path(original: Any) -> type:
    """Give torch's writer, which the module makes there alone, the path of its metadata again."""
    if hasattr(original, "metadata_path"):
        return original
    return type(original.__name__, (original,), {"metadata_path": property(original._get_metadata_path)})
