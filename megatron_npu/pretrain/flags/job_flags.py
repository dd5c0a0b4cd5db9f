"""Flags for the job: when a run ends, which checkpoints are kept, and how it is validated."""

from __future__ import annotations

import signal
from collections.abc import Callable
from typing import Any

from megatron_npu.base.arg_parser import positive
from megatron_npu.options.shared_flags import add_shared

Add = Callable[..., Any]
_UNHEARD = ("SIGKILL", "SIGSTOP")  # no process hears of them


def add_ramp(add: Add) -> None:
    """Declare the flags of the batch size ramp."""
    add(
        "--rampup-batch-size",
        type=positive,
        nargs=3,
        metavar=("START", "INCREMENT", "SAMPLES"),
        help="start with a global batch of START sequences and raise it by INCREMENT at equal intervals "
        "over SAMPLES samples, up to --global-batch-size; needs --train-samples",
    )


def add_ends(add: Add) -> None:
    """Declare the flags that end a run early."""
    add_shared(add, "--exit-interval")
    add(
        "--exit-duration-in-mins",
        type=positive,
        help="save and exit after N minutes (default: never)",
    )
    add_shared(add, "--exit-signal-handler")
    add(
        "--exit-signal",
        choices=[each.name for each in signal.Signals if each.name not in _UNHEARD],
        metavar="NAME",
        default="SIGTERM",
        help="signal for --exit-signal-handler instead of SIGTERM, for example SIGUSR1, which a batch "
        "system can send before the time limit",
    )


def add_step_graph(add: Add) -> None:
    """Declare the flags for capturing a step as a CUDA graph."""
    add(
        "--cuda-graph-impl",
        choices=["none", "local"],
        default="none",
        help="local: capture the forward and backward pass of a step as one CUDA graph and replay it "
        "from the fourth step on; for bf16 or fp32, without pipeline parallelism, experts, dropout "
        "or recomputation",
    )
    add(
        "--cuda-graph-scope",
        choices=["full_iteration"],
        default="full_iteration",
        help="part of a step that --cuda-graph-impl captures",
    )


def add_retention(add: Add) -> None:
    """Declare the flags that select which checkpoints are kept."""
    add(
        "--save-retain-interval",
        type=positive,
        help="after each save, remove the previous checkpoint unless its iteration is a multiple of N "
        "(default: keep all)",
    )
    add(
        "--save-keep-last",
        type=positive,
        help="after each save, keep only the newest N valid checkpoints and those of --save-retain-interval",
    )


def add_validation(add: Add) -> None:
    """Declare the flags that select the validation data."""
    add(
        "--full-validation",
        action="store_true",
        help="evaluate all samples of the validation data once at each validation, instead of "
        "--eval-iters batches",
    )
    add(
        "--multiple-validation-sets",
        action="store_true",
        help="report a separate loss for each prefix of --valid-data-path, which then has no weights",
    )


def add_wandb(add: Add) -> None:
    """Declare the flags of Weights & Biases."""
    add(
        "--wandb-project",
        metavar="NAME",
        help="project on Weights & Biases to log to (default: no logging to Weights & Biases)",
    )
    add(
        "--wandb-exp-name",
        metavar="NAME",
        help="name of the run on Weights & Biases (default: generated there)",
    )
    add(
        "--wandb-save-dir", metavar="DIR", help="folder for Weights & Biases files (default: wandb in --save)"
    )
    add(
        "--wandb-entity",
        metavar="NAME",
        help="team or user on Weights & Biases that owns the project (default: yours)",
    )
