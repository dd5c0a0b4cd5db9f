"""Megatron-LM's own pretrain_gpt.py at core_v0.16.1 and core_v0.12.1, unedited, as a user starts it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_npu.checkpoint_files import checksums
from tests.conftest import ROOT, checkout
from tests.support import private, processes, tiny, warm
from tests.support.stock_core import FLAGS, final_loss, losses, norms, pretrain


@pytest.fixture(scope="module")
def tree() -> Path:
    pytest.importorskip("megatron.core")
    return checkout("megatron_core", "0.16.1")


@pytest.fixture(scope="module")
def single(tree: Path, tmp_path_factory: pytest.TempPathFactory) -> subprocess.CompletedProcess[str]:
    return pretrain(tree, tmp_path_factory.mktemp("single"))


def test_it_trains(single) -> None:
    curve = losses(single)
    assert len(curve) == 6
    assert curve[-1] < curve[0] - 0.05
    assert "test set | lm loss value" in single.stdout


def test_it_says_that_transformer_engine_is_not_there(single) -> None:
    assert "transformer_engine falls back: it is not installed" in single.stdout
    assert re.search(r"^megatron_npu .* fallbacks: transformer_engine$", single.stdout, re.MULTILINE)


def test_strict_mode_refuses_that(tree: Path, tmp_path: Path) -> None:
    done = pretrain(tree, tmp_path, MEGATRON_NPU_STRICT="1")
    assert done.returncode != 0
    assert "MEGATRON_NPU_STRICT=1" in done.stderr


@pytest.mark.parametrize(
    ("changes", "tolerance"),
    [
        (["--use-distributed-optimizer"], 1e-5),
        (["--bf16", "--use-distributed-optimizer", "--overlap-grad-reduce"], 1e-2),
    ],
)
def test_data_parallel_equals_one_process(tree: Path, tmp_path: Path, single, changes, tolerance) -> None:
    done = pretrain(tree, tmp_path, *changes, processes=2)
    assert losses(done) == pytest.approx(losses(single), rel=tolerance)


def test_expert_parallel_equals_one_process(tree: Path, tmp_path: Path) -> None:
    experts = "--num-experts 4 --moe-router-topk 2 --swiglu --disable-bias-linear".split()
    alone = losses(pretrain(tree, tmp_path, *experts))
    assert alone[-1] < alone[0] - 0.03
    spread = losses(pretrain(tree, tmp_path, *experts, "--expert-model-parallel-size", "2", processes=2))
    assert spread == pytest.approx(alone, rel=1e-3)  # the experts' initial weights are other draws


def test_the_flags_of_the_fused_attention(tree: Path, tmp_path: Path, single) -> None:
    every = losses(pretrain(tree, tmp_path, "--pre-tockens", "64", "--next-tockens", "0"))
    assert every == pytest.approx(losses(single), rel=1e-6)
    few = losses(pretrain(tree, tmp_path, "--pre-tokens", "4", "--next-tokens", "0", "--shape-order", "BSH"))
    assert few != pytest.approx(losses(single), rel=1e-4)


def test_it_goes_on_from_its_checkpoint(tree: Path, tmp_path: Path, single) -> None:
    """The last iterations from a checkpoint of the first are those of one run, with asynchronous writers.

    Those are spawned, and find the plug-in though it may only be on the path. 0.16.1 logs the second
    iteration of a process as the mean of its first two, so gradients are compared.
    """
    save = ["--save", str(tmp_path / "checkpoint"), "--save-interval", "4", "--async-save"]
    persistent = ["--use-persistent-ckpt-worker", "--ckpt-assume-constant-structure"]
    first = pretrain(tree, tmp_path, *save, *persistent, "--exit-interval", "4")
    rest = pretrain(tree, tmp_path, *save, "--load", str(tmp_path / "checkpoint"))
    assert norms(first) + norms(rest) == norms(single)
    assert losses(rest)[0] == losses(single)[4]
    assert final_loss(rest) == final_loss(single)
    places = [tmp_path / "checkpoint" / f"iter_000000{number}" for number in (4, 6)]
    assert all((place / checksums.NAME).is_file() and not checksums.damaged(place) for place in places)
    file = max(places[1].glob("*.distcp"), key=lambda path: path.stat().st_size)
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    refused = pretrain(tree, tmp_path, "--load", str(tmp_path / "checkpoint"))
    assert refused.returncode == 2
    assert (
        f"is damaged: {file.name} has different content from when it was saved"
        in refused.stderr.splitlines()[-1]
    )
    older = pretrain(tree, tmp_path, "--load", str(tmp_path / "checkpoint"), "--load-last-good")
    assert "damaged checkpoints of iterations 6; loading 4" in older.stdout
    assert norms(older) == norms(rest)


def test_the_oldest_tag_trains_and_goes_on(tmp_path: Path) -> None:
    pytest.importorskip("einops", reason="upstream's local attention of 0.12 needs einops")
    oldest = checkout("megatron_core", "0.12.1")
    # its mock data counts up to the end of document
    large = ["--vocab-size", "8191", "--use-distributed-optimizer"]
    whole = pretrain(oldest, tmp_path, *large)
    save = [*large, "--save", str(tmp_path / "checkpoint"), "--save-interval", "4", "--async-save"]
    first = pretrain(oldest, tmp_path, *save, "--exit-interval", "4")
    hurried = [*save, "--no-verify-checkpoint"]
    rest = pretrain(oldest, tmp_path, *hurried, "--load", str(tmp_path / "checkpoint"))
    with_checksums = [path.parent.name for path in (tmp_path / "checkpoint").rglob(checksums.NAME)]
    assert with_checksums == ["iter_0000004"]
    assert len(losses(whole)) == 6
    assert losses(first) + losses(rest) == losses(whole)
    assert final_loss(rest) == final_loss(whole)


def test_what_it_writes_is_private_without_any_command_of_ours(tree: Path, tmp_path: Path) -> None:
    """Checkpoint, curves and indices, whatever umask the shell has; asynchronous writers are spawned."""
    pytest.importorskip("tensorboard")
    data = tiny.write_dataset(tmp_path / "text")
    written = tmp_path / "written"
    places = {"--save": "checkpoint", "--tensorboard-dir": "board", "--data-cache-path": "cache"}
    flags = [*FLAGS, "--train-iters", "2", "--async-save", "--save-interval", "2", "--data-path", str(data)]
    flags += [word for flag, name in places.items() for word in (flag, str(written / name))]
    program = (
        "import runpy, sys, megatron_npu; sys.argv[:1] = []; runpy.run_path(sys.argv[0], run_name='__main__')"
    )
    done = warm.run(
        [sys.executable, "-c", program, str(tree / "pretrain_gpt.py"), *flags],
        env=tiny.environment() | {"MEGATRON_LM_PATH": str(tree), "PYTHONPATH": f"{tree}:{ROOT}"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        umask=0o022,
    )
    assert len(losses(done)) == 2
    private.assert_all(written.rglob("*"), "*.distcp", "events.out.*", "*.npy", "latest_checkpointed*")


def test_no_command_is_needed_where_the_package_is_installed(tree: Path, tmp_path: Path, single) -> None:
    """``python pretrain_gpt.py``: torch's entry point arms the hook."""
    from importlib.metadata import entry_points

    if not [point for point in entry_points(group="torch.backends") if point.name == "megatron_npu"]:
        pytest.skip("megatron_npu is on the path but not installed: torch finds no entry point")
    done = processes.run(
        [sys.executable, tree / "pretrain_gpt.py", "--mock-data", *FLAGS],
        env=tiny.environment() | {"MEGATRON_LM_PATH": str(tree), "MEGATRON_NPU_AUTOLOAD": "1"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert losses(done) == losses(single)
    assert os.listdir(tmp_path) == []
