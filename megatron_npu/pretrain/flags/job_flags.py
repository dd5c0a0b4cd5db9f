"""Flags of what surrounds the training: when a run ends, which checkpoints stay, what it is measured on."""

from __future__ import annotations

import signal
from collections.abc import Callable
from typing import Any

from megatron_npu.base.arg_parser import positive
from megatron_npu.options.shared_flags import add_shared

Add = Callable[..., Any]
_UNHEARD = ("SIGKILL", "SIGSTOP")  # no process hears of them


def add_ramp(add: Add) -> None:
    """Declare the batch that grows."""
    add(
        "--rampup-batch-size",
        type=positive,
        nargs=3,
        metavar=("START", "INCREMENT", "SAMPLES"),
        help="begin with a global batch of START sequences, and add INCREMENT at equal distances while "
        "SAMPLES are used, up to --global-batch-size; with --train-samples",
    )


def add_ends(add: Add) -> None:
    """Declare what ends a run before its time."""
    add_shared(add, "--exit-interval")
    add(
        "--exit-duration-in-mins",
        type=positive,
        help="save and end when the command has run for N minutes (default: never)",
    )
    add_shared(add, "--exit-signal-handler")
    add(
        "--exit-signal",
        choices=[each.name for each in signal.Signals if each.name not in _UNHEARD],
        metavar="NAME",
        default="SIGTERM",
        help="what --exit-signal-handler hears in place of SIGTERM: SIGUSR1, say, which a batch system sends "
        "before the end",
    )


def add_step_graph(add: Add) -> None:
    """Declare how a step's kernels are launched on a GPU."""
    add(
        "--cuda-graph-impl",
        choices=["none", "local"],
        default="none",
        help="local: capture the forward and backward pass of a step as one CUDA graph and replay it from "
        "the fourth step on; in bf16 or fp32, without pipeline, experts, dropout or recomputation",
    )
    add(
        "--cuda-graph-scope",
        choices=["full_iteration"],
        default="full_iteration",
        help="part of a step that --cuda-graph-impl captures",
    )


def add_retention(add: Add) -> None:
    """Declare which checkpoints stay."""
    add(
        "--save-retain-interval",
        type=positive,
        help="when one is whole, remove the one before it, but for iterations that N divides (default: "
        "all stay)",
    )
    add(
        "--save-keep-last",
        type=positive,
        help="when one is whole, remove all but the newest N that are, and those of --save-retain-interval",
    )


def add_validation(add: Add) -> None:
    """Declare what a validation reads."""
    add(
        "--full-validation",
        action="store_true",
        help="all samples of the validation data at each validation, once, in place of --eval-iters",
    )
    add(
        "--multiple-validation-sets",
        action="store_true",
        help="a loss of its own for each prefix of --valid-data-path, which has no weights then",
    )


def add_wandb(add: Add) -> None:
    """Declare where Weights & Biases puts a run."""
    add(
        "--wandb-project",
        metavar="NAME",
        help="send the same numbers to Weights & Biases (default: do not)",
    )
    add("--wandb-exp-name", metavar="NAME", help="of the run there (default: made up there)")
    add("--wandb-save-dir", metavar="DIR", help="where its files are kept (default: wandb in --save)")
    add("--wandb-entity", metavar="NAME", help="the team or user whose project it is (default: yours)")
