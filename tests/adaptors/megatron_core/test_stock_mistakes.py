"""Mistakes in the command line of the stock pretrain_gpt.py of core_v0.16.1, which end in one line."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.conftest import checkout
from tests.support.stock_core import FLAGS, run_script

GPT2 = "--tokenizer-type GPT2BPETokenizer --legacy-tokenizer --merge-file none.txt --vocab-file none.json"


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        (GPT2, "--vocab-file none.json does not exist. Correct the path."),
        ("--data-path data/text", "--data-path data/text: data/text.bin and data/text.idx cannot be found"),
        (
            "--mock-data --global-batch-size 5",
            "--global-batch-size must be a multiple of --micro-batch-size 2",
        ),
        (
            "--mock-data --num-attention-heads 3",
            "--hidden-size must be a multiple of --num-attention-heads 3",
        ),
    ],
)
def test_a_mistake_is_told_in_one_line(changes: str, told: str, tmp_path: Path) -> None:
    pytest.importorskip("megatron.core")
    tree = checkout("megatron_core", "0.16.1")
    done = run_script(tree, tmp_path, "pretrain_gpt.py", *FLAGS, *changes.split())
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr
    assert f"megatron-npu run: error: {told}" in done.stderr


@pytest.mark.parametrize("save", [False, True])
def test_an_invalid_loss_without_save_ends_in_one_line(save: bool, tmp_path: Path) -> None:
    """Upstream saves the state to examine it: to the folder None, where --save is absent."""
    pytest.importorskip("megatron.core")
    tree = checkout("megatron_core", "0.16.1")
    flags = ["--mock-data", *FLAGS, "--lr", "1e30", "--min-lr", "1e30", "--clip-grad", "0"]
    saving = ["--save", str(tmp_path / "saved"), "--save-interval", "100"] if save else []
    done = run_script(tree, tmp_path, "pretrain_gpt.py", *flags, *saving)
    line = "error: the loss or a gradient of iteration 2 is invalid (nan), so Megatron ends the run"
    if save:
        assert done.returncode == 16, done.stderr[-3000:]  # upstream's code: resume to examine it
        assert (tmp_path / "saved" / "latest_checkpointed_iteration.txt").is_file()
        assert line not in done.stderr
    else:
        assert done.returncode == 1, done.stderr[-3000:]
        assert "Traceback" not in done.stderr
        assert "TypeError" not in done.stderr
        last = done.stderr.strip().splitlines()[-1]
        assert line in last
        assert "the state was not saved, because --save was not given. Add --save DIR" in last
