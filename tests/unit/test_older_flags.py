"""Flags that documents of older Megatrons name: said, translated, or refused by name."""

from __future__ import annotations

import argparse

import pytest

from megatron_npu.base.errors import UsageError
from megatron_npu.options import older_flags


def parsed(*words: str) -> argparse.Namespace:
    """Return what a parser that knows some flags of today makes of a command line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--recompute-granularity")
    parser.add_argument("--recompute-method")
    parser.add_argument("--recompute-num-layers", type=int)
    parser.add_argument("--norm-epsilon", type=float, default=1e-5)
    parser.add_argument("--batch-size", type=int)  # megatron-core has it, to refuse it
    older_flags.add(parser)
    args = parser.parse_args(words)
    older_flags.apply(args, words)
    return args


def test_nothing_is_said_where_nothing_older_is_given(capsys) -> None:
    parsed("--recompute-granularity", "full")
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    "words",
    [
        "--data-impl mmap",
        "--data-impl infer",
        "--mmap-warmup",
        "--distributed-backend nccl",
        "--distributed-backend=nccl",
        "--DDP-impl local",
    ],
)
def test_what_is_harmless_is_one_line(words: str, capsys) -> None:
    parsed(*words.split())
    said = capsys.readouterr().out
    assert said.startswith(
        f"megatron_npu: {words.replace('=', ' ')}, a flag from older versions of Megatron, "
    )
    assert said.count("\n") == 1


def test_only_rank_0_says_it(capsys, monkeypatch) -> None:
    monkeypatch.setenv("RANK", "1")
    parsed("--mmap-warmup")
    assert capsys.readouterr().out == ""


def test_checkpointed_activations_are_recomputed_layers() -> None:
    args = parsed("--checkpoint-activations")
    assert (args.recompute_granularity, args.recompute_method, args.recompute_num_layers) == (
        "full",
        "uniform",
        1,
    )
    args = parsed("--checkpoint-activations", "--checkpoint-num-layers", "2", "--recompute-method", "block")
    assert (args.recompute_method, args.recompute_num_layers) == ("block", 2)


def test_a_flag_of_today_that_says_another_thing_is_a_contradiction() -> None:
    with pytest.raises(
        UsageError, match="--checkpoint-activations conflicts with --recompute-granularity selective"
    ):
        parsed("--checkpoint-activations", "--recompute-granularity", "selective")


def test_a_renamed_flag_sets_the_new_one() -> None:
    assert parsed("--layernorm-epsilon", "1e-6").norm_epsilon == 1e-6
    assert parsed("--layernorm-epsilon", "0").norm_epsilon == 0.0


@pytest.mark.parametrize(
    ("words", "remedy"),
    [
        ("--data-impl raw", "Remove the flag"),
        ("--DDP-impl torch", "Remove the flag"),
        ("--distributed-backend mpi", "the device determines the backend"),
        ("--batch-size 8", "--micro-batch-size"),
        ("--batch-size 0", "--micro-batch-size"),
        ("--warmup 0.01", "--lr-warmup-fraction"),
        ("--warmup 0", "--lr-warmup-fraction"),
        ("--model-parallel-size 2", "--tensor-model-parallel-size"),
    ],
)
def test_another_meaning_is_refused_by_name(words: str, remedy: str) -> None:
    with pytest.raises(UsageError) as refused:
        parsed(*words.split())
    flag, value = words.split()
    assert str(refused.value).startswith(flag)
    assert value in str(refused.value)
    assert remedy in str(refused.value)
