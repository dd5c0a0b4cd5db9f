"""Flags with the same name and meaning in several commands, mostly ``pretrain`` and ``train``.

What a command says otherwise of a flag (another default, a number that it checks elsewhere) it gives where it
adds it. tests/unit/test_shared_flags.py lists the flags of which two commands say different things, and why.
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
        "help": "save and end at the iterations that N divides (default: never)",
    },
    "--exit-signal-handler": {"action": "store_true", "help": "save and end after SIGTERM or Ctrl-C"},
    "--seed": {"type": seed, "default": 1234, "help": "of weights, dropout and the order of samples"},
    "--check-weight-hash-across-dp-replicas-interval": {
        "type": positive,
        "metavar": "N",
        "help": "compare the bits of weights and gradients on all data-parallel ranks at each Nth iteration",
    },
    "--distributed-timeout-minutes": {
        "type": positive,
        "default": 10,
        "help": "minutes after which a collective gives up on a rank that does not answer",
    },
    # the optimizer and its schedule
    "--lr": {"type": number, "help": "highest learning rate"},
    "--min-lr": {"type": number, "default": 0.0, "help": "learning rate that the decay ends with"},
    "--lr-decay-iters": {"type": positive, "help": "iteration at which it ends (default: the last)"},
    "--lr-warmup-iters": {"type": whole, "default": 0},
    "--weight-decay": {"type": number, "default": 0.01, "help": "of matrices; biases and norms have none"},
    "--clip-grad": {"type": number, "default": 1.0, "help": "largest norm of the gradient; 0: no limit"},
    "--adam-beta1": {"type": beta, "default": 0.9, "help": "decay of the mean of gradients, a step"},
    "--adam-beta2": {"type": beta, "default": 0.999, "help": "decay of the mean of their squares, a step"},
    "--adam-eps": {"type": number, "default": 1e-8, "help": "added to the root of that mean"},
    # .bin and .idx
    "--data-cache-path": {
        "metavar": "DIR",
        "help": "where the indices of .bin and .idx are kept (default: beside the data)",
    },
    "--reset-position-ids": {"action": "store_true", "help": "count positions from each document's begin"},
    "--reset-attention-mask": {"action": "store_true", "help": "let no token see another document"},
    "--eod-mask-loss": {"action": "store_true", "help": "count no loss at ends of documents"},
    # checkpoints
    "--save": {"metavar": "DIR"},
    "--load": {"metavar": "DIR", "help": "the newest checkpoint there is gone on from; may be --save's DIR"},
    "--load-last-good": {
        "action": "store_true",
        "help": "go on from the newest checkpoint in --load whose files are whole, and say which are not",
    },
    "--save-interval": {
        "type": positive,
        "help": "iterations between two checkpoints (default: one at the end)",
    },
    "--save-per-machine": {
        "action": "store_true",
        "help": "where machines do not share --save, keep on each what its ranks write of a checkpoint: "
        "the same machines resume from it, and `megatron-npu checkpoint gather` joins the parts",
    },
    # what a checkpoint is computed with
    "--use-flash-attn": {"action": "store_true", "help": "= --attention-backend flash"},
    # what is told of a run
    "--log-interval": {"type": positive, "help": "iterations between two lines"},
    "--tensorboard-dir": {
        "metavar": "DIR",
        "help": "write the same numbers for TensorBoard (default: do not)",
    },
    "--json-log": {
        "metavar": "FILE",
        "help": "one JSON object a log event, appended (default: metrics.jsonl in --save or "
        "--tensorboard-dir)",
    },
    "--plot": {"action": argparse.BooleanOptionalAction},
}


def add_shared(add: Add, *flags: str, **own: Any) -> None:
    """Declare some of the flags.

    Args:
        add: ``add_argument`` of a parser or group.
        flags: their names.
        own: what the command says of them instead, as ``add_argument`` takes it.
    """
    for flag in flags:
        add(flag, **{**_SHARED[flag], **own})
