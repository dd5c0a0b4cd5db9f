"""One declaration a flag: what two commands spell alike is the same flag, or the reason is here."""

from __future__ import annotations

import argparse
import ast
from collections import defaultdict
from collections.abc import Iterator

from megatron_npu.conversion.command import parser as convert
from megatron_npu.data.preprocessing.command import parser as preprocess
from megatron_npu.evaluation.lambada import parser as lambada
from megatron_npu.finetune.run.arguments import parser as train
from megatron_npu.generation.generate import parser as generate
from megatron_npu.measuring.arguments import parser as bench
from megatron_npu.options.shared_flags import _SHARED
from megatron_npu.pretrain.flags.arguments import parser as pretrain
from megatron_npu.pretrain.report.dashboard.command import parser as dashboard
from megatron_npu.serving.command import parser as serve
from tests.conftest import ROOT

PARSERS = {
    "pretrain": pretrain,
    "train": train,
    "generate": generate,
    "serve": serve,
    "lambada": lambada,
    "bench": bench,
    "convert": convert,
    "preprocess": preprocess,
    "dashboard": dashboard,
}

_CHECKED = "train's parser checks the number, pretrain's checks say what else it has to fit"
_SHOWN = "the same, and each command says what it does with it"
_MODEL = "pretrain makes the model, train may change it; a reader compares it with the checkpoint's"
_TOKENIZER = "the same files; a reader takes the checkpoint's, and says so"
_SIZE = "each command's own default: what it was measured to fit"
# Flags that two commands spell alike and say different things of, and why.
DIFFERENT = {
    "--adam-eps": _CHECKED,
    "--append-eod": "a document of .bin and .idx, or a text of a task",
    "--bf16": "a training's precision, or that of reading a checkpoint",
    "--ckpt-format": "convert writes a second format, which pretrain only reads",
    "--clip-grad": _CHECKED,
    "--data-impl": "an older flag to pretrain; train reads mmap, or asks the files",
    "--data-path": "train takes data sets of the hub and files of rows, too",
    "--epochs": "pretrain has no other end beside it, train has",
    "--eval-interval": "train evaluates after each epoch",
    "--eval-iters": "train has it for --task pretraining alone",
    "--fp16": "a training's precision, or that of reading a checkpoint",
    "--global-batch-size": _SHOWN,
    "--hidden-size": _MODEL,
    "--load": "a run goes on from it if there is one; a reader needs one",
    "--log-interval": "defaults of Megatron's and of Rapidformer's scripts; of documents to preprocess",
    "--lr": _CHECKED + "; a task has a default, as in Rapidformer",
    "--lr-decay-style": "train has those of Transformers",
    "--lr-warmup-fraction": _CHECKED,
    "--lr-warmup-iters": "pretrain's begins at --lr-warmup-init",
    "--make-vocab-size-divisible-by": "convert has no ranks",
    "--max-position-embeddings": _MODEL,
    "--merge-file": _TOKENIZER,
    "--micro-batch-size": _SIZE,
    "--min-lr": _CHECKED,
    "--mixed-precision": "to bench the word is a row of a table, not a switch",
    "--mmap-warmup": "an older flag to pretrain",
    "--no-plot": "drawn again while pretrain runs",
    "--num-attention-heads": _MODEL,
    "--num-layers": _MODEL,
    "--num-workers": "pretrain's default is the device's",
    "--pipeline-model-parallel-size": "a reader's default is the checkpoint's own",
    "--plot": "drawn again while pretrain runs; bench takes the file's name",
    "--port": "serve has a port that clients know, a dashboard takes any free one",
    "--save": _SHOWN,
    "--seed": "pretrain takes what Megatron's scripts take, numpy less; generate draws with seed + i",
    "--seq-length": _MODEL,
    "--shape-order": "lambada's is the checkpoint's",
    "--split": "pretrain tells --split from --train-data-path by its absence",
    "--tensor-model-parallel-size": "a reader's default is the checkpoint's own",
    "--tokenizer-type": _TOKENIZER,
    "--train-iters": "0 makes a checkpoint of pretrain, and nothing of train",
    "--vocab-file": _TOKENIZER,
    "--vocab-size": "bench's is that of a model without a tokenizer",
    "--weight-decay": _CHECKED,
}


def actions() -> dict[str, dict[str, argparse.Action]]:
    """Return for each spelling of a flag the commands that have it, with what they say of it."""
    found: dict[str, dict[str, argparse.Action]] = defaultdict(dict)
    for command, parser in PARSERS.items():
        for action in parser()._actions:
            for spelling in set(action.option_strings) - {"-h", "--help"}:
                found[spelling][command] = action
    return found


def said(action: argparse.Action) -> tuple[object, ...]:
    """Return all that a declaration says of a flag."""
    names = "dest nargs const default type choices required metavar help".split()
    return type(action), *(getattr(action, name) for name in names)


def declared() -> Iterator[tuple[str, str]]:
    """Yield each flag that ``add`` or ``add_argument`` is given by name for a command, and the file."""
    package = ROOT / "megatron_npu"
    for file in package.rglob("*.py"):
        name = file.relative_to(package).as_posix()
        if name.startswith("adaptors/"):  # which add flags to Megatron's parsers
            continue
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            called = getattr(node, "func", None)
            if getattr(called, "attr", getattr(called, "id", "")) in ("add", "add_argument"):
                yield from ((flag, name) for flag in _flags(node))


def _flags(call: ast.Call) -> Iterator[str]:
    for word in (each for argument in call.args for each in ast.walk(argument)):
        if isinstance(word, ast.Constant) and str(word.value).startswith("--"):
            yield word.value


def test_a_flag_of_two_commands_is_one_flag_or_the_reason_is_here():
    different = {
        spelling
        for spelling, commands in actions().items()
        if len({repr(said(action)) for action in commands.values()}) > 1
    }
    assert different == DIFFERENT.keys()


def test_what_is_shared_is_declared_nowhere_else():
    of_commands = ("pretrain/flags/arguments.py", "finetune/run/arguments.py", "evaluation/lambada.py")
    again = {(flag, file) for flag, file in declared() if flag in _SHARED and file in of_commands}
    assert not again


def test_what_two_commands_say_alike_has_one_declaration():
    files: dict[str, set[str]] = defaultdict(set)
    for flag, file in declared():
        files[flag].add(file)
    shared = {spelling for spelling, commands in actions().items() if len(commands) > 1}
    twice = {flag for flag in shared if len(files[flag]) + (flag in _SHARED) > 1}
    assert len(shared) > 60
    assert twice <= DIFFERENT.keys()


def test_every_shared_flag_is_of_two_commands():
    found = actions()
    assert {flag for flag in _SHARED if len(found[flag]) < 2} == set()
