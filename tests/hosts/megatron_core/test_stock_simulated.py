"""The stock pretrain_gpt.py of core_v0.16.1 on simulated Ascend NPUs: the loss curve of one CPU process."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.conftest import checkout
from tests.hosts.megatron_core.stock import losses, pretrain
from tests.sim.conftest import unavailable

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


@pytest.mark.parametrize(
    ("processes", "changes"),
    [
        (1, []),
        (2, ["--tensor-model-parallel-size", "2", "--sequence-parallel", "--use-distributed-optimizer"]),
    ],
)
def test_the_curve_is_that_of_the_cpu(tree, tmp_path, start, on_cpu, processes, changes) -> None:
    done = pretrain(tree, tmp_path, *start, *changes, processes=processes, device="npu")
    assert losses(done) == pytest.approx(on_cpu, rel=LIMIT)
    assert "npu/hccl" in done.stdout
