"""What a save of 285068c8 leaves of the files that it replaces."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest
import torch

from megatron_npu.adaptors.megatron_lm.checkpointing import whole_files


class Full:
    """A value after a part of which the disk is full."""

    def __reduce__(self) -> tuple[object, ...]:
        raise OSError(errno.ENOSPC, "No space left on device")


def test_a_save_that_fails_leaves_the_file_as_it_was(tmp_path: Path) -> None:
    """The last iteration is saved twice: the second time over the checkpoint that the tracker names."""
    file = tmp_path / "model_optim_rng.pt"
    with whole_files():
        torch.save({"weight": torch.ones(3)}, file)
        with pytest.raises(OSError, match="No space left"):
            torch.save({"weight": torch.zeros(3), "rest": Full()}, str(file))
    assert torch.load(file, weights_only=True)["weight"].tolist() == [1.0] * 3
    assert list(tmp_path.iterdir()) == [file]


def test_streams_and_what_comes_after_are_torchs(tmp_path: Path) -> None:
    before = torch.save
    with whole_files(), (tmp_path / "stream.pt").open("wb") as stream:
        torch.save(torch.arange(3), stream)
    assert torch.load(tmp_path / "stream.pt", weights_only=True).tolist() == [0, 1, 2]
    assert torch.save is before
