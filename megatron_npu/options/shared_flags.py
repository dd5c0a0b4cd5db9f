"""Declare flags that have the same name and meaning in several commands, mainly in ``pretrain`` and
``train``.

A command overrides options (another default, a value checked elsewhere) when it adds the flag.
tests/unit/test_shared_flags.py lists the flags that differ between commands, with the reasons.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

from megatron_npu.base.arg_parser import beta, number, positive, seed, whole

Add = Callable[..., Any]

_SHARED: dict[str, dict[str, Any]] = {
    # when a run ends, and what it compares on the way
    "--exit-interval": {
        "type": positive,
        "help": "save and exit at the first iteration that is a multiple of N (default: never)",
    },
    "--exit-signal-handler": {"action": "store_true", "help": "save and exit after SIGTERM or Ctrl-C"},
    "--seed": {
        "type": seed,
        "default": 1234,
        "help": "random seed for initial weights, dropout and the order of samples",
    },
    "--check-weight-hash-across-dp-replicas-interval": {
        "type": positive,
        "metavar": "N",
        "help": "every N iterations, check that weights and gradients are bitwise identical on all "
        "data-parallel ranks",
    },
    "--distributed-timeout-minutes": {
        "type": positive,
        "default": 10,
        "help": "number of minutes that a collective waits for a rank before the run fails",
    },
    # the optimizer and its schedule
    "--lr": {"type": number, "help": "peak learning rate"},
    "--min-lr": {"type": number, "default": 0.0, "help": "learning rate at the end of the decay"},
    "--lr-decay-iters": {
        "type": positive,
        "help": "iteration at which the learning-rate decay ends (default: the last iteration)",
    },
    "--lr-warmup-iters": {
        "type": whole,
        "default": 0,
        "help": "number of learning-rate warm-up iterations",
    },
    "--weight-decay": {
        "type": number,
        "default": 0.01,
        "help": "weight decay applied to matrices (biases and norms are not decayed)",
    },
    "--clip-grad": {
        "type": number,
        "default": 1.0,
        "help": "clip gradients to this global norm; 0: do not clip",
    },
    "--adam-beta1": {
        "type": beta,
        "default": 0.9,
        "help": "Adam: decay rate of the running mean of the gradients",
    },
    "--adam-beta2": {
        "type": beta,
        "default": 0.999,
        "help": "Adam: decay rate of the running mean of the squared gradients",
    },
    "--adam-eps": {
        "type": number,
        "default": 1e-8,
        "help": "Adam: epsilon added to the square root of the mean square",
    },
    # .bin and .idx
    "--data-cache-path": {
        "metavar": "DIR",
        "help": "directory for the index files of .bin and .idx datasets (default: next to the data)",
    },
    "--reset-position-ids": {"action": "store_true", "help": "restart position ids at each document"},
    "--reset-attention-mask": {
        "action": "store_true",
        "help": "let tokens attend only to their own document",
    },
    "--eod-mask-loss": {"action": "store_true", "help": "exclude end-of-document tokens from the loss"},
    # checkpoints
    "--save": {"metavar": "DIR", "help": "directory for checkpoints (default: save no checkpoints)"},
    "--load": {
        "metavar": "DIR",
        "help": "directory of the checkpoints to resume from; the newest one is loaded; may be the same as "
        "--save",
    },
    "--load-last-good": {
        "action": "store_true",
        "help": "resume from the newest undamaged checkpoint in --load, and log the damaged ones",
    },
    "--save-interval": {
        "type": positive,
        "help": "number of iterations between checkpoints (default: one at the end)",
    },
    "--save-per-machine": {
        "action": "store_true",
        "help": (
            "save separately on each machine, if the machines do not share --save: each keeps the files "
            "that its ranks write, the same machines can resume from them, and `megatron-npu checkpoint "
            "gather` joins them"
        ),
    },
    "--object-storage": {
        "metavar": "ADDRESS",
        "help": (
            "address in object storage, such as s3://BUCKET/run or msc://PROFILE/run, to which each complete "
            "checkpoint of --save is copied, and from which the newest one is fetched to --load at the start"
        ),
    },
    # what a checkpoint is computed with
    "--use-flash-attn": {"action": "store_true", "help": "same as --attention-backend flash"},
    # the log of a run
    "--log-interval": {"type": positive, "help": "number of iterations between log lines"},
    "--tensorboard-dir": {
        "metavar": "DIR",
        "help": "directory to which the logged values are written for TensorBoard (default: not written)",
    },
    "--json-log": {
        "metavar": "FILE",
        "help": "file to which one JSON object per log event is appended (default: metrics.jsonl in --save "
        "or --tensorboard-dir)",
    },
    "--plot": {"action": argparse.BooleanOptionalAction},
}


def add_shared(add: Add, *flags: str, **own: Any) -> None:
    """Add a selection of the shared flags to a parser.

    Args:
        add: ``add_argument`` of a parser or group.
        flags: the names of the flags.
        own: the command's overrides, as options of ``add_argument``.
    """
    for flag in flags:
        add(flag, **{**_SHARED[flag], **own})
