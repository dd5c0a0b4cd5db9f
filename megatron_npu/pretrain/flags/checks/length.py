"""Check the length of a run, which is given in iterations, samples or epochs."""

from __future__ import annotations

from argparse import Namespace

from megatron_npu.base.errors import UsageError
from megatron_npu.pretrain.flags import derive

_UNITS = ("--train-iters", "--train-samples", "--epochs")


def check(args: Namespace) -> None:
    """Check that exactly one flag sets the length of the run, and record whether the run trains at all.

    This happens before the data is read.

    Raises:
        UsageError: no flag or several flags set the length.
    """
    values = (args.train_iters, args.train_samples, args.epochs)
    given = [f"{flag} {value}" for flag, value in zip(_UNITS, values, strict=True) if value is not None]
    if len(given) != 1:
        raise UsageError(
            f"exactly one of {', '.join(_UNITS)} must be passed, but got "
            f"{' and '.join(given) or 'none of them'}",
            remedy="Remove all but one." if given else "Pass one, for example --train-iters 1000.",
        )
    if args.epochs is not None and args.mock_data:
        raise UsageError(
            f"{given[0]} requires a dataset of known size, but --mock-data has no fixed size",
            remedy="Pass --train-iters.",
        )
    derive.length(args)


def iterations(args: Namespace) -> None:
    """Compute the number of iterations from samples or epochs, after batch and data sizes have been
    determined.

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
            f"{flag} amounts to {samples} samples of {args.seq_length} tokens, which is less than one "
            f"global batch of {args.global_batch_size}",
            remedy="Train on more samples, or lower --global-batch-size.",
        )
