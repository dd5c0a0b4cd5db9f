"""Checksums: what is found before, while and after the files of a checkpoint are loaded."""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path

import pytest

from megatron_npu.adaptors.megatron_core.checkpoints import checksums as core
from megatron_npu.adaptors.shared import checksums as of_scripts
from megatron_npu.base import files
from megatron_npu.base.errors import UsageError
from megatron_npu.checkpoint_files import checksums


@pytest.fixture
def saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkpoint of a small file and of two that are compared while it is loaded."""
    monkeypatch.setattr(checksums, "_SMALL", 99)
    folder = tmp_path / "iter_0000003"
    folder.mkdir()
    for name, size in (("common", 99), ("first", 100), ("second", 100)):
        (folder / name).write_bytes(bytes(size))
    checksums.write(folder)
    return folder


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def test_what_was_written_by_earlier_versions_is_compared(tmp_path: Path) -> None:
    """The digests are those of the format of 2026-11: XXH3 of 128 bits, in hexadecimal."""
    (tmp_path / "weights").write_bytes(b"weights" * 1000)
    recorded = {"weights": [7000, "85cb974657e58e4ee6a4ebd545aab2b2"]}
    (tmp_path / checksums.NAME).write_text(json.dumps({"algorithm": "xxh3_128", "files": recorded}))
    assert checksums.damaged(tmp_path) == []
    flip(tmp_path / "weights")
    assert checksums.damaged(tmp_path) == ["weights has different content from when it was saved"]


def test_large_files_are_compared_while_others_are_loaded(saved, monkeypatch) -> None:
    loading = threading.Event()
    compare = checksums._content_fault

    def compared(path: Path, *rest):
        if path.name != "common":
            assert loading.wait(60)
        return compare(path, *rest)

    monkeypatch.setattr(checksums, "_content_fault", compared)
    with checksums.verifying(saved):
        loading.set()
    flip(saved / "second")
    loading.clear()
    with (
        pytest.raises(UsageError, match=r"damaged: second has different content"),
        checksums.verifying(saved),
    ):
        loading.set()


@pytest.mark.parametrize("harm", ["small", "cut", "missing"])
def test_what_is_quickly_seen_is_told_before_anything_is_loaded(harm, saved) -> None:
    if harm == "small":
        flip(saved / "common")
    elif harm == "cut":
        (saved / "first").write_bytes(bytes(98))
    else:
        (saved / "first").unlink()
    with pytest.raises(UsageError, match="is damaged"), checksums.verifying(saved):
        pytest.fail("it is loaded")


def test_damage_is_told_where_the_reader_stumbled_over_it(saved) -> None:
    with pytest.raises(ZeroDivisionError), checksums.verifying(saved):
        raise ZeroDivisionError
    flip(saved / "first")
    with pytest.raises(UsageError, match="first has different content") as told, checksums.verifying(saved):
        raise ZeroDivisionError
    assert isinstance(told.value.__context__, ZeroDivisionError)


def test_who_interrupts_the_loading_does_not_wait_for_the_files(saved, monkeypatch) -> None:
    stopped = []

    def compared(path: Path, entry, stop: threading.Event | None):
        if stop is not None:
            stopped.append(stop.wait(60))

    monkeypatch.setattr(checksums, "_content_fault", compared)
    with pytest.raises(KeyboardInterrupt), checksums.verifying(saved):
        raise KeyboardInterrupt
    assert stopped == [True, True]


def test_a_rank_compares_what_it_loads() -> None:
    shards = [f"__{rank}_{part}.distcp" for rank in range(3) for part in range(2)]
    readers = checksums._readers([*shards, "common.pt"], 3)
    assert readers == {"common.pt": 0, **{name: int(name[2]) for name in shards}}
    assert sorted(checksums._readers(shards, 2).values()) == [0, 0, 0, 1, 1, 1]  # written by others
    assert set(checksums._readers(["mp_rank_00/a.pt", "mp_rank_01/a.pt"], 2).values()) == {0, 1}
    assert set(checksums._readers(["model.safetensors"], 1).values()) == {0}


def test_what_a_killed_run_has_left_of_them_is_no_file_of_the_next_save(saved) -> None:
    """Found by the campaign: a whole checkpoint was refused, for want of that file."""
    left = saved / f"{checksums.NAME}.4194305.partial"  # no process has such a number
    left.touch()
    checksums.write(saved)
    assert checksums.damaged(saved) == []
    left.touch()
    checksums.forget(saved)
    assert not left.exists()


@pytest.mark.parametrize("kind", ["a pipe", "a link into nowhere"])
def test_what_only_bears_the_name_of_checksums_is_damage(kind, saved) -> None:
    """It counted as a checkpoint without checksums, which is loaded unseen."""
    path = saved / checksums.NAME
    path.unlink()
    os.mkfifo(path) if kind == "a pipe" else path.symlink_to("nowhere")
    with (
        pytest.raises(UsageError, match=r"checksums\.json is not a regular file"),
        checksums.verifying(saved),
    ):
        pass


def test_a_checkpoint_without_checksums_is_loaded(saved) -> None:
    flip(saved / "first")
    with pytest.raises(UsageError, match="first"), checksums.verifying(saved):
        pass
    checksums.forget(saved)
    before = sorted(saved.iterdir())
    with checksums.verifying(saved):
        read = (saved / "first").read_bytes()
    assert read == bytes(50) + b"\1" + bytes(49)
    assert sorted(saved.iterdir()) == before  # none are made of what cannot be known to be whole


@pytest.fixture
def second(saved) -> Path:
    """The place of a checkpoint that a script saves after that one, with the tracker at the first."""
    (saved.parent / of_scripts.TRACKER).write_text("3")
    return saved.with_name("iter_0000006")


def save_as_upstream(place: Path) -> None:
    """Write the file of a rank, and the tracker where upstream is told to."""
    place.mkdir(exist_ok=True)
    (place / "weights").write_bytes(b"6")
    Path(of_scripts.tracker_to_write(lambda root: f"{root}/{of_scripts.TRACKER}", place.parent)).write_text(
        "6"
    )


@pytest.mark.parametrize("again", [False, True], ids=["new", "written over"])
def test_who_is_killed_while_a_script_saves_leaves_no_checkpoint_without_checksums(
    again, saved, second, monkeypatch
) -> None:
    """The files that are there when checksums are written, and the moment before, are what a kill leaves."""
    if again:
        second.mkdir()
        (second / "weights").write_bytes(b"of a former run")
        checksums.write(second)
    seen = []
    write = checksums.write

    def written(place: Path) -> None:
        seen.append((of_scripts.of_tracker(saved.parent), checksums.damaged(second)))
        write(place)
        seen.append((of_scripts.of_tracker(saved.parent), checksums.damaged(second)))

    monkeypatch.setattr(checksums, "write", written)
    with of_scripts.saving(saved.parent, second, verifies=True):
        save_as_upstream(second)
    assert seen == [(saved, []), (saved, [])]  # the one before, and none that seems damaged
    assert of_scripts.of_tracker(saved.parent) == second
    assert (second / checksums.NAME).is_file()
    assert not list(saved.parent.glob("*.partial"))


def test_the_tracker_of_an_asynchronous_save_gets_its_name_at_once(saved, second) -> None:
    """Upstream's, of which a kill between opening and writing leaves an empty one."""
    seen: list[Path | None] = []

    def look() -> None:
        seen.append(of_scripts.of_tracker(saved.parent))

    with of_scripts.beginning(saved.parent, second) as save:
        name = of_scripts.tracker_to_write(lambda root: f"{root}/{of_scripts.TRACKER}", second.parent)
    look()
    assert not save.publish()  # not yet written
    with open(name, "w") as stream:  # what upstream does when all files are there
        look()
        stream.write("6")
    assert save.publish()
    look()
    assert seen == [saved, saved, second]
    assert not list(saved.parent.glob("*.partial"))


def test_a_save_that_fails_leaves_the_tracker_where_it_was(saved, second, monkeypatch) -> None:
    monkeypatch.setattr(checksums, "write", lambda place: (_ for _ in ()).throw(OSError("full")))
    with pytest.raises(OSError, match="full"), of_scripts.saving(saved.parent, second, verifies=True):
        save_as_upstream(second)
    assert of_scripts.of_tracker(saved.parent) == saved
    with of_scripts.saving(saved.parent, second, verifies=False):  # what was left is removed
        save_as_upstream(second)
    assert not list(saved.parent.glob("*.partial"))
    assert of_scripts.of_tracker(saved.parent) == second
    assert not (second / checksums.NAME).exists()


def test_ranks_go_on_when_the_tracker_has_its_name(saved, second, monkeypatch) -> None:
    """One that loaded at once would find the checkpoint before, or none."""
    met: list[Path | None] = []
    monkeypatch.setattr(of_scripts.dist, "is_initialized", lambda: True)
    monkeypatch.setattr(of_scripts.dist, "get_rank", lambda: 0)
    monkeypatch.setattr(of_scripts.dist, "barrier", lambda: met.append(of_scripts.of_tracker(saved.parent)))
    with of_scripts.saving(saved.parent, second, verifies=False):
        save_as_upstream(second)
        assert met == []
    assert met == [second]


def test_a_script_does_not_write_its_tracker_through_a_link(saved, second, tmp_path) -> None:
    """In a folder of a group, another user can guess the tracker's temporary name and put a link there."""
    private = tmp_path / "private"
    private.write_text("kept")
    tracker = saved.parent / of_scripts.TRACKER
    with of_scripts.saving(saved.parent, second, verifies=True):
        files.partial_file(tracker).symlink_to(private)
        save_as_upstream(second)
    assert private.read_text() == "kept"
    assert tracker.read_text() == "6"
    assert not tracker.is_symlink()


def test_an_asynchronous_save_does_not_write_its_tracker_through_a_link(saved, second, tmp_path) -> None:
    """Upstream is given the name when the save starts, and opens it when the save ends."""
    private = tmp_path / "private"
    private.write_text("kept")
    with of_scripts.beginning(saved.parent, second) as save:
        written = of_scripts.tracker_to_write(lambda *_: str(save.tracker), saved.parent)
    files.partial_file(save.tracker).symlink_to(private)  # the name that can be guessed
    Path(written).write_text("6")
    assert save.publish()
    assert private.read_text() == "kept"
    assert save.tracker.read_text() == "6"


def test_wandb_is_given_the_tracker_when_it_has_its_name(saved, second, monkeypatch) -> None:
    told: list[str] = []

    def upload(checkpoint_path: str, tracker: str, save_dir: str, iteration: int) -> None:
        told.append(Path(tracker).read_text())

    tracker = saved.parent / of_scripts.TRACKER
    with of_scripts.saving(saved.parent, second, verifies=True):
        save_as_upstream(second)
        unfinished = of_scripts.tracker_to_write(lambda: str(tracker))
        core.log_when_named(upload, str(second), unfinished, str(saved.parent), 6)
        assert told == []
    assert told == ["6"]
    core.log_when_named(upload, str(second), str(tracker), str(saved.parent), 6)
    assert told == ["6", "6"]


@pytest.mark.parametrize(
    ("text", "name"), [("3\n", "iter_0000003"), ("release", "release"), ("x", None), ("", None)]
)
def test_what_a_tracker_names(text, name, tmp_path) -> None:
    (tmp_path / of_scripts.TRACKER).write_text(text)
    place = of_scripts.of_tracker(tmp_path)
    assert (place and place.name) == name
    assert of_scripts.is_release(tmp_path) == (name == "release")


@pytest.mark.parametrize("name", ["common.pt", "metadata.json"])
def test_what_a_script_reads_before_the_rest_is_compared_before(name, tmp_path) -> None:
    """Upstream reads ``common.pt`` before it loads; torch's error of a file cut short is a traceback."""
    place = tmp_path / "iter_0000003"
    place.mkdir()
    for each in ("common.pt", "metadata.json", "__0_0.distcp"):
        (place / each).write_bytes(bytes(8))
    checksums.write(place)
    flip(place / "__0_0.distcp")  # which is compared where it is loaded
    (tmp_path / of_scripts.TRACKER).write_text("3")
    assert core._of_ranks(str(tmp_path), None) is None
    (place / name).write_bytes(b"")
    with pytest.raises(UsageError, match=f"damaged: {name} .*--load-last-good"):
        core._of_ranks(str(tmp_path), None)
