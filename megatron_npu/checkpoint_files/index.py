"""Find the shards that a checkpoint's index in torch's format names, without unpickling the index."""

from __future__ import annotations

import re
from pathlib import Path

from megatron_npu.base import files

NAME = ".metadata"  # torch's; a pickle, in which each name of a file stands once as it is
_SHARD = re.compile(rb"__\d+_\d+\.distcp")  # torch's names, and megatron-core's


def shards(folder: Path) -> set[str]:
    """Return the names of the files that contain the tensors of a checkpoint, or an empty set if it has
    no index.
    """
    try:
        with files.regular(folder / NAME) as stream:
            return {name.decode() for name in _SHARD.findall(stream.read())}
    except OSError:
        return set()


def missing(folder: Path) -> list[str]:
    """Return the shards that the index names but that the folder does not contain."""
    return sorted(name for name in shards(folder) if not (folder / name).is_file())
