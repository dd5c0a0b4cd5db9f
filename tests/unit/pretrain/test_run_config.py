"""--config and --preset of pretrain: what a file may hold, and that the command line wins."""

from __future__ import annotations

import argparse

import pytest

from megatron_npu.base.errors import UsageError
from megatron_npu.pretrain.flags import arguments, run_config

FILE = """\
# a small run
preset: gpt2-124m
num-layers: 2   # not 12
micro_batch_size: 4
train-iters: 10
bf16: true
swiglu: false
lr: 1e-3
data-path: ["data/a b", data/c]
override-opt_param-scheduler: true
"""


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text(FILE)
    return path


def test_a_file_gives_flags_and_the_command_line_wins(file):
    args = arguments.parse(["--config", str(file), "--num-layers", "3"])
    assert (args.num_layers, args.hidden_size, args.micro_batch_size) == (3, 768, 4)
    assert (args.bf16, args.swiglu, args.lr) == (True, False, 1e-3)
    assert args.data_path == ["data/a b", "data/c"]
    assert args.override_opt_param_scheduler
    assert not hasattr(args, "config")
    assert arguments.parse([f"--config={file}"]).num_layers == 2


def test_a_preset_of_the_command_line_wins_over_the_files(file):
    assert arguments.parse(["--preset", "gpt2-345m", "--config", str(file)]).hidden_size == 1024


@pytest.mark.parametrize("name", run_config.PRESETS)
def test_every_preset_is_a_whole_shape(name):
    args = arguments.parse(["--preset", name, "--micro-batch-size", "1", "--train-iters", "1"])
    assert args.hidden_size % args.num_attention_heads == 0
    assert args.seq_length <= args.max_position_embeddings


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("num-layer: 2", r"line 1: unknown flag num-layer\. Did you mean --num-layers"),
        ("lr: 1e-3\nlr: 2e-3", r"line 2: --lr is set twice"),
        ("bf16: yes", r"line 1: --bf16 is a switch and must be true or false, but is set to yes"),
        ("model:\n  num-layers: 2", r"line 1 must have the form `flag: value`, but is model:"),
        ("lr: {a: 1}", r"line 1: the value must be a plain value .* but is \{a: 1\}"),
        ("data-path: [a,", r"line 1: the list must begin and end on the same line.* but is \[a,"),
        ("config: other.yaml", r"line 1: unknown flag config"),
        ("save: a\0b", r"line 1 contains a null byte"),
        ("just words", r"line 1 must have the form `flag: value`, but is just words"),
    ],
)
def test_a_line_that_is_no_flag_is_named(tmp_path, text, told):
    path = tmp_path / "run.yaml"
    path.write_text(text)
    with pytest.raises(UsageError, match=told):
        arguments.parse(["--config", str(path)])


def test_a_value_of_the_wrong_kind_is_told_as_on_the_command_line(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text("num-layers: many")
    with pytest.raises(UsageError, match=r"^--num-layers must be a positive integer, but got many"):
        arguments.parse(["--config", str(path)])


@pytest.mark.parametrize(
    ("argv", "told"),
    [
        (["--config", "no-such.yaml"], r"--config no-such\.yaml cannot be read as a YAML file"),
        (["--config"], r"--config requires a value"),
        (["--preset", "--bf16"], r"--preset requires a value: gpt2-124m, "),
        (["--preset", "gpt5"], r"--preset must be gpt2-124m, .* but got gpt5"),
    ],
)
def test_what_is_missing_is_said(argv, told):
    with pytest.raises(UsageError, match=told):
        arguments.parse(argv)


WORDS = (
    "--preset llama-1b --num-layers 2 --micro-batch-size 4 --train-iters 10 --lr 2.5e-05 --bf16 "
    "--no-check-for-nan-in-loss-and-grad --no-use-cpu-initialization --save checkpoints/x "
    "--recompute-granularity selective --recompute-modules mlp layernorm --iterations-to-skip 3 4"
).split()


@pytest.mark.parametrize(
    "prompts", [["a, b # c", '"quoted"'], ["it's"], [""]], ids=["marks", "apostrophe", "empty"]
)
def test_what_a_run_saves_gives_the_same_flags(prompts, tmp_path):
    typed = arguments.parse([*WORDS, "--sample-prompt", *prompts])
    resolved = argparse.Namespace(**(vars(typed) | {"kv_channels": 64, "use_cpu_initialization": False}))
    (tmp_path / "config.yaml").write_text(run_config.text_of(typed, resolved, arguments.parser()))
    assert vars(arguments.parse(["--config", str(tmp_path / "config.yaml")])) == vars(typed)
    assert "\n# kv-channels: 64\n" in (tmp_path / "config.yaml").read_text()


def test_a_value_that_no_line_holds_is_named():
    typed = arguments.parse([*WORDS, "--sample-prompt", "two\nlines"])
    text = run_config.text_of(typed, typed, arguments.parser())
    assert "\n# sample-prompt: its value contains a line break" in text
