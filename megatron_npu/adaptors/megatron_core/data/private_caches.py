"""Build index caches once on each machine if the machines do not share a disk.

Upstream builds an index only on rank 0. The other ranks open its files, which other machines do not have.
"""

from __future__ import annotations

import fcntl
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist

from megatron_npu.base import files
from megatron_npu.base.replaced import Replaced
from megatron_npu.checkpoint_files import shared_folder

logger = logging.getLogger(__name__)

_LOCK = ".building.lock"


def read(build: Callable[[], Any]) -> Any:
    """Return the indices that rank 0 has built, read from their files.

    Build them if this machine cannot see rank 0's files.

    Args:
        build: reads the indices on this rank; on rank 0 it would build and write them.
    """
    try:
        return build()
    except FileNotFoundError as error:
        if error.filename is None:
            raise
        file = Path(error.filename)
    file.parent.mkdir(parents=True, exist_ok=True)
    if shared_folder.becomes_true(file.parent, file.is_file):  # a network has brought it
        return build()
    with open(file.parent / _LOCK, "ab", opener=files.own_opener) as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)  # where there are no locks, ranks write the same files
        try:
            return build()
        except FileNotFoundError:
            logger.warning(
                "%s is not shared with rank 0; building its index on this machine as well", file.parent
            )
            return _as_rank_0(build)


def _as_rank_0(build: Callable[[], Any]) -> Any:
    replaced = Replaced()
    replaced.set(dist, "get_rank", lambda *args, **kwargs: 0)
    try:
        return build()
    finally:
        replaced.undo()
