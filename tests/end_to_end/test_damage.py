"""Damaged checkpoints: found before they are loaded, named, and passed over on demand."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from megatron_npu.checkpoint_files import checksums
from megatron_npu.commands import cli
from megatron_npu.pretrain.checkpoint import checkpoint_files
from tests.support import tiny

pytest.importorskip("megatron.core")


@pytest.fixture(scope="module")
def made(dataset: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints of iterations 2, 4 and 6."""
    folder = tmp_path_factory.mktemp("damage") / "trained"
    tiny.run("pretrain", *tiny.flags_for(dataset), "--save", str(folder), "--save-interval", "2")
    return folder


@pytest.fixture
def trained(made: Path, tmp_path: Path) -> Path:
    """A copy that a test may spoil."""
    return Path(shutil.copytree(made, tmp_path / "trained"))


def _flip(path: Path, at: int | None = None) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2 if at is None else at] ^= 1
    path.write_bytes(content)


def test_one_bit_of_any_file_is_found(trained: Path) -> None:
    folder = trained / "iter_0000006"
    for path in sorted(folder.iterdir()):
        whole = path.read_bytes()
        named = "" if path.name == checksums.NAME else path.name  # in it another file's digest may change
        _flip(path)
        assert any(named in fault for fault in checksums.damaged(folder)), path.name
        path.write_bytes(whole[:-1])
        assert any(named in fault for fault in checksums.damaged(folder)), path.name
        path.write_bytes(whole)
    assert checksums.damaged(folder) == []
    assert {path.name for path in folder.iterdir()} - {checksums.NAME} == set(
        json.loads((folder / checksums.NAME).read_text())["files"]
    )


def _distcp(folder: Path) -> Path:
    return sorted(folder.glob("*.distcp"))[-1]


def test_damaged_weights_are_not_loaded(trained: Path, flags: Callable, refused: Callable) -> None:
    """A flipped bit in a .distcp is nothing that torch or Megatron notices."""
    path = _distcp(trained / "iter_0000006")
    _flip(path)
    for command, remedy in (
        (["pretrain", *flags("--load", trained)], "--load-last-good"),
        (
            ["generate", "--load", str(trained), "--prompt", "1 2"],
            checkpoint_files.TRACKER,
        ),  # has no such flag
    ):
        message = refused(*command)
        assert f"is damaged: {path.name} has different content from when it was saved" in message
        assert remedy in message


def test_without_checksums_a_number_that_no_weight_has_is_named(
    trained: Path, flags: Callable, capsys: pytest.CaptureFixture
) -> None:
    """As stock scripts write them, without this project."""
    folder = trained / "iter_0000006"
    (folder / checksums.NAME).unlink()
    name = "decoder.final_layernorm.weight"
    weight = tiny.tensors(folder)[name].numpy().tobytes()
    for path in folder.glob("*.distcp"):
        content = bytearray(path.read_bytes())
        at = content.find(weight)
        while at >= 0:  # with the optimizer's there may be two
            content[at + 3] ^= 0x40  # the highest bit of an exponent
            at = content.find(weight, at)
        path.write_bytes(content)
    for command in (
        ["pretrain", *flags("--load", trained, "--no-load-optim")],
        ["generate", "--load", str(trained), "--prompt", "1 2", "--num-tokens", "1"],
    ):
        cli.main(command)
        told = capsys.readouterr().err
        assert f"{folder}: " in told
        assert f"{name} has a value of " in told, told


def test_the_newest_whole_one_is_loaded_on_demand(
    trained: Path, flags: Callable, capsys: pytest.CaptureFixture
) -> None:
    _flip(_distcp(trained / "iter_0000006"))
    (trained / "iter_0000004" / "metadata.json").unlink()
    run = ["pretrain", *flags("--load", trained, "--save", trained, "--load-last-good")]
    assert cli.main(run) == 0
    out = capsys.readouterr().out
    assert "damaged checkpoints of iterations 4, 6; loading 2" in out
    assert "resuming from iteration 2" in out
    assert checksums.damaged(trained / "iter_0000006") == []


def test_none_whole_is_an_error(trained: Path, flags: Callable, refused: Callable) -> None:
    for path in trained.glob("iter_*/metadata.json"):
        _flip(path)
    message = refused("pretrain", *flags("--load", trained, "--load-last-good"))
    assert "none of the 3 checkpoints has files that match" in message


def test_verifying_can_be_left_out(trained: Path, flags: Callable) -> None:
    (trained / "iter_0000006" / checksums.NAME).write_text("{}")
    assert cli.main(["pretrain", *flags("--load", trained)]) == 2
    assert cli.main(["pretrain", *flags("--load", trained, "--no-verify-checkpoint")]) == 0


def test_the_command_lists_inspects_and_verifies(trained: Path, capsys: pytest.CaptureFixture) -> None:
    assert cli.main(["checkpoint", "list", str(trained)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["iter_0000002", "iter_0000004", "iter_0000006"]
    assert all("whole" in line for line in lines)
    assert lines[-1].endswith("<- latest")
    assert cli.main(["checkpoint", "inspect", str(trained), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["iteration"], report["consumed_train_samples"], report["faults"]) == (6, 24, [])
    assert report["arguments"]["hidden_size"] == 32
    assert "metadata.json" in report["files"]
    _flip(_distcp(trained / "iter_0000004"))
    (trained / "iter_0000002" / "metadata.json").unlink()
    assert cli.main(["checkpoint", "verify", str(trained)]) == 1
    assert capsys.readouterr().out.splitlines() == [
        "iter_0000002: metadata.json is missing",
        f"iter_0000004: {_distcp(trained / 'iter_0000004').name} "
        "has different content from when it was saved",
        "iter_0000006: whole",
    ]
    assert cli.main(["checkpoint", "verify", str(trained), "--ckpt-step", "6"]) == 0


def test_checksums_for_what_a_stock_script_has_saved(trained: Path, capsys: pytest.CaptureFixture) -> None:
    (trained / "iter_0000004" / checksums.NAME).unlink()
    stock = trained / "iter_0000009" / "mp_rank_00" / "model_optim_rng.pt"  # of the format torch
    stock.parent.mkdir(parents=True)
    stock.write_bytes(b"weights")
    assert cli.main(["checkpoint", "sum", str(trained)]) == 0
    written = [f"iter_000000{number}: checksums written" for number in (4, 9)]
    assert capsys.readouterr().out.splitlines() == written
    assert cli.main(["checkpoint", "verify", str(trained)]) == 0
    _flip(stock)
    _flip(_distcp(trained / "iter_0000004"))
    capsys.readouterr()
    assert cli.main(["checkpoint", "verify", str(trained)]) == 1
    told = [line for line in capsys.readouterr().out.splitlines() if "different content" in line]
    assert [line.split(":")[0] for line in told] == ["iter_0000004", "iter_0000009"]


def test_pruning_keeps_the_newest_and_each_so_many(trained: Path, capsys: pytest.CaptureFixture) -> None:
    prune = ["checkpoint", "prune", str(trained), "--keep", "1", "--keep-every", "4"]
    assert cli.main([*prune, "--dry-run"]) == 0
    assert checkpoint_files.iterations(trained) == [2, 4, 6]
    assert cli.main(prune) == 0
    assert "removed iter_0000002" in capsys.readouterr().out
    assert checkpoint_files.iterations(trained) == [4, 6]
    (trained / checkpoint_files.TRACKER).write_text("4\n")  # somebody went back
    assert cli.main(["checkpoint", "prune", str(trained), "--keep", "1"]) == 0
    assert checkpoint_files.iterations(trained) == [4, 6]


def test_pruning_counts_whole_ones_alone(trained: Path) -> None:
    """It removed the last whole one before."""
    _flip(_distcp(trained / "iter_0000006"))
    (trained / "iter_0000004" / ".metadata").unlink()
    (trained / "iter_0000005").mkdir()  # of a stock script that was killed
    done = tiny.run("checkpoint", "prune", str(trained), "--keep", "1")
    told = done.stdout.splitlines()
    assert (done.returncode, done.stderr, len(told)) == (1, "", 3)
    assert told[0].startswith("iter_0000006 is damaged and is not counted toward --keep: ")
    assert told[0].endswith(
        f"{_distcp(trained / 'iter_0000006').name} has different content from when it was saved"
    )
    assert told[1:] == [
        "iter_0000005 is damaged and is not counted toward --keep: everything is missing",
        "iter_0000004 is damaged and is not counted toward --keep: .metadata is missing",
    ]
    assert checkpoint_files.iterations(trained) == [2, 4, 5, 6]


def test_of_damaged_ones_those_behind_the_kept_are_removed(
    trained: Path, capsys: pytest.CaptureFixture
) -> None:
    _flip(_distcp(trained / "iter_0000002"))
    assert cli.main(["checkpoint", "prune", str(trained), "--keep", "2"]) == 0
    assert checkpoint_files.iterations(trained) == [4, 6]
    assert "damaged" not in capsys.readouterr().out


def test_pruning_removes_a_link_alone(trained: Path, tmp_path: Path) -> None:
    """It renamed the link, and ended there: nothing removes a tree by a link."""
    elsewhere = tmp_path / "elsewhere"
    (trained / "iter_0000002").rename(elsewhere)
    (trained / "iter_0000002").symlink_to(elsewhere)
    done = tiny.run("checkpoint", "prune", str(trained), "--keep", "2")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == f"removed iter_0000002  0 bytes  only the link; {elsewhere.resolve()} is kept\n"
    assert sorted(path.name for path in trained.glob("*iter_*")) == ["iter_0000004", "iter_0000006"]


def test_what_cannot_be_removed_is_one_line(
    trained: Path, refused: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    def deny(path: Path, to: Path) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "rename", deny)
    told = refused("checkpoint", "prune", str(trained), "--keep", "1")
    assert f"{trained / 'iter_0000002'} cannot be removed (Permission denied)" in told


def test_bad_input_to_the_command(tmp_path: Path, refused: Callable) -> None:
    assert "does not exist; it must be the folder" in refused("checkpoint", "list", str(tmp_path / "none"))
    assert "--keep" in refused("checkpoint", "prune", str(tmp_path))
    assert "list, inspect, verify, sum, prune" in refused("checkpoint", "mend", str(tmp_path))
    assert "contains no checkpoint" in refused("checkpoint", "inspect", str(tmp_path))


def test_a_folder_without_checkpoints_is_reported(tmp_path, refused, capsys):
    told = refused("checkpoint", "verify", tmp_path)
    assert f"{tmp_path} contains no checkpoint; it must be the folder that was passed to --save" in told
    assert cli.main(["checkpoint", "list", str(tmp_path)]) == 0
    assert f"{tmp_path} contains no checkpoint" in capsys.readouterr().err
