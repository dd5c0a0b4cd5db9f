"""Weights & Biases: what is sent to it, and that nothing of it is touched where nobody asks."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from argparse import Namespace
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

import psutil
import pytest

from megatron_npu.base.errors import UsageError
from megatron_npu.base.installed_packages import is_installed
from megatron_npu.pretrain.flags import arguments
from megatron_npu.pretrain.flags.checks import logs_and_checkpoints
from megatron_npu.pretrain.flags.plan_parts import LogFlags, WandbFlags
from megatron_npu.pretrain.report import log, wandb_run
from megatron_npu.pretrain.run import pretrain
from tests.conftest import LONGEST, wait_until
from tests.support import tiny

WORDS = ("--wandb-project", "numbers", "--wandb-exp-name", "tiny", "--wandb-entity", "us", "--no-plot")


class Fake(ModuleType):
    """Notes what the package is asked for.

    Attributes:
        begun: keywords of ``init``.
        logged: iteration and numbers.
        ended: the codes of ``finish``.
    """

    def __init__(self) -> None:
        super().__init__("wandb")
        self.__spec__ = ModuleSpec("wandb", None)
        self.begun: list[dict[str, Any]] = []
        self.logged: list[tuple[int, dict[str, float]]] = []
        self.ended: list[int] = []

    def init(self, **keywords: Any) -> Fake:
        self.begun.append(keywords)
        return self

    def log(self, numbers: dict[str, float], step: int) -> None:
        self.logged.append((step, numbers))

    def finish(self, exit_code: int) -> None:
        self.ended.append(exit_code)


@pytest.fixture
def wandb(monkeypatch):
    fake = Fake()
    monkeypatch.setitem(sys.modules, "wandb", fake)
    return fake


@pytest.fixture
def train(flags, monkeypatch):
    pytest.importorskip("megatron.core")
    monkeypatch.setenv("MEGATRON_NPU_DEVICE", "cpu")
    return lambda *words, **more: pretrain.train(arguments.parse(flags(*map(str, words))), **more)


def test_a_run_is_sent(train, wandb, tmp_path):
    train(*WORDS, "--save", tmp_path, "--log-interval", 2, "--eval-interval", 4)
    (begun,) = wandb.begun
    assert {name: begun[name] for name in ("project", "name", "entity")} == {
        "project": "numbers",
        "name": "tiny",
        "entity": "us",
    }
    assert begun["dir"] == str(tmp_path / "wandb")
    assert Path(begun["dir"]).is_dir()
    assert (begun["config"]["hidden_size"], begun["config"]["lr"]) == (32, 0.01)
    json.dumps(begun["config"])
    steps = [step for step, _ in wandb.logged]
    assert steps == sorted(steps), "it drops what comes late"
    losses = {step: numbers["lm loss"] for step, numbers in wandb.logged if "lm loss" in numbers}
    rows = tiny.rows(tmp_path / "metrics.jsonl")
    assert losses == dict(enumerate((loss for row in rows for loss in row["losses"]), 1))
    sent = {name: value for step, numbers in wandb.logged if step == 6 for name, value in numbers.items()}
    assert {
        "learning-rate",
        "grad-norm",
        "loss-scale",
        "tokens-per-second",
    } <= sent.keys()  # upstream's names
    (last,) = (row for row in tiny.rows(tmp_path / "metrics.jsonl", "validation") if row["iteration"] == 6)
    assert sent["lm loss validation"] == last["loss"]
    assert wandb.ended == [0]


def test_a_run_that_fails_has_failed_there(train, wandb, tmp_path):
    def fail(iteration, model):
        raise OSError("no further")

    with pytest.raises(OSError, match="no further"):
        train(*WORDS, "--wandb-save-dir", tmp_path / "mine", on_gradients=fail)
    assert wandb.begun[0]["dir"] == str(tmp_path / "mine")
    assert wandb.ended == [1]


def test_what_it_cannot_do_is_one_line(train, wandb, tmp_path):
    def refuse(**keywords):
        raise RuntimeError("api_key not configured\n(no-tty)")

    wandb.init = refuse
    with pytest.raises(UsageError, match=r"api_key not configured \(no-tty\).*WANDB_MODE=offline"):
        train(*WORDS, "--save", tmp_path)


def test_a_server_that_the_working_directory_names_is_said_or_refused(wandb, tmp_path, monkeypatch, capsys):
    """The package reads wandb/settings there, and sends the account's key to the server that it names."""
    settings = tmp_path / "wandb" / "settings"
    settings.parent.mkdir(mode=0o755)
    settings.write_text("[default]\nbase_url = http://elsewhere\n")
    settings.chmod(0o644)
    monkeypatch.chdir(tmp_path)
    flags = LogFlags(rank=0, train_iters=1, wandb=WandbFlags("p", None, None, str(tmp_path), Namespace()))
    log.Log(flags, 0)
    assert "the server is http://elsewhere (wandb/settings)" in capsys.readouterr().out
    settings.chmod(0o646)
    with pytest.raises(UsageError, match=r"wandb/settings in .* can be written by anyone.*another server"):
        log.Log(flags, 0)
    settings.chmod(0o644)
    os.chown(settings, 12345, -1) if os.geteuid() == 0 else monkeypatch.setattr(os, "geteuid", lambda: 12345)
    with pytest.raises(UsageError, match="belongs to user"):
        log.Log(flags, 0)
    assert len(wandb.begun) == 1


def test_other_ranks_have_none(wandb):
    place = WandbFlags("p", None, None, "", Namespace())
    log.Log(LogFlags(rank=1, train_iters=1, world_size=2, wandb=place), 0)
    assert not wandb.begun


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"wandb_project": ""}, "--wandb-exp-name requires --wandb-project"),
        ({"save": None}, "--save or --wandb-save-dir"),
    ],
)
def test_half_of_it_is_refused(wandb, changes, named):
    values = {"wandb_project": "p", "wandb_exp_name": "n", "wandb_save_dir": None, "wandb_entity": None}
    with pytest.raises(UsageError, match=named):
        logs_and_checkpoints.wandb(Namespace(**(values | {"save": "here"} | changes)))


def test_where_it_is_absent_one_line_says_so(monkeypatch, flags):
    monkeypatch.setattr(logs_and_checkpoints, "is_installed", lambda name: name != "wandb")
    args = arguments.parse(flags("--wandb-project", "p", "--save", "here"))
    with pytest.raises(UsageError, match=r"wandb package, which is not installed.*pip install wandb"):
        logs_and_checkpoints.wandb(args)


def test_nothing_of_it_is_imported_unasked(train, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "wandb", None)  # an import is an error
    # of a script's unset variables: Megatron's own scripts log nothing, too
    unset = ("--wandb-project", "", "--wandb-exp-name", "", "--wandb-save-dir", "", "--wandb-entity", "")
    assert train("--no-plot", "--train-iters", 1, "--eval-iters", 0, *unset).iterations == 1


def test_the_real_package_keeps_a_run(flags, tmp_path):
    """Offline: the file that it would send has the flags and the losses."""
    pytest.importorskip("megatron.core")
    if not is_installed("wandb"):
        pytest.skip("wandb is not installed")
    environment = {"WANDB_MODE": "offline", "WANDB_SILENT": "true", "WANDB_ERROR_REPORTING": "false"}
    words = (*WORDS, "--wandb-save-dir", str(tmp_path), "--train-iters", "2", "--eval-iters", "0")
    command = tiny.command("pretrain", *flags(*words))
    done = tiny.run_python(command, {**os.environ, **tiny.environment(), **environment})
    assert done.returncode == 0, done.stderr[-3000:]
    (kept,) = tmp_path.glob("wandb/offline-run-*/run-*.wandb")
    content = kept.read_bytes()
    for word in (b"lm loss", b"learning-rate", b"hidden_size", b"numbers"):
        assert word in content


def test_a_run_outlives_the_packages_service(flags, tmp_path):
    """Its service is killed in the middle of a run: one line, and no traceback at the end."""
    if not is_installed("wandb"):
        pytest.skip("wandb is not installed")
    offline = {"WANDB_MODE": "offline", "WANDB_SILENT": "true", "WANDB_ERROR_REPORTING": "false"}
    words = (*WORDS, "--save", str(tmp_path), "--train-iters", "100000", "--exit-signal-handler")
    command = tiny.command("pretrain", *flags(*words, "--eval-iters", "0"))
    with (
        open(tmp_path / "said", "w+") as said,
        subprocess.Popen(command, env=tiny.environment() | offline, stdout=said, stderr=said) as process,
    ):
        try:
            rows = tmp_path / "metrics.jsonl"
            wait_until(lambda: rows.exists() and '"iteration": 3' in rows.read_text(), process)
            (service,) = psutil.Process(process.pid).children()
            service.kill()
            wait_until(lambda: "Weights & Biases failed" in (tmp_path / "said").read_text(), process)
            seen = len(rows.read_text().splitlines())
            wait_until(lambda: len(rows.read_text().splitlines()) > seen + 1, process)
            process.send_signal(signal.SIGTERM)
            assert process.wait(LONGEST) == 0
        finally:
            process.kill()
    told = (tmp_path / "said").read_text()
    assert told.count("Weights & Biases failed; the run continues without it: ") == 1
    assert "Traceback" not in told
    assert json.loads((tmp_path / "summary.json").read_text())["ended_by"] == "signal"


def test_a_service_that_does_not_answer_is_killed(train, wandb, tmp_path, capsys, monkeypatch):
    """It is stopped: what is sent to it waits, and at the end of Python the package waits without limit."""
    services = []

    def begin(**_: Any) -> Fake:
        services.append(subprocess.Popen(["sleep", "1000"]))
        return wandb

    def wait(*_: Any, **__: Any) -> None:
        services[0].wait()
        raise ConnectionResetError("Connection lost")

    monkeypatch.setattr(wandb, "init", begin)
    monkeypatch.setattr(wandb, "log", wait)
    monkeypatch.setattr(wandb_run, "_GRACE", 0.2)
    assert train(*WORDS, "--save", tmp_path).ended_by == "iterations"
    assert services[0].returncode == -signal.SIGKILL
    assert capsys.readouterr().out.count("the run continues without it: ConnectionResetError") == 1


def test_a_run_outlives_a_package_that_fails(train, wandb, tmp_path, capsys, monkeypatch):
    def fail(*_: Any, **__: Any) -> None:
        raise BrokenPipeError(32, "its service\nhas ended")

    monkeypatch.setattr(wandb, "log", fail)
    monkeypatch.setattr(wandb, "finish", fail)
    assert train(*WORDS, "--save", tmp_path).ended_by == "iterations"
    told = capsys.readouterr().out
    assert told.count("Weights & Biases failed; the run continues without it: BrokenPipeError") == 1
