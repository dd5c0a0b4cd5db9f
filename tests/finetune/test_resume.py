"""A run that goes on within an epoch: to the bit; and checkpoints that do not fit."""

from __future__ import annotations

import pickle
import shutil
from pathlib import Path

import pytest

from megatron_npu.commands import cli
from tests.support import tiny, train_runs
from tests.support.payload import Runs

SCRIPT = Path(__file__).parent / "scripts" / "dropout.py"
SAVED = 8  # two iterations into the second epoch of six


def flags(save: Path, *more: object) -> list[str]:
    arguments = (
        *("--user-script", SCRIPT, "--epochs", 2, "--micro-batch-size", 4, "--global-batch-size", 8),
        *("--lr", "1e-2", "--log-interval", 1, "--save", save, "--no-plot", *more),
    )
    return [str(argument) for argument in arguments]


def train(processes: int, *arguments: str) -> None:
    if processes == 1:  # in this process: nothing has to start
        assert cli.main(["train", *arguments, "--nproc-per-node", "1"]) == 0
        return
    done = train_runs.train(*arguments, processes=processes)
    assert done.returncode == 0, done.stderr


def begun(whole: Path, folder: Path) -> Path:
    """Return a folder as it is where a run was killed after its first checkpoint."""
    shutil.copytree(whole / f"iter_{SAVED:07d}", folder / f"iter_{SAVED:07d}")
    (folder / "latest_checkpointed_iteration.txt").write_text(f"{SAVED}\n")
    return folder


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where a run of one process that nothing interrupted has saved."""
    save = tmp_path_factory.mktemp("alone")
    train(1, *flags(save, "--save-interval", SAVED))
    return save


@pytest.fixture(scope="module")
def together(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same of two."""
    save = tmp_path_factory.mktemp("together")
    train(2, *flags(save, "--save-interval", SAVED))
    return save


@pytest.mark.parametrize(("processes", "name"), [(1, "alone"), (2, "together")])
def test_it_goes_on_to_the_bit(
    processes: int, name: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    save = request.getfixturevalue(name)
    folder = begun(save, tmp_path / "begun")
    last, more = "iter_0000012", []
    if processes == 2:  # and the newest is not whole
        more = ["--load-last-good"]
        (shutil.copytree(save / last, folder / last) / "run.json").write_text("{}")
        (folder / "latest_checkpointed_iteration.txt").write_text("12")
    train(processes, *flags(folder, "--load", folder, *more))
    assert tiny.differences(save / last, folder / last) == []
    assert train_runs.losses(folder) == train_runs.losses(save)[SAVED:]
    assert len(train_runs.losses(save)) == 12
    assert train_runs.evaluations(folder)[12]["loss"] == train_runs.evaluations(save)[12]["loss"]
    weights = [path / "model" / "model.safetensors" for path in (save, folder)]
    assert weights[0].read_bytes() == weights[1].read_bytes()


def test_the_tool_for_checkpoints_knows_those_of_train(alone: Path, tmp_path: Path, capsys) -> None:
    folder = begun(alone, tmp_path / "begun")
    checkpoint = ("checkpoint", "inspect", str(folder))
    assert cli.main([*checkpoint]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert f"iteration {SAVED} consumed_train_samples {SAVED * 8} " in said
    assert "global_batch_size 8 " in said
    (weights,) = (folder / f"iter_{SAVED:07d}").glob("*.distcp")
    weights.write_bytes(weights.read_bytes()[:-1])
    for action in ("inspect", "verify", "list"):
        assert cli.main(["checkpoint", action, str(folder)]) == 1
    (folder / f"iter_{SAVED:07d}" / "run.json").write_text("{}")
    assert cli.main([*checkpoint]) == 2
    assert "run.json" in capsys.readouterr().err


def test_another_number_of_ranks_takes_over(together: Path, tmp_path: Path, capsys) -> None:
    folder = begun(together, tmp_path / "begun")
    train(1, *flags(folder, "--load", folder))
    said = capsys.readouterr().out
    assert "the number of ranks has changed: random numbers start again" in said
    assert len(train_runs.losses(folder)) == 12 - SAVED
    assert train_runs.losses(folder) != train_runs.losses(together)[SAVED:]  # other dropout


def altered(folder: Path) -> None:
    path = folder / "run.json"
    path.write_text(path.read_text().replace('"iteration": 8', '"iteration": "8"', 1))


def cut(folder: Path) -> None:
    with next(folder.glob("*.distcp")).open("r+b") as stream:
        stream.truncate(100)


def hostile(folder: Path) -> None:
    (folder / "checksums.json").unlink()
    (folder / ".metadata").write_bytes(pickle.dumps(Runs(folder / "ran")))


@pytest.mark.parametrize(
    ("spoil", "more", "expected"),
    [
        (None, ("--global-batch-size", 4), "--global-batch-size 4, but 8 in "),
        (None, ("--seed", 1), "--seed 1, but 1234 in "),
        (altered, (), "does not describe a run"),
        (cut, (), "has 100 bytes instead of "),
        (hostile, (), "it names posix.mkdir"),
    ],
)
def test_what_does_not_fit_is_refused(spoil, more, expected, alone, tmp_path, capsys) -> None:
    folder = begun(alone, tmp_path / "begun")
    if spoil:
        spoil(folder / f"iter_{SAVED:07d}")
    assert cli.main(["train", *flags(tmp_path / "new", "--load", folder, *more)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert expected in line
    assert not [*folder.rglob("ran")]


def test_another_model_is_refused(alone, tmp_path, capsys) -> None:
    script = tmp_path / "wider.py"
    script.write_text(SCRIPT.read_text().replace("16", "24"))
    arguments = [str(script) if word == str(SCRIPT) else word for word in flags(tmp_path / "new")]
    assert cli.main(["train", *arguments, "--load", str(begun(alone, tmp_path / "begun"))]) == 2
    error = capsys.readouterr().err
    assert "contains a different model: 0.bias is [16] there and [24] here" in error


def test_without_a_checkpoint_it_begins_and_says_so(tmp_path, capsys) -> None:
    arguments = flags(tmp_path, "--load", tmp_path, "--train-iters", 1)
    assert cli.main(["train", *arguments]) == 0
    assert f"no checkpoint in {tmp_path} yet: starting from scratch" in capsys.readouterr().out


def test_other_settings_of_the_optimizer_take_effect_and_are_said(
    alone: Path, tmp_path: Path, capsys
) -> None:
    """The highest and least rate, decay, betas and epsilon: what the rest of the run has, and its numbers."""
    plain = train_runs.losses(alone)[SAVED:]
    for number, (words, rate) in enumerate(
        [
            (("--lr", "1e-3", "--min-lr", "5e-4"), pytest.approx(5e-4 + 3 / 12 * 5e-4)),
            (("--weight-decay", "0.9"), None),
            (("--adam-beta1", "0.1"), None),
            (("--adam-beta2", "0.5"), None),
            (("--adam-eps", "1e-2"), None),
        ]
    ):
        folder = begun(alone, tmp_path / str(number))
        capsys.readouterr()
        train(1, *flags(folder, "--load", folder, *words))
        said = capsys.readouterr().out
        assert f"{words[0]} {float(words[1])} (checkpoint: " in said
        assert train_runs.losses(folder) != plain
        assert train_runs.losses(folder)[0] == plain[0]
        if rate is not None:
            assert tiny.rows(folder / "metrics.jsonl")[0]["learning_rate"] == rate
