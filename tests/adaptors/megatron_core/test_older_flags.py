"""Command lines of older documents under the stock scripts of megatron-core, and under the driver."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.conftest import checkout
from tests.support import tiny
from tests.support.stock_core import losses, pretrain

OLDER = "--data-impl mmap --distributed-backend nccl --checkpoint-activations --mmap-warmup".split()
SAID = ("--data-impl mmap", "--distributed-backend nccl", "--checkpoint-activations", "--mmap-warmup")


def assert_said(output: str) -> None:
    """Each flag is explained in one line."""
    for flag in SAID:
        assert output.count(f"megatron_npu: {flag}, a flag from older versions of Megatron, ") == 1, flag


@pytest.mark.parametrize("version", ["0.12.1", "0.16.1"])
def test_the_stock_script_takes_them(version: str, tmp_path: Path) -> None:
    vocabulary = ["--vocab-size", "8191"]  # mock data of 0.12 counts up to the end of document
    done = pretrain(checkout("megatron_core", version), tmp_path, *OLDER, *vocabulary, "--train-iters", "2")
    assert len(losses(done)) == 2
    assert_said(done.stdout)
    assert "recompute_granularity ........................... full" in done.stdout


def test_the_stock_script_refuses_a_retired_one(tmp_path: Path) -> None:
    done = pretrain(checkout("megatron_core", "0.16.1"), tmp_path, "--warmup", "5")
    assert done.returncode == 2
    assert "--warmup 5, a flag from older versions of Megatron" in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr


def test_the_driver_takes_them(tmp_path: Path) -> None:
    pytest.importorskip("megatron.core")
    flags = tiny.flags_for(tiny.write_dataset(tmp_path / "text"))
    done = tiny.run("pretrain", *flags, *OLDER, "--train-iters", "2")
    assert done.returncode == 0, done.stderr
    assert_said(done.stdout)


def test_the_driver_refuses_a_retired_one(tmp_path: Path) -> None:
    done = tiny.run("pretrain", *tiny.flags_for(tmp_path / "none"), "--batch-size", "4")
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert "--batch-size 4, a flag from older versions of Megatron" in line
