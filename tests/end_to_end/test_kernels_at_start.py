"""Kernels are compiled once for a machine, when a run starts, and not inside of its first step."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from megatron_npu.adaptors.shared import start
from megatron_npu.ops.compiled import building
from tests.support import tiny, train_runs

SOURCE = "kernels.cpp"
TRAINED = """
import os
from pathlib import Path
import torch
from rapidformer import Finetuner, RapidformerEngine

class Mine(Finetuner):
    def train_valid_test_datasets_provider(self):
        return [torch.ones(2)] * 64, None, None, None
    def model_optimizer_lr_scheduler_provider(self):
        return torch.nn.Linear(2, 1), None, None
    def run_forward_step(self, batch, model):
        place = Path(os.environ["RUN"])
        place.mkdir(exist_ok=True)
        (place / "metrics.jsonl").touch()
        return model(batch).mean()

Mine(RapidformerEngine()).train()
"""


@pytest.fixture(scope="module")
def compiled(tmp_path_factory) -> Path:
    """A folder of what the compiler has made, by the words of its command."""
    return tmp_path_factory.mktemp("compiled")


@pytest.fixture
def compilations(tmp_path, monkeypatch, compiled) -> Path:
    """A file with a line for each compilation of kernels: whether the run told of its steps already.

    The cache of this user is empty. What has been compiled here before is copied, which nobody can tell.
    """
    compiler, log = shutil.which("g++"), tmp_path / "compilations"
    if compiler is None:
        pytest.skip("no g++")
    script = tmp_path / "bin" / "g++"
    script.parent.mkdir()
    script.write_text(
        f"""#!/bin/sh
case "$*" in *{SOURCE}*)
  if [ -e {tmp_path}/run/metrics.jsonl ]; then echo late; else echo early; fi >> {log}
  for target; do :; done  # the last word
  made={compiled}/$(printf %s "${{*%$target}}" | cksum | tr " " -)
  if ! [ -e "$made" ]; then {compiler} -O0 "$@" && cp "$target" "$made" || exit; fi
  exec cp "$made" "$target";;
esac
exec {compiler} -O0 "$@"
"""
    )
    script.chmod(0o755)
    monkeypatch.setenv("PATH", f"{script.parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    log.touch()
    return log


def test_one_rank_of_the_driver_compiles_before_the_first_step(dataset, tmp_path, compilations):
    flags = [*tiny.flags_for(dataset), "--save", str(tmp_path / "run"), "--bf16"]
    result = tiny.run("pretrain", *flags, processes=2)
    assert result.returncode == 0, result.stderr
    assert "not used" not in result.stderr
    assert (tmp_path / "run" / "metrics.jsonl").is_file()
    assert compilations.read_text().split() == ["early"]


def test_one_rank_of_train_compiles_before_the_first_step(tmp_path, compilations):
    script = tmp_path / "mine.py"
    script.write_text(TRAINED)
    result = train_runs.train(
        "--user-script", script, "--train-iters", 1, processes=2, RUN=str(tmp_path / "run")
    )
    assert result.returncode == 0, result.stderr
    assert (tmp_path / "run" / "metrics.jsonl").is_file()
    assert compilations.read_text().split() == ["early"]


def test_help_compiles_nothing(tmp_path, compilations):
    assert tiny.run("pretrain", "--help").returncode == 0
    assert not compilations.read_text()


def test_stock_scripts_compile_when_their_flags_are_read(monkeypatch):
    """``initialize_megatron`` reads them: ``--help`` ends there."""
    order: list[str] = []

    def end(*args: object) -> None:
        raise StopIteration

    monkeypatch.setattr(building, "prepare", lambda: order.append("kernels"))
    monkeypatch.setattr(start.watchdog, "begin", end)
    with pytest.raises(StopIteration):
        start.watch(lambda: None, lambda: order.append("flags"))
    assert order == ["flags", "kernels"]


@pytest.mark.parametrize("host", [True, False])
def test_kernels_are_prepared_where_they_are_used(monkeypatch, host):
    asked: list[bool] = []
    monkeypatch.setattr(building, "library", lambda: asked.append(True))
    monkeypatch.setattr(building.devices, "current", lambda: type("Device", (), {"is_host": host}))
    building.prepare()
    assert asked == [True] * host
