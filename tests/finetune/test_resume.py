"""A run that goes on within an epoch: to the bit; and checkpoints that do not fit."""

from __future__ import annotations

import math
import pickle
import re
import shutil
from argparse import Namespace
from pathlib import Path
from typing import cast

import pytest

from megatron_npu.commands import cli
from megatron_npu.finetune.model.prepare import Prepared
from megatron_npu.finetune.run import arguments, resume_changes
from tests.conftest import ROOT
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
    assert "the number of ranks has changed, so random numbers start again from --seed" in said
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
        (None, ("--global-batch-size", 4), "--global-batch-size is 4, but it was 8 in "),
        (None, ("--seed", 1), "--seed is 1, but it was 1234 in "),
        (altered, (), "does not describe a training run"),
        (cut, (), "has 100 bytes instead of "),
        (hostile, (), " refers to posix.mkdir"),
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
    assert "contains a different model: 0.bias is [16] in the checkpoint and [24] in this run" in error


def test_without_a_checkpoint_it_begins_and_says_so(tmp_path, capsys) -> None:
    arguments = flags(tmp_path, "--load", tmp_path, "--train-iters", 1)
    assert cli.main(["train", *arguments]) == 0
    assert f"no checkpoint in {tmp_path} yet: starting from scratch" in capsys.readouterr().out


HIGHEST, AT = 1e-2, SAVED + 1  # an iteration logs the rate of the next update

# the flag and its value; the rate that the first line then has (None: the plain run's); whether the first
# loss (that of the same weights), and whether a later one, differs from the plain run's
ROWS = [
    ("--lr 1e-3", 1e-3 * (12 - AT) / 12, False),
    ("--min-lr 5e-3", 5e-3 + (12 - AT) / 12 * 5e-3, False),
    ("--lr-decay-style cosine", HIGHEST * 0.5 * (math.cos(math.pi * AT / 12) + 1), False),
    ("--lr-decay-style constant", HIGHEST, False),
    ("--lr-decay-iters 20", HIGHEST * (20 - AT) / 20, False),
    ("--lr-warmup-iters 10", HIGHEST * AT / 10, False),
    ("--lr-warmup-fraction 0.5", HIGHEST * (12 - AT) / 6, False),
    ("--weight-decay 0.9", None, False),
    ("--adam-beta1 0.1", None, False),
    ("--adam-beta2 0.5", None, False),
    ("--adam-eps 1e-2", None, False),
    ("--clip-grad 0.01", None, False),
    ("--train-iters 10", HIGHEST * (10 - AT) / 10, False),
    ("--epochs 3", HIGHEST * (18 - AT) / 18, False),
    ("--micro-batch-size 2", None, True),  # other random numbers for dropout
    ("--mixed-precision bf16", None, True),
    ("--mixed-precision fp16", None, True),
]


@pytest.mark.parametrize(("words", "rate", "at_once"), ROWS, ids=[row[0] for row in ROWS])
def test_a_flag_takes_effect_and_is_said(words, rate, at_once, alone, tmp_path, capsys) -> None:
    plain, flag = train_runs.losses(alone)[SAVED:], words.split()[0]
    folder = begun(alone, tmp_path / "begun")
    train(1, *flags(folder, "--load", folder, *words.split()))
    (line,) = re.findall(rf"^   {flag} .*$", capsys.readouterr().out, re.MULTILINE)
    expected = {row.flag: row.effect for row in resume_changes.FLAGS}[flag]
    assert re.fullmatch(rf"   {flag} \S+ \(the checkpoint: \S+\): {re.escape(expected)}", line)
    found = train_runs.losses(folder)
    assert (found[0] != plain[0]) == at_once
    assert found[1] != plain[1]  # after the first update
    rows = [tiny.rows(path / "metrics.jsonl") for path in (folder, alone)]
    (first,), (plains,) = ([row for row in each if row["iteration"] == AT] for each in rows)
    assert first["learning_rate"] == pytest.approx(plains["learning_rate"] if rate is None else rate)


@pytest.mark.parametrize(
    ("provided", "words", "rate", "said"),
    [
        (
            "lambda weights: torch.optim.AdamW(weights, lr=1e-2), None",
            "--lr 1e-3 --adam-eps 1e-2 --lr-decay-style constant",
            1e-2,
            [
                "--lr 0.001 (the checkpoint: 0.01): has no effect, because your script creates the optimizer",
                "--adam-eps 0.01 (the checkpoint: 1e-08): has no effect, because your script creates the opt",
                "--lr-decay-style constant (the checkpoint: linear): applies from the next update on",
            ],
        ),
        (
            "None, lambda adam: torch.optim.lr_scheduler.StepLR(adam, 4)",
            "--lr 1e-3 --lr-decay-style constant --weight-decay 0.5",
            1e-4,  # a tenth every four iterations
            [
                "--lr 0.001 (the checkpoint: 0.01): has no effect, because your script creates the schedule",
                "--lr-decay-style constant (the checkpoint: linear): has an effect only if the schedule that",
                "--weight-decay 0.5 (the checkpoint: 0.01): applies from the next update on",
            ],
        ),
    ],
    ids=["optimizer", "schedule"],
)
def test_what_the_script_creates_comes_from_the_checkpoint(
    provided, words, rate, said, tmp_path, capsys
) -> None:
    script, save = tmp_path / "own.py", tmp_path / "save"
    text = SCRIPT.read_text()
    assert "(*layers), None, None" in text
    script.write_text(text.replace("(*layers), None, None", f"(*layers), {provided}"))

    def run(*more: object) -> None:
        train(1, *(str(script) if word == str(SCRIPT) else word for word in flags(save, *more)))

    run("--save-interval", SAVED)
    (save / "latest_checkpointed_iteration.txt").write_text(f"{SAVED}\n")
    shutil.rmtree(save / "iter_0000012")
    capsys.readouterr()
    plain = train_runs.losses(save)
    run("--load", save, *words.split())
    told = capsys.readouterr().out
    assert [line for line in said if line not in told] == []
    (row,) = [row for row in tiny.rows(save / "metrics.jsonl") if row["iteration"] == AT]
    assert row["learning_rate"] == pytest.approx(rate)
    found = train_runs.losses(save)
    assert found[:AT] == plain[:AT]
    assert found[AT] != plain[AT]  # after the first update


def test_another_length_of_samples_is_said() -> None:
    flags, saved = {"seq_length": 64, "lr": 1e-2}, {"seq_length": 128, "lr": 1e-2}
    prepared = cast("Prepared", Namespace(own_optimizer=True, flags_schedule=True, lr_scheduler=None))
    expected = "  --seq-length 64 (the checkpoint: 128): splits samples at other positions"
    assert resume_changes.since(flags, saved, "there", prepared)[1:] == [expected]


def test_the_page_has_a_row_for_each_flag() -> None:
    page = (ROOT / "docs" / "reference" / "resume.md").read_text(encoding="utf-8")
    page = page[page.index("## `megatron-npu train`") :]
    tested = {row[0].split()[0] for row in ROWS} | {"--seq-length"}
    given = arguments.parse(["--user-script", __file__, "--train-iters", "1"])
    for row in resume_changes.FLAGS:
        rows = [line for line in page.splitlines() if line.startswith("|") and f"`{row.flag}`" in line]
        assert rows[0].endswith(f"| {row.effect} |"), row.flag
        assert row.flag in tested
        assert hasattr(given, row.name), f"train has no flag {row.flag}"
