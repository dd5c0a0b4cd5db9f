"""An index that rank 0 has built on another machine's disk: built once more here, by one rank."""

from __future__ import annotations

import pytest
import torch.distributed as dist

from megatron_npu.checkpoint_files import shared_folder

pytest.importorskip("megatron.core")


def test_an_index_that_this_machine_does_not_see_is_built_here(tmp_path, monkeypatch) -> None:
    from megatron_npu.adaptors.megatron_core.data import private_caches

    file, built = tmp_path / "cache" / "index.npy", []

    def build() -> str:  # as upstream does: rank 0 writes, the others read
        if not file.is_file():
            if dist.get_rank():
                raise FileNotFoundError(2, "No such file or directory", str(file))
            built.append(dist.get_rank())
            file.write_text("index")
        return file.read_text()

    monkeypatch.setattr(dist, "get_rank", lambda: 3)
    monkeypatch.setattr(shared_folder, "_PATIENCE", {True: 0.0, False: 0.0})
    assert private_caches.read(build) == "index"
    assert private_caches.read(build) == "index"
    assert built == [0]
    assert dist.get_rank() == 3


def test_another_missing_file_is_told_as_it_is(monkeypatch) -> None:
    from megatron_npu.adaptors.megatron_core.data import private_caches

    def build() -> str:
        raise FileNotFoundError("no data")

    with pytest.raises(FileNotFoundError, match="no data"):
        private_caches.read(build)


def test_another_user_s_link_at_the_lock_empties_no_file(tmp_path, monkeypatch) -> None:
    from megatron_npu.adaptors.megatron_core.data import private_caches

    target = tmp_path / "precious"
    target.write_text("precious")
    (tmp_path / private_caches._LOCK).symlink_to(target)
    monkeypatch.setattr(shared_folder, "_PATIENCE", {True: 0.0, False: 0.0})

    def build() -> str:
        if not dist.get_rank():
            return "built"
        raise FileNotFoundError(2, "No such file or directory", str(tmp_path / "index.npy"))

    monkeypatch.setattr(dist, "get_rank", lambda: 3)
    assert private_caches.read(build) == "built"
    assert target.read_text() == "precious"
