"""Checks of the length of a run in iterations, samples or epochs."""

from __future__ import annotations

from argparse import Namespace

from megatron_npu.base.errors import UsageError
from megatron_npu.pretrain.flags import derive

_UNITS = ("--train-iters", "--train-samples", "--epochs")


def check(args: Namespace) -> None:
    """Check, before the data is read, that exactly one flag sets the length; set whether the run trains at
    all.

    Raises:
        UsageError: no flag or several flags set it.
    """
    values = (args.train_iters, args.train_samples, args.epochs)
    given = [f"{flag} {value}" for flag, value in zip(_UNITS, values, strict=True) if value is not None]
    if len(given) != 1:
        raise UsageError(
            " and ".join(given) or "no --train-iters",
            f"exactly one of {', '.join(_UNITS)}",
            "Remove the others." if given else "Pass one, for example --train-iters 1000.",
        )
    if args.epochs is not None and args.mock_data:
        raise UsageError(given[0], "data of a known size, not --mock-data", "Pass --train-iters.")
    derive.length(args)


def iterations(args: Namespace) -> None:
    """Set the number of iterations from samples or epochs, after batch and data sizes are known.

    Raises:
        UsageError: there are too few samples for one iteration.
    """
    samples = derive.samples_in_all(args)
    if samples is None:
        return
    derive.iterations(args)
    if not args.train_iters:
        flag = f"--epochs {args.epochs}" if args.epochs else f"--train-samples {args.train_samples}"
        raise UsageError(
            f"{flag}, which is {samples} samples of {args.seq_length} tokens",
            f"at least one global batch of {args.global_batch_size}",
            "Provide more, or lower --global-batch-size.",
        )
