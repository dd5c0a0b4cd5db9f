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
