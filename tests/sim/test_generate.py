"""Text of a checkpoint on simulated NPUs, two of which share the model: the CPU's text."""

from __future__ import annotations

import json
import sys

import pytest

from tests.support import tiny, warm
from tests.support.tiny_dataset import dataset

__all__ = ["dataset"]
pytest.importorskip("megatron.core")


def test_two_npus_draw_what_one_cpu_draws(simulated, dataset, tmp_path):
    trained = ["--train-iters", "20", "--eval-iters", "0", "--no-plot", "--save", str(tmp_path / "trained")]
    done = tiny.run("pretrain", *tiny.flags_for(dataset), *trained)
    assert done.returncode == 0, done.stderr
    line = ["generate", "--load", str(tmp_path / "trained"), "--num-samples", "2", "--out-seq-length", "12"]
    done = tiny.run(*line, "--genfile", str(tmp_path / "cpu"))
    assert done.returncode == 0, done.stderr
    launcher = [sys.executable, *tiny.torchrun(2), "-m", "megatron_npu"]
    line += ["--genfile", str(tmp_path / "npu")]
    found = simulated(*launcher, *line, modules=warm.DRIVER, MEGATRON_NPU_DEVICE="npu")
    assert found.returncode == 0, found.stdout
    assert "2 samples in" in found.stdout
    assert (tmp_path / "npu").read_text() == (tmp_path / "cpu").read_text()
    assert len(json.loads((tmp_path / "npu").read_text().splitlines()[0])["text"].split()) > 5
