"""Check the flags against each other and against the machine before anything is built.

Invalid input is reported here with a one-line error. ``check`` also sets derived values (``derive``), so that
the rest of the trainer reads plain values.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable

from megatron_npu.base.errors import UsageError
from megatron_npu.pretrain.flags.checks import (
    data,
    experts,
    latent,
    length,
    logs_and_checkpoints,
    machine,
    model,
    optimizer,
    parallel,
    step_graph,
    switches,
)
from megatron_npu.pretrain.flags.frozen_flags import Flags

# What megatron-core ends in an assertion for, deep inside, or computes nonsense with.
_RANGES: tuple[tuple[str, Callable[[float], bool], str], ...] = (
    (
        "attention-dropout hidden-dropout adam-beta1 adam-beta2 muon-momentum moe-input-jitter-eps",
        lambda value: 0 <= value < 1,
        "a number of at least 0 and less than 1",
    ),
    (
        "clip-grad weight-decay init-method-std adam-eps sample-temperature moe-z-loss-coeff "
        "moe-router-bias-update-rate mscale mscale-all-dim mtp-loss-scaling-factor",
        lambda value: value >= 0,
        "a non-negative number",
    ),
    (
        "rotary-base rope-scaling-factor rope-scaling-low-freq-factor rope-scaling-high-freq-factor "
        "rotary-seq-len-interpolation-factor yarn-beta-fast yarn-beta-slow norm-epsilon loss-scale "
        "initial-loss-scale min-loss-scale "
        "moe-router-topk-scaling-factor moe-expert-capacity-factor rotary-scaling-factor "
        "muon-extra-scale-factor",
        lambda value: value > 0,
        "a positive number",
    ),
    ("rotary-percent", lambda value: 0 < value <= 1, "a number above 0 and at most 1"),
    ("seed", lambda value: 0 <= value < 2**32, "an integer from 0 to 4294967295"),
)


def check(args: Namespace, data_check: Callable[[Namespace], None] = data.check) -> Flags:
    """Check all flags, and return a frozen copy of the flags with all derived values.

    The given flags are not changed.

    Args:
        args: the result of ``arguments.parse``.
        data_check: checks the tokenizer and the data, and sets values derived from them.

    Raises:
        UsageError: a flag, a file, the machine or a checkpoint is invalid, or does not match the others.
    """
    flags = Flags(**vars(args))
    ranges(flags)
    for check_group in (
        machine.check,
        switches.check,
        model.check,
        model.attention,
        latent.check,
        experts.check,
        parallel.check,
        experts.layout,
        parallel.batches,
        length.check,
        data_check,
        length.iterations,
        optimizer.check,
        model.recompute,
        step_graph.check,
        logs_and_checkpoints.logging,
        logs_and_checkpoints.checkpoints,
        logs_and_checkpoints.places,
    ):
        check_group(flags)
    flags.freeze()
    return flags


def ranges(args: Namespace) -> None:
    """Check the numeric flags that have fixed limits.

    Raises:
        UsageError: a value is out of range.
    """
    for flags, fits, expected in _RANGES:
        for flag in flags.split():
            field = "layernorm_epsilon" if flag == "norm-epsilon" else flag.replace("-", "_")
            value = getattr(args, field)
            if value is not None and not fits(value):
                raise UsageError(f"--{flag} must be {expected}, but got {value}", remedy="Change this value.")
