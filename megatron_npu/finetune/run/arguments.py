"""Declare the flags of ``megatron-npu train``, based on the PAI-Rapidformer document.

``parse`` parses and checks the flags, except for checks that require the data or the model. A user's script
gets the result from ``get_args()``.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from megatron_npu.base.arg_parser import Number, Parser, positive, whole
from megatron_npu.base.errors import UsageError
from megatron_npu.data.tokenization import flags
from megatron_npu.finetune import tasks
from megatron_npu.finetune.data import data_flags
from megatron_npu.finetune.run import ranks
from megatron_npu.finetune.run.layout import ModelParallel
from megatron_npu.options.shared_flags import add_shared
from megatron_npu.options.switches import add_switches
from megatron_npu.pretrain.flags.checks import logs_and_checkpoints

Add = Callable[..., Any]

_TOKENIZERS = (
    "HuggingFaceTokenizer",
    "BertWordPieceLowerCase",
    "BertWordPieceCase",
    "GPT2BPETokenizer",
    "NullTokenizer",
)
_DECAYS = ("linear", "cosine", "constant")
_fraction = Number("a number from 0 to 1", float, 0.0, 1.0, metavar="X")
_rate = Number("a non-negative number", float, 0.0, metavar="X")
_above_0 = Number("a positive number", float, math.nextafter(0.0, 1.0), metavar="X")

_USAGE = """%(prog)s --task TASK --pretrained-model-name-or-path NAME_OR_DIR --data-path PATH [FLAG...]
       %(prog)s --user-script FILE [FLAG...]"""
_DESCRIPTION = (
    "Train a Transformers model, or your own model, with accelerations that are each enabled by "
    "one flag. The command starts one process per device of this machine."
)


def parser() -> argparse.ArgumentParser:
    """Return the command's parser."""
    result = Parser("megatron-npu train", description=_DESCRIPTION, usage=_USAGE)
    for title, add_flags in _GROUPS:
        add_flags(result.add_argument_group(title).add_argument)
    add_switches(result)
    return result


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Parse the command line, and return the flags.

    The result includes ``dataset_path`` and ``dataset_name``, which the document's scripts read.

    ``with_ranks`` adds the values that depend on the process.

    Raises:
        UsageError: a flag is unknown or missing, a value has the wrong type, or two flags are mutually
            exclusive.
    """
    _refuse_blanks(argv)
    flags_of_train = parser()
    args = flags_of_train.parse_args(list(argv))
    _refuse_empty(args)
    _derive(args)
    _check(args)
    if args.user_script is None:
        data_flags.refuse_others(args, flags_of_train.get_default)
    logs_and_checkpoints.sinks(args)
    return args


def with_ranks(args: argparse.Namespace, place: ranks.Ranks) -> argparse.Namespace:
    """Return the flags with the ranks of this process, and with the sizes that follow from them.

    Raises:
        UsageError: the number of ranks does not divide the batch.
    """
    model_parallel = args.tensor_model_parallel_size * args.pipeline_model_parallel_size
    if place.world_size % model_parallel:
        raise UsageError(
            f"the number of processes must be a multiple of {model_parallel} with "
            f"--tensor-model-parallel-size {args.tensor_model_parallel_size} and "
            f"--pipeline-model-parallel-size {args.pipeline_model_parallel_size}, but it is "
            f"{place.world_size}. Change it with --nproc-per-node."
        )
    data_parallel = place.world_size // model_parallel
    together = args.micro_batch_size * data_parallel
    batch = together if args.global_batch_size is None else args.global_batch_size
    if batch % together:
        raise UsageError(
            f"--global-batch-size must be a multiple of --micro-batch-size {args.micro_batch_size} x "
            f"{data_parallel} data-parallel ranks = {together}, but got {batch}. "
            "Change one of the two flags, or the number of processes (--nproc-per-node)."
        )
    found = {
        "rank": place.rank,
        "local_rank": place.local_rank,
        "world_size": place.world_size,
        "data_parallel_size": data_parallel,
        "global_batch_size": batch,
        "num_microbatches": batch // together,
    }
    return argparse.Namespace(**{**vars(args), **found})


def _derive(args: argparse.Namespace) -> None:
    if args.data_path is None and args.data_name:  # the document's text names a data set so, its lines do not
        args.data_path, args.data_name = [args.data_name], None
    if args.data_path is not None and len(args.data_path) == 1:
        args.data_path = args.data_path[0]
    args.dataset_path, args.dataset_name = args.data_path, args.data_name
    _require_folders(args)


def _require_folders(args: argparse.Namespace) -> None:
    """Check that flags for checkpoints are given together with the folder that they require."""
    if args.load_last_good and not args.load:
        raise UsageError("--load-last-good requires --load. Add --load DIR.")
    if args.save_interval and not args.save:
        raise UsageError("--save-interval requires --save. Add --save DIR.")
    if args.save_per_machine and not args.save:
        raise UsageError("--save-per-machine requires --save. Add --save DIR.")


def _check(args: argparse.Namespace) -> None:
    if args.task is None and args.user_script is None:
        raise UsageError(
            f"neither --task nor --user-script was given. Pass a task ({', '.join(tasks.every())}), or a "
            "script with a template. See `megatron-npu train --help`."
        )
    if args.user_script is None:
        _check_task(args)
    elif not Path(args.user_script).is_file():
        raise UsageError(
            f"--user-script must be a Python file, but {args.user_script} does not exist. Correct the path."
        )
    _check_schedule(args)
    data_flags.refuse_repeated_columns(args.columns)
    if args.min_lr > args.lr:
        raise UsageError(
            f"--min-lr must be at most --lr, but --min-lr {args.min_lr:g} is above --lr {args.lr:g}. "
            "Correct one of the two."
        )


def _check_task(args: argparse.Namespace) -> None:
    for name in ("pretrained_model_name_or_path", "data_path"):
        if getattr(args, name) is None:
            flag = f"--{name.replace('_', '-')}"
            raise UsageError(f"--task {args.task} requires {flag}. Add {flag}.")
    layout = ModelParallel.of(args)
    if layout.is_cut:
        raise layout.refused_for(f"--task {args.task}")


def _check_schedule(args: argparse.Namespace) -> None:
    if args.epochs is None and args.train_iters is None and args.user_script is None:
        raise UsageError(
            "neither --epochs nor --train-iters was given. Pass one of them: --epochs N or --train-iters N."
        )
    if args.lr_warmup_iters and args.lr_warmup_fraction is not None:
        raise UsageError(
            "--lr-warmup-iters and --lr-warmup-fraction are mutually exclusive. Remove one of the two."
        )
    if args.lr_decay_iters and args.lr_warmup_iters >= args.lr_decay_iters:
        raise UsageError(
            f"the warm-up must be shorter than the decay, but --lr-warmup-iters is {args.lr_warmup_iters} "
            f"and --lr-decay-iters is {args.lr_decay_iters}. Correct one of the two."
        )


def _refuse_blanks(argv: Sequence[str]) -> None:
    """Reject a blank argument, which a shell passes if a space follows a backslash at the end of a line."""
    if any(not word.strip() and word for word in argv):
        raise UsageError(
            "a backslash in the command is followed by a space or a comment; it must be the last character "
            "of its line. Remove what follows the backslash, because the shell ends the command there."
        )


def _refuse_empty(args: argparse.Namespace) -> None:
    """Reject empty values from unset variables, such as ``--save "$RUNS"``, which would mean that nothing
    is saved.
    """
    for name, value in vars(args).items():
        if name != "source_prefix" and value in ("", [""]):
            raise UsageError(
                f"--{name.replace('_', '-')} must not be empty. Add a value or remove the flag; a shell "
                "variable in the command may be unset."
            )


def _task(add: Add) -> None:
    add("--task", choices=list(tasks.every()), help="task to train the model for")
    add(
        "--user-script",
        metavar="FILE",
        help="Python file to run, which subclasses a template (Finetuner, PreTrainer) or calls "
        "engine.compose",
    )
    add(
        "--pretrained-model-name-or-path",
        metavar="NAME_OR_DIR",
        help=(
            "model to start from: the name of a model on the Hugging Face hub, or a folder written by "
            "save_pretrained"
        ),
    )
    add(
        "--data-path",
        "--dataset-path",
        nargs="+",
        metavar="NAME_OR_FILE",
        help=(
            "training data: the name of a dataset on the hub, or a csv, json, jsonl, parquet or txt file "
            "or a folder of such files; with --task pretraining, the prefix of .bin and .idx files"
        ),
    )
    add(
        "--data-name",
        "--dataset-name",
        metavar="NAME",
        help="configuration of the dataset, such as mrpc for the dataset glue",
    )


def _model(add: Add) -> None:
    add("--num-layers", type=positive, help="number of transformer layers (default: the model's own)")
    add("--hidden-size", type=positive, help="hidden size (default: the model's own)")
    add("--num-attention-heads", type=positive, help="number of attention heads (default: the model's own)")
    add(
        "--seq-length",
        type=positive,
        help="maximum number of tokens in a sample (default: the tokenizer's limit)",
    )
    add(
        "--max-position-embeddings",
        type=positive,
        help="maximum number of positions (default: the model's own)",
    )
    add(
        "--tensor-model-parallel-size",
        type=positive,
        default=1,
        help="tensor-parallel size of a Megatron model",
    )
    add(
        "--pipeline-model-parallel-size",
        type=positive,
        default=1,
        help="number of pipeline stages of a Megatron model",
    )


def _training(add: Add) -> None:
    add("--micro-batch-size", type=positive, default=8, help="number of samples per rank and forward pass")
    add(
        "--global-batch-size",
        type=positive,
        help="number of samples per iteration over all ranks and micro-batches (default: one "
        "micro-batch per rank)",
    )
    add(
        "--epochs",
        type=positive,
        help="number of passes over the training data; with --train-iters, training ends at "
        "whichever limit is reached first",
    )
    add(
        "--train-iters",
        type=positive,
        help="number of iterations; with --epochs, training ends at whichever limit is reached first",
    )
    add_shared(add, "--seed", "--exit-interval", "--exit-signal-handler")
    add_shared(add, "--check-weight-hash-across-dp-replicas-interval")


def _optimizer(add: Add) -> None:
    add_shared(add, "--lr", type=_rate, default=5e-5)
    add_shared(add, "--min-lr", type=_rate)
    add(
        "--lr-decay-style",
        choices=_DECAYS,
        default="linear",
        help="shape of the learning-rate decay after the warm-up",
    )
    add_shared(add, "--lr-decay-iters")
    add_shared(add, "--lr-warmup-iters", help="iterations over which the learning rate rises from 0 to --lr")
    add("--lr-warmup-fraction", type=_fraction, help="warm-up length as a fraction of the decay iterations")
    add_shared(add, "--weight-decay", "--clip-grad", type=_rate)
    add_shared(add, "--adam-beta1", "--adam-beta2")
    add_shared(add, "--adam-eps", type=_above_0)


def _data(add: Add) -> None:
    flags.add_tokenizer(
        add,
        _TOKENIZERS,
        "tokenizer of --task pretraining; other tasks use the model's own",
        vocab_file="BERT's vocab.txt or GPT-2's vocab.json",
    )
    add(
        "--vocab-size",
        type=positive,
        help="vocabulary size of the NullTokenizer, without its end-of-document token",
    )
    add_shared(add, "--data-cache-path")
    add(
        "--data-impl",
        choices=["mmap", "lazy", "cached", "infer"],
        default="mmap",
        help=(
            "has no effect, because the format of the .bin and .idx files is detected; accepted for "
            "compatibility"
        ),
    )
    add(
        "--mmap-warmup",
        action="store_true",
        help="has no effect, because the operating system reads ahead; accepted for compatibility",
    )
    add(
        "--split",
        metavar="A,B[,C]",
        default="969,30,1",
        help="proportions in which the data of --task pretraining is split into training, validation and "
        "test data",
    )
    add(
        "--mask-prob",
        type=_fraction,
        default=0.15,
        help="fraction of the tokens to mask for masked language modeling",
    )
    add("--short-seq-prob", type=_fraction, default=0.1, help="fraction of the samples to shorten")
    add_shared(add, "--reset-position-ids", "--reset-attention-mask", "--eod-mask-loss")
    add("--num-workers", type=whole, default=0, help="number of data-loading processes per rank")


def _checkpoints(add: Add) -> None:
    add_shared(add, "--save", help="folder for checkpoints, the log and the trained model")
    add_shared(add, "--load", "--load-last-good", "--save-interval", "--save-per-machine", "--object-storage")


def _logging(add: Add) -> None:
    add_shared(add, "--log-interval", default=10)
    add(
        "--log-level",
        choices=["debug", "info", "warning"],
        default="info",
        help="log level of the loggers that get_logger() returns",
    )
    add(
        "--eval-interval",
        type=positive,
        help="iterations between two evaluations (default: evaluate after each epoch and at the end)",
    )
    add(
        "--eval-iters",
        type=whole,
        default=100,
        help="number of global batches in an evaluation of --task pretraining",
    )
    add_shared(add, "--tensorboard-dir", "--json-log")
    add_shared(
        add,
        "--plot",
        help="PNG file for the plot of loss and learning rate (default: written with --save or "
        "--tensorboard-dir, if matplotlib is installed)",
    )


def _launch(add: Add) -> None:
    add(
        "--nproc-per-node",
        type=positive,
        help="number of processes to start on this machine (default: one per available device)",
    )
    add_shared(add, "--distributed-timeout-minutes")


_GROUPS: tuple[tuple[str, Callable[[Add], None]], ...] = (
    ("task", _task),
    ("model", _model),
    ("training", _training),
    ("optimizer", _optimizer),
    ("data", _data),
    ("data of a task", data_flags.add_data_flags),
    ("checkpoints", _checkpoints),
    ("logging", _logging),
    ("processes", _launch),
)
