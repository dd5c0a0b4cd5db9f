"""Checks of the files and sizes of a stock script: what they refuse, and what they leave to upstream."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import pytest

from megatron_npu.adaptors.megatron_core.options import input_checks
from megatron_npu.base.errors import UsageError

SIZES = {"micro_batch_size": 2, "global_batch_size": 6, "world_size": 2, "tensor_model_parallel_size": 1}


@pytest.mark.parametrize(
    ("changes", "refused"),
    [
        ({}, True),
        ({"global_batch_size": 8}, False),
        ({"tensor_model_parallel_size": 2}, False),  # one data-parallel rank: 6 is a multiple of 2
        ({"context_parallel_size": 2, "global_batch_size": 5}, True),
        ({"rampup_batch_size": ["2", "2", "8"]}, False),
        ({"decrease_batch_size_if_needed": True}, False),
        ({"global_batch_size": None}, False),
        ({"tensor_model_parallel_size": 4}, False),  # upstream names the layout
    ],
)
def test_batches_are_whole_steps(changes: dict[str, Any], refused: bool) -> None:
    args = argparse.Namespace(**SIZES | changes)
    if refused:
        with pytest.raises(UsageError, match=r"^--global-batch-size must be a multiple of .*Pass --global-"):
            input_checks.refuse_uneven_batches(args)
    else:
        input_checks.refuse_uneven_batches(args)


def test_heads_divide_the_hidden_size_unless_their_size_is_given() -> None:
    with pytest.raises(UsageError, match="--hidden-size must be a multiple of --num-attention-heads 3"):
        input_checks.refuse_uneven_heads(argparse.Namespace(hidden_size=64, num_attention_heads=3))
    input_checks.refuse_uneven_heads(
        argparse.Namespace(hidden_size=64, num_attention_heads=3, kv_channels=16)
    )


def test_data_is_a_prefix_of_two_files(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr("sys.argv", ["Megatron-LM/pretrain_gpt.py"])
    prefix = tmp_path / "text"
    (tmp_path / "text.bin").touch()
    args = argparse.Namespace(data_path=["0.5", str(prefix), "0.5", "s3://bucket/text"], mock_data=False)
    with pytest.raises(UsageError, match=r"--data-path .*text: .*text\.idx cannot be found"):
        input_checks.refuse_missing_files(args)
    monkeypatch.setenv("RANK", "1")  # another rank may be on a machine that has no data
    input_checks.refuse_missing_files(args)
    monkeypatch.setenv("RANK", "0")
    (tmp_path / "text.idx").touch()
    input_checks.refuse_missing_files(args)
    args.data_path = [str(tmp_path)]  # a folder is the data of another script
    input_checks.refuse_missing_files(args)
    monkeypatch.setattr("sys.argv", ["own_program.py"])
    args.data_path = ["none"]  # of a program that makes its own
    input_checks.refuse_missing_files(args)
