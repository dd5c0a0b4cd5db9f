"""Check the files and sizes in a stock script's arguments, for which upstream would raise errors with a
traceback.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
from pathlib import Path

from megatron_npu.adaptors.shared.addresses import is_address
from megatron_npu.base.errors import UsageError

# scripts whose data is always a dataset of a .bin and an .idx file, if it is no folder
_READ_INDEXED_DATA = frozenset(f"pretrain_{model}.py" for model in ("bert", "gpt", "hybrid", "mamba", "t5"))


def refuse_missing_files(args: argparse.Namespace) -> None:
    """Reject tokenizer and data paths that do not exist.

    Only the first rank looks for the data, because others may be on machines that never read it.

    Raises:
        UsageError: a file is missing.
    """
    for dest in ("vocab_file", "merge_file"):
        path = getattr(args, dest, None)
        if path and not is_address(path) and not Path(path).exists():
            raise UsageError(f"--{dest.replace('_', '-')} {path} does not exist", remedy="Correct the path.")
    is_stock = Path(sys.argv[0]).name in _READ_INDEXED_DATA  # other programs may name data of their own kind
    if is_stock and os.environ.get("RANK", "0") == "0" and not getattr(args, "mock_data", False):
        for dest in ("data_path", "train_data_path", "valid_data_path", "test_data_path"):
            _refuse_missing_data(f"--{dest.replace('_', '-')}", getattr(args, dest, None))


def _refuse_missing_data(flag: str, given: object) -> None:
    """Reject a dataset prefix if either of its two files is missing.

    An existing path may be data of another kind of script.
    """
    for prefix in map(str, given) if isinstance(given, list | tuple) else ():
        if _is_number(prefix) or is_address(prefix) or Path(prefix).exists():
            continue
        missing = [f"{prefix}{end}" for end in (".bin", ".idx") if not Path(f"{prefix}{end}").is_file()]
        if missing:
            raise UsageError(
                f"{flag} {prefix}: {' and '.join(missing)} cannot be found; a dataset is given as "
                "the common prefix of a .bin and an .idx file",
                remedy="Correct the prefix (`megatron-npu preprocess --output-prefix data/text` writes "
                "data/text_text_document), or create the dataset.",
            )


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def refuse_uneven_heads(args: argparse.Namespace) -> None:
    """Reject a hidden size that is not divisible by the number of heads, unless the head size is given.

    Raises:
        UsageError: the sizes do not fit.
    """
    hidden, heads = getattr(args, "hidden_size", None), getattr(args, "num_attention_heads", None)
    if hidden and heads and getattr(args, "kv_channels", None) is None and hidden % heads:
        raise UsageError(
            f"--hidden-size must be a multiple of --num-attention-heads {heads}, but got {hidden}",
            remedy="Change one of them, or pass the head size with --kv-channels.",
        )


def refuse_uneven_batches(args: argparse.Namespace) -> None:
    """Reject a global batch size that is not a multiple of the micro-batch size times the number of
    data-parallel ranks.

    Raises:
        UsageError: the sizes do not fit.
    """
    micro, batch = getattr(args, "micro_batch_size", None), getattr(args, "global_batch_size", None)
    if not micro or not batch or _may_be_uneven(args):
        return
    copies = _data_parallel_size(args)
    if not copies or micro < 0 or batch < 0:
        return  # upstream's own message says it
    step = micro * copies
    if batch % step:
        raise UsageError(
            f"--global-batch-size must be a multiple of --micro-batch-size {micro} times the data-parallel "
            f"size {copies}, which is {step}, but got {batch}",
            remedy=f"Pass --global-batch-size {-(-batch // step) * step}, or change --micro-batch-size or "
            "the number of processes.",
        )


def _data_parallel_size(args: argparse.Namespace) -> int:
    """Return the data-parallel size, or 0 if the layout does not fit the number of processes."""
    names = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size")
    ranks = math.prod(getattr(args, name, None) or 1 for name in names)
    world = int(getattr(args, "world_size", None) or 1)
    return 0 if world % ranks else world // ranks


def _may_be_uneven(args: argparse.Namespace) -> bool:
    """Return True if another feature determines the batch sizes, or if the encoder runs on ranks of its
    own.
    """
    names = ("rampup_batch_size", "decrease_batch_size_if_needed", "perform_rl_step")
    encoder = ("encoder_tensor_model_parallel_size", "encoder_pipeline_model_parallel_size")
    return any(getattr(args, name, None) for name in (*names, *encoder))
