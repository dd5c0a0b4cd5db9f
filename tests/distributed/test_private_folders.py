"""Machines that have a disk each under one name: refused when the ranks have met, and never called whole."""

from __future__ import annotations

import pytest

from megatron_npu.checkpoint_files import checksums, index
from tests.distributed import private_folders_worker, spawned
from tests.support import ports


@pytest.mark.parametrize("folders", ["private", "shared"])
def test_ranks_know_whether_they_share_a_folder(folders, tmp_path) -> None:
    for rank in range(2):
        (tmp_path / str(rank)).mkdir()
    worker = getattr(private_folders_worker, folders)
    assert spawned.exit_codes(worker, 2, ports.free_port(), str(tmp_path)) == [0, 0]


def test_a_shard_that_only_the_index_names_is_missed(tmp_path) -> None:
    """The half that is on one machine's disk: its checksums are those of the files that were there."""
    (tmp_path / "__0_0.distcp").touch()
    (tmp_path / index.NAME).write_bytes(b"\x8c\x0c__0_0.distcp\x94...\x8c\x0c__1_12.distcp\x94")
    assert checksums.damaged(tmp_path) == ["__1_12.distcp is missing"]  # without checksums, too
    checksums.write(tmp_path)
    assert checksums.damaged(tmp_path) == checksums.of_other_sizes(tmp_path) == ["__1_12.distcp is missing"]
    (tmp_path / "__1_12.distcp").touch()
    assert checksums.damaged(tmp_path) == []
