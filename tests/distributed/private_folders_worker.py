"""A rank of a test whose machines have a disk each: the folder of one name is another one on each."""

from __future__ import annotations

import os
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist

from megatron_npu.base.errors import UsageError
from megatron_npu.checkpoint_files import checksums, shared_folder

SAVE = Path("save")


def private(rank: int, port: int, machines: str) -> None:
    """Be a rank in a folder of its own."""
    os.chdir(Path(machines) / str(rank))
    _join(rank, port)
    with pytest.raises(
        UsageError,
        match=r"--save save must be a folder .* files that .* \(rank 0\) writes there are not visible on",
    ):
        shared_folder.require("--save", SAVE)
    with pytest.raises(UsageError, match=r"iter_0000002 on .* \(rank 0\); no checkpoint on .* \(rank 1\)"):
        shared_folder.require_same("--load", SAVE, None if rank else "iter_0000002")
    shared_folder.require_same("--load", SAVE, "iter_0000002")
    SAVE.mkdir(exist_ok=True)
    (SAVE / f"__{rank}_0.distcp").touch()
    with pytest.raises(
        FileNotFoundError,
        match=r"__[01]_0.distcp, written by another rank, is not visible on .*--save must be a folder",
    ):
        checksums.write(SAVE)
    assert not (SAVE / checksums.NAME).exists()


def shared(rank: int, port: int, machines: str) -> None:
    """Be a rank in the folder of all."""
    os.chdir(machines)
    _join(rank, port)
    shared_folder.require("--save", SAVE)
    assert not [*SAVE.iterdir()]
    dist.barrier()
    (SAVE / f"__{rank}_0.distcp").write_text(str(rank))
    dist.barrier()
    checksums.write(SAVE)
    dist.barrier()
    assert checksums.damaged(SAVE) == []


def _join(rank: int, port: int) -> None:
    address = f"tcp://127.0.0.1:{port}"
    dist.init_process_group(
        "gloo", init_method=address, rank=rank, world_size=2, timeout=timedelta(seconds=60)
    )
