"""Checkpoints in object storage: the mark is last, and what has none is not fetched."""

from __future__ import annotations

import uuid
from pathlib import Path

import pytest

from megatron_npu.base.errors import UsageError
from megatron_npu.checkpoint_files import disks, object_storage

fsspec = pytest.importorskip("fsspec")


@pytest.fixture
def address(monkeypatch):
    monkeypatch.setattr(object_storage, "_PAUSE", 0.0)
    place = f"memory://{uuid.uuid4().hex}/run"
    disks.copy_to(place)
    yield place
    disks.copy_to(None)


def saved(root: Path, iteration: int, content: str = "weights") -> Path:
    """Write what stands for a checkpoint."""
    folder = root / f"iter_{iteration:07d}"
    (folder / "part").mkdir(parents=True)
    (folder / "part" / "data").write_text(content)
    (folder / "checksums.json").write_text(f'{{"files": {{"part/data": ["{content}"]}}}}')
    (root / "latest_checkpointed_iteration.txt").write_text(f"{iteration}\n")
    return folder


def tracked(root: Path) -> str:
    return (root / "latest_checkpointed_iteration.txt").read_text()


def test_the_mark_is_the_last_object_of_a_checkpoint(address, tmp_path, monkeypatch) -> None:
    storage, order = object_storage.opened(address), []
    for name in ("put_file", "open"):
        original = getattr(type(storage.system), name)

        def noted(self, *args, name=name, original=original, **kwargs):
            order.append(args[-1] if name == "put_file" else args[0])
            return original(self, *args, **kwargs)

        monkeypatch.setattr(type(storage.system), name, noted)
    object_storage.upload(saved(tmp_path, 4))
    ends = [str(path).partition("/run/")[2] for path in order if "/run/" in str(path)]
    assert sorted(set(ends[:-2])) == ["iter_0000004/checksums.json", "iter_0000004/part/data"]
    assert ends[-2:] == ["iter_0000004/_SUCCESS", "latest_checkpointed_iteration.txt"]
    assert storage.iterations() == [4]


def test_a_copy_that_fails_is_not_marked(address, tmp_path, monkeypatch) -> None:
    folder = saved(tmp_path, 4)
    object_storage.upload(folder)
    storage = object_storage.opened(address)
    attempts = []

    def broken(self, *args, **kwargs):
        attempts.append(args)
        raise ConnectionError("no route to the storage")

    monkeypatch.setattr(type(storage.system), "put_file", broken)
    with pytest.raises(
        object_storage.UploadError, match=r"is complete, but rank 0 could not copy it to memory://.*no route"
    ):
        object_storage.upload(folder)
    assert len(attempts) == 3
    assert storage.iterations() == []


def test_a_moment_without_the_storage_costs_nothing(address, tmp_path, monkeypatch) -> None:
    system = type(object_storage.opened(address).system)
    original, failures = system.put_file, [ConnectionError(), ConnectionError()]

    def unsteady(self, *args, **kwargs):
        if failures:
            raise failures.pop()
        return original(self, *args, **kwargs)

    monkeypatch.setattr(system, "put_file", unsteady)
    object_storage.upload(saved(tmp_path, 4))
    assert object_storage.opened(address).iterations() == [4]


def test_the_newest_complete_checkpoint_is_fetched(address, tmp_path) -> None:
    for iteration in (2, 4, 6):
        object_storage.upload(saved(tmp_path / "old", iteration, f"of {iteration}"))
    storage = object_storage.opened(address)
    storage.system.rm_file(storage.path("iter_0000006", "_SUCCESS"))
    disk = tmp_path / "disk"
    object_storage.fetch(address, str(disk))
    assert tracked(disk) == "4\n"
    assert (disk / "iter_0000004" / "part" / "data").read_text() == "of 4"
    assert not (disk / "iter_0000004" / "_SUCCESS").exists()
    assert sorted(path.name for path in disk.glob("*iter_0*")) == ["iter_0000004"]
    object_storage.fetch(address, str(disk), step=2)
    assert tracked(disk) == "2\n"
    with pytest.raises(UsageError, match=r"--ckpt-step 6: .* the complete checkpoints are: 2, 4"):
        object_storage.fetch(address, str(disk), step=6)


def test_what_the_disk_has_is_fetched_only_if_it_differs(address, tmp_path, capsys) -> None:
    folder = saved(tmp_path, 4)
    object_storage.upload(folder)
    saved(tmp_path, 6)  # whose copy was not finished
    object_storage.fetch(address, str(tmp_path))
    assert tracked(tmp_path) == "4\n"
    assert "fetched" not in capsys.readouterr().out
    (folder / "checksums.json").write_text('{"files": {"part/data": ["another"]}}')
    object_storage.fetch(address, str(tmp_path))
    assert "fetched" in capsys.readouterr().out
    assert "weights" in (folder / "checksums.json").read_text()


def test_a_killed_fetch_is_taken_up_again(address, tmp_path, monkeypatch) -> None:
    object_storage.upload(saved(tmp_path / "old", 4))
    system, disk, fetched = type(object_storage.opened(address).system), tmp_path / "disk", []
    original = system.get_file

    def killed(self, there, here, **kwargs):
        fetched.append(there.rpartition("/run/")[2])
        original(self, there, here, **kwargs)
        if there.endswith("data") and fetched.count("iter_0000004/part/data") == 1:
            raise KeyboardInterrupt

    monkeypatch.setattr(system, "get_file", killed)
    with pytest.raises(KeyboardInterrupt):
        object_storage.fetch(address, str(disk))
    assert not list(disk.glob("iter_*"))
    object_storage.fetch(address, str(disk))
    names = "iter_0000004/checksums.json", "iter_0000004/part/data"
    assert fetched == [*names, names[1]]  # the first one was complete
    found = sorted(path.name for path in (disk / "iter_0000004").rglob("*"))
    assert found == ["checksums.json", "data", "part"]
    object_storage.upload(saved(tmp_path / "another", 4, "others"))
    (disk / "iter_0000004").rename(disk / ".iter_0000004.0.fetch")  # of a checkpoint that was replaced
    object_storage.fetch(address, str(disk))
    assert (disk / "iter_0000004" / "part" / "data").read_text() == "others"


def test_an_empty_storage_changes_nothing(address, tmp_path) -> None:
    object_storage.fetch(address, str(tmp_path / "disk"))
    assert not (tmp_path / "disk").exists()


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ("checkpoints", r"must be the address of a folder in object storage, .* but got checkpoints"),
        ("nowhere://bucket/run", r"fsspec cannot open nowhere://"),
    ],
)
def test_an_address_that_cannot_be_opened_is_refused(given, told) -> None:
    with pytest.raises(UsageError, match=told):
        object_storage.opened(given)


@pytest.mark.parametrize("names", [("..", "..", "outside"), ("", "{elsewhere}")])
def test_an_object_whose_path_leads_out_of_its_checkpoint_is_not_fetched(address, tmp_path, names) -> None:
    object_storage.upload(saved(tmp_path / "old", 4))
    storage, elsewhere = object_storage.opened(address), tmp_path / "elsewhere"
    storage.write("evil", "iter_0000004", *(name.format(elsewhere=elsewhere) for name in names))
    disk = tmp_path / "a" / "disk"
    with pytest.raises(UsageError, match=r"leads out of the checkpoint's folder.*--ckpt-step"):
        object_storage.fetch(address, str(disk))
    assert not (tmp_path / "a" / "outside").exists()
    assert not elsewhere.exists()
    assert not list(disk.glob("*iter_*"))


def test_a_client_that_cannot_connect_is_told() -> None:
    """That of FTP connects as soon as the storage is opened."""
    with pytest.raises(UsageError, match=r"ftp://127\.0\.0\.1:9/run cannot be read \(ConnectionRefusedError"):
        object_storage.opened("ftp://127.0.0.1:9/run")
