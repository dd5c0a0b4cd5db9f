"""The stock pretrain_gpt.py of core_v0.16.1 on simulated Ascend NPUs: the loss curve of one CPU process."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.conftest import checkout
from tests.end_to_end import tiny
from tests.hosts.megatron_core.test_stock_scripts import FLAGS, git_status, losses, pretrain
from tests.sim.conftest import run_simulated, unavailable

LIMIT = 1e-4  # relative, fp32


@pytest.fixture(scope="module")
def tree() -> Path:
    pytest.importorskip("megatron.core")
    if unavailable():
        pytest.skip(unavailable())
    return checkout("megatron_core", "0.16.1")


@pytest.fixture(scope="module")
def start(tree: Path, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The flags that begin with the weights of a checkpoint: devices draw different initial ones."""
    folder = tmp_path_factory.mktemp("start")
    save = ["--save", str(folder), "--save-interval", "1", "--exit-interval", "1"]
    losses(pretrain(tree, folder, *save))
    return ["--load", str(folder), "--finetune", "--no-load-optim", "--no-load-rng"]


@pytest.fixture(scope="module")
def on_cpu(tree: Path, start: list[str], tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    return losses(pretrain(tree, tmp_path_factory.mktemp("cpu"), *start))


def on_npu(tree: Path, *changes: str, processes: int = 1) -> subprocess.CompletedProcess[str]:
    before = git_status(tree)
    command = tiny.command("run", str(tree / "pretrain_gpt.py"), *FLAGS, *changes, processes=processes)
    done = run_simulated(*command, MEGATRON_LM_PATH=str(tree))
    assert git_status(tree) == before
    return subprocess.CompletedProcess(done.args, done.returncode, done.stdout, done.stdout)


@pytest.mark.parametrize(
    ("processes", "changes"),
    [
        (1, []),
        (2, ["--tensor-model-parallel-size", "2", "--sequence-parallel", "--use-distributed-optimizer"]),
    ],
)
def test_the_curve_is_that_of_the_cpu(tree, start, on_cpu, processes, changes) -> None:
    done = on_npu(tree, *start, *changes, processes=processes)
    assert losses(done) == pytest.approx(on_cpu, rel=LIMIT)
    assert "npu/hccl" in done.stdout
