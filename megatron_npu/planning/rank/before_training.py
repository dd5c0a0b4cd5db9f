"""Run one rank until its first forward pass, with the job's arguments, model, checkpoint and data.

Of a checkpoint, only the metadata (names and shapes) and small values are read; its files are only checked
for existence and length. Checks that depend on the absent peers are skipped.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed import checkpoint as torch_checkpoint
from torch.distributed.checkpoint import state_dict_loader, utils
from torch.distributed.checkpoint.planner import LoadItemType
from torch.futures import Future
from torch.nn.modules import module as modules

from megatron_npu.checkpoint_files import checksums

_SMALL = 64 << 10  # bytes of a tensor that is read: a number of steps, say


class ReadyError(BaseException):
    """Raised when a rank is ready to train and no error has occurred.

    This class is not an ``Exception``, because programs might catch that.
    """


@contextlib.contextmanager
def stopping() -> Iterator[None]:
    """Raise ``ReadyError`` before the first module runs, and read only the descriptions of checkpoints."""

    def ready(*_: Any) -> None:
        raise ReadyError

    handle = modules.register_module_forward_pre_hook(ready)
    try:
        with _descriptions_only():
            yield
    finally:
        handle.remove()


@contextlib.contextmanager
def _descriptions_only() -> Iterator[None]:
    reader = torch_checkpoint.FileSystemReader
    read, load, rank = reader.read_data, torch.load, dist.get_rank

    def read_data(self: Any, plan: Any, planner: Any) -> Any:
        small = []
        for item in plan.items:
            stored = self.storage_data[item.storage_index]
            if item.type is LoadItemType.BYTE_IO or stored.length <= _SMALL:
                small.append(item)
            else:
                _require_bytes(os.path.join(self.path, stored.relative_path), stored.offset + stored.length)
        if small:
            return read(self, dataclasses.replace(plan, items=small), planner)
        future: Future[None] = Future()
        future.set_result(None)
        return future

    def mapped(file: Any, *given: Any, **named: Any) -> Any:
        """Load a file as a memory map, so that its tensors are not read from the disk."""
        if isinstance(file, (str, os.PathLike)) and zipfile.is_zipfile(file):
            named.setdefault("mmap", True)
        return load(file, *given, **named)

    def rank_of(group: Any = None) -> int:
        """Hide rank 0 from megatron-core's check that all ranks together have every shard."""
        caller = sys._getframe(1).f_code.co_name
        return -1 if caller == "validate_sharding_integrity" else rank(group)

    def alone(self: Any, *_: Any) -> None:
        self.group, self.use_dist, self.is_coordinator = None, False, True
        self.coordinator_rank, self.global_coordinator_rank, self.rank = 0, 0, 0

    with contextlib.ExitStack() as stack:
        for owner, name, value in (
            (reader, "read_data", read_data),
            (torch, "load", mapped),
            (utils._DistWrapper, "__init__", alone),
            (checksums, "verifying", _verifying_sizes),
            (dist, "get_rank", rank_of),
        ):
            stack.enter_context(mock.patch.object(owner, name, value))
        assert state_dict_loader._DistWrapper is utils._DistWrapper
        yield


@contextlib.contextmanager
def _verifying_sizes(folder: Path, *_: Any) -> Iterator[None]:
    checksums.require_sizes(folder)
    yield


def _require_bytes(path: str, count: int) -> None:
    """Check that a file exists and has at least ``count`` bytes.

    Raises:
        OSError: the file does not exist, or is shorter.
    """
    size = os.stat(path).st_size
    if size < count:
        raise OSError(
            f"{path} has {size} bytes, but must have at least {count} according to the checkpoint's "
            "description"
        )
