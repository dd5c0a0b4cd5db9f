"""Names, tracker and description of checkpoints."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from megatron_npu.base.errors import UsageError
from megatron_npu.checkpoint_files import checksums, trackers
from megatron_npu.commands import cli
from megatron_npu.pretrain.checkpoint import checkpoint_description, checkpoint_files, checkpoint_folder
from megatron_npu.pretrain.checkpoint.checkpoint_description import CheckpointInfo


@pytest.fixture
def found(tmp_path) -> CheckpointInfo:
    path = checkpoint_files.directory(tmp_path, 10)
    path.mkdir()
    return CheckpointInfo(path, 10, 40, 8, True, True, None, {"num_layers": 2})


def test_names_are_those_of_megatron(tmp_path):
    assert checkpoint_files.directory("x", 10) == Path("x/iter_0000010")
    assert checkpoint_files.TRACKER == "latest_checkpointed_iteration.txt"


def test_what_is_written_is_found(tmp_path, found):
    checkpoint_description.describe(found.path, found)
    checkpoint_files.set_latest(tmp_path, 10)
    assert checkpoint_description.find(tmp_path) == found
    assert not list(tmp_path.rglob("*.partial"))


def test_without_a_tracker_there_is_none(tmp_path, found):
    assert checkpoint_description.find(tmp_path) is None


def test_a_tracker_that_is_behind_is_said_once(tmp_path, found, capsys):
    checkpoint_description.describe(found.path, found)
    later = [checkpoint_files.directory(tmp_path, number) for number in (20, 30, 40)]
    for place in later:
        place.mkdir()
    checkpoint_files.set_latest(tmp_path, 10)
    assert checkpoint_files.newest(tmp_path) == found.path
    assert capsys.readouterr().err == "", "without checksums they were perhaps not finished"
    trackers.tell_of_newer.cache_clear()
    for place in later[:2]:
        checksums.write(place)
    for _ in range(2):
        assert checkpoint_files.newest(tmp_path) == found.path
    told = capsys.readouterr().err
    assert (
        "names iteration 10, but there are newer checkpoints: 20, 30. Write 30 to the tracker, unless "
        "you set it back on purpose" in told
    )
    assert told.count("warning") == 1
    checkpoint_files.newest(tmp_path, 20)
    assert capsys.readouterr().err == "", "the user has named that one"


@pytest.mark.parametrize("text", ["", "release", "99", "10"])
def test_a_broken_directory_is_refused(tmp_path, found, text):
    (tmp_path / checkpoint_files.TRACKER).write_text(text)
    with pytest.raises(UsageError):
        checkpoint_description.find(tmp_path)


def test_a_description_that_was_cut_off_is_refused(tmp_path, found):
    checkpoint_description.describe(found.path, found)
    checkpoint_files.set_latest(tmp_path, 10)
    description = found.path / checkpoint_files.DESCRIPTION
    description.write_text(description.read_text()[:50])
    with pytest.raises(UsageError, match=r"arguments\.json"):
        checkpoint_description.find(tmp_path)


@pytest.mark.parametrize(
    "change",
    [
        {"iteration": -5},
        {"iteration": 1.5},
        {"iteration": True},
        {"consumed_train_samples": -1},
        {"consumed_valid_samples": "8"},
        {"arguments": {}},
        {"arguments": []},
        {"format": "one"},
        {"format": 1},
        {"format": None},
    ],
)
def test_a_description_that_cannot_be_is_refused(tmp_path, found, change):
    checkpoint_description.describe(found.path, found)
    checkpoint_files.set_latest(tmp_path, 10)
    description = found.path / checkpoint_files.DESCRIPTION
    description.write_text(json.dumps(json.loads(description.read_text()) | change))
    with pytest.raises(UsageError, match=r"arguments\.json") as caught:
        checkpoint_description.find(tmp_path)
    assert next(iter(change)) in str(caught.value)


def changed(found: CheckpointInfo, change: dict, *without: str) -> None:
    """Make the description of a checkpoint another version's."""
    checkpoint_description.describe(found.path, found)
    checkpoint_files.set_latest(found.path.parent, 10)
    description = found.path / checkpoint_files.DESCRIPTION
    values = json.loads(description.read_text()) | change
    description.write_text(json.dumps({name: values[name] for name in values if name not in without}))


def test_a_description_of_another_version_is_read(tmp_path, found):
    changed(found, {"format": "1.7", "more": {"of": "a newer one"}})
    assert checkpoint_description.find(tmp_path) == found
    lacking = ("format", "consumed_valid_samples", "has_optimizer", "has_rng", "optimizer_sharding")
    changed(found, {}, *lacking)
    assert checkpoint_description.find(tmp_path) == replace(found, consumed_valid_samples=0)


@pytest.mark.parametrize("name", ["iteration", "consumed_train_samples", "arguments"])
def test_what_has_no_default_is_named_where_it_is_missing(tmp_path, found, name):
    changed(found, {}, name)
    with pytest.raises(
        UsageError, match=rf"arguments\.json is not a description file .*: the file has no {name}\. "
    ):
        checkpoint_description.find(tmp_path)


def test_a_format_that_an_older_version_would_read_wrongly_is_refused(tmp_path, found):
    changed(found, {"format": "2.0"})
    with pytest.raises(UsageError, match=r"arguments\.json has format 2\.0, .* only format 1\.x"):
        checkpoint_description.find(tmp_path)


def test_that_of_train_has_a_format_too(tmp_path, found, capsys):
    checkpoint_files.set_latest(tmp_path, 10)
    run = {"format": "1.3", "iteration": 10, "arguments": {}, "more": 1}
    (found.path / checkpoint_files.DESCRIPTION_OF_TRAIN).write_text(json.dumps(run))
    assert cli.main(["checkpoint", "inspect", str(tmp_path), "--json"]) == 1  # nothing but that is there
    assert json.loads(capsys.readouterr().out)["iteration"] == 10
    (found.path / checkpoint_files.DESCRIPTION_OF_TRAIN).write_text(json.dumps(run | {"format": "2.0"}))
    assert cli.main(["checkpoint", "inspect", str(tmp_path)]) == 2
    assert (
        "run.json has format 2.0, but this version of megatron_npu reads only format 1.x"
        in capsys.readouterr().err
    )


@pytest.mark.parametrize("text", [b"\xff\xfe", b"[" * 200_000, b"null", b"[]", b"{}"])
def test_a_description_that_is_none_is_refused(tmp_path, found, text):
    checkpoint_files.set_latest(tmp_path, 10)
    (found.path / checkpoint_files.DESCRIPTION).write_bytes(text)
    with pytest.raises(UsageError, match=r"arguments\.json"):
        checkpoint_description.find(tmp_path)
    (tmp_path / checkpoint_files.TRACKER).write_bytes(text)
    with pytest.raises(UsageError, match=checkpoint_files.TRACKER):
        checkpoint_description.find(tmp_path)


def test_what_a_writer_adds_while_its_checkpoint_is_removed_goes_too(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(checkpoint_folder.dist, "get_rank", lambda: 0)
    monkeypatch.setattr(checkpoint_folder.dist, "barrier", lambda: None)
    remove, late = shutil.rmtree, iter(["__0_1.distcp"])

    def removing(folder: Path, ignore_errors: bool) -> None:
        remove(folder, ignore_errors)
        for name in late:
            folder.mkdir()
            (folder / name).touch()

    with pytest.raises(KeyboardInterrupt), checkpoint_folder.writing(tmp_path, 3):  # noqa: PT012
        monkeypatch.setattr(shutil, "rmtree", removing)
        raise KeyboardInterrupt
    assert not list(tmp_path.iterdir())


def test_the_directory_of_an_iteration_is_told_from_that_of_a_run(tmp_path: Path) -> None:
    one = checkpoint_files.directory(tmp_path, 12)
    one.mkdir()
    assert str(checkpoint_files.no_checkpoint(one)).endswith("Correct the path.")
    checkpoint_files.set_latest(tmp_path, 12)
    told = str(checkpoint_files.no_checkpoint(one))
    assert told.endswith(f"Use the directory above it, --load {tmp_path}.")
    assert str(checkpoint_files.no_checkpoint(tmp_path / "other")).endswith("Correct the path.")


@pytest.mark.parametrize("action", ["list", "inspect", "verify", "prune"])
def test_a_terminal_does_not_act_on_what_a_report_quotes(tmp_path, capsys, action):
    folder = tmp_path / "iter_0000003"
    folder.mkdir()
    evil = "\x1b]0;x\x07\x9b"
    described = {"format": "1.0", "iteration": 3, "arguments": {"task": evil, "data_path": [evil, 1]}}
    (folder / checkpoint_files.DESCRIPTION_OF_TRAIN).write_text(json.dumps(described))
    (folder / evil).write_text("")
    sums = {"algorithm": checksums.ALGORITHM, "files": {f"{evil}2": [1, "00"]}}
    (folder / checksums.NAME).write_text(json.dumps(sums))
    (folder / "machine.json").write_text(json.dumps({"host": evil, "elsewhere": {"a": evil}}))
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("3\n")
    cli.main(["checkpoint", action, str(tmp_path), *(["--keep", "1"] if action == "prune" else [])])
    told = "".join(capsys.readouterr())
    assert r"\x1b]0;x\x07\x9b" in told or action == "list", told
    assert not {"\x1b", "\x07", "\x9b"} & {*told}


def test_a_folder_with_other_digits_is_no_checkpoint(tmp_path: Path) -> None:
    """``checkpoint prune`` counted it, and then missed the folder of its number."""
    for name in ("iter_0000004", "iter_00000005", "iter_12345678", "iter_٠٠٠٠٠٠٦"):
        (tmp_path / name).mkdir()
    assert checkpoint_files.iterations(tmp_path) == [4, 12345678]
