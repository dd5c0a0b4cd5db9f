"""Checks of the data: tokenizer, files, and documents for every part that is read."""

from __future__ import annotations

import itertools
from argparse import Namespace
from collections.abc import Sequence

from megatron_npu.errors import UsageError
from megatron_npu.preprocessing import indexed_dataset
from megatron_npu.training import checkpoint_files, derive, tokenizers
from megatron_npu.training.data import blend


def check(args: Namespace) -> None:
    """Check tokenizer and datasets, which are opened; fill in the sizes of the vocabulary.

    Raises:
        UsageError: a file is missing or broken, or a part that is read has no documents.
    """
    if args.load:  # flags.txt of a converted checkpoint names files of its folder, which may have been moved
        for name in ("vocab_file", "merge_file", "tokenizer_model"):
            setattr(args, name, checkpoint_files.relocated(args.load, getattr(args, name)))
    tokenizer = tokenizers.build(args)
    args.tokenizer_vocab_size = tokenizers.model_vocabulary(args, tokenizer)
    derive.padded_vocab_size(args)
    shares = _split(args.split)
    if args.mock_data and args.data_path:
        raise UsageError("--mock-data and --data-path", "one of them", "Drop one.")
    args.has_data = bool(args.mock_data or args.data_path)
    if not args.has_data:
        if args.train_iters or not args.save:
            raise UsageError("no --data-path", "the prefix of a dataset, or --mock-data", "Give one.")
        return
    _require_parts(args, shares, "")
    if args.data_path:
        _, prefixes = blend(args.data_path)
        for prefix in prefixes:
            documents = indexed_dataset.validate(prefix, tokenizer.vocab_size).documents
            _require_parts(args, _documents_of_parts(shares, documents), f" of the {documents} in {prefix}")


def _split(text: str) -> list[float]:
    """Return the shares of training, validation and test."""
    try:
        shares = [float(part) for part in text.split(",")]
    except ValueError:
        shares = []
    if not 1 <= len(shares) <= 3 or min(shares) < 0 or sum(shares) <= 0:
        raise UsageError(
            f"--split {text!r}", "up to three numbers with commas between", "For example 969,30,1."
        )
    return [*shares, 0.0, 0.0][:3]


def _require_parts(args: Namespace, parts: Sequence[float], of: str) -> None:
    """Refuse an empty part that is read: megatron-core 0.12 to 0.16 would look for its tokens for ever."""
    for name, part, needed in zip(
        ("training", "validation"), parts, (args.train_iters, args.eval_iters), strict=False
    ):
        if needed and part <= 0:
            raise UsageError(
                f"--split {args.split!r} leaves no document{of} for {name}",
                "a share above 0, and documents enough for it",
                "Change --split" + ("." if name == "training" else ", or give --eval-iters 0."),
            )


def _documents_of_parts(shares: Sequence[float], documents: int) -> list[int]:
    """Return how many documents megatron-core gives to each part."""
    bounds = [round(sum(shares[:part]) / sum(shares) * documents) for part in range(4)]
    return [last - first for first, last in itertools.pairwise(bounds)]
