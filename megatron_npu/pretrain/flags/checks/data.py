"""Checks of the data: tokenizer, files, and documents in every split that is used."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence

from megatron_npu.base.errors import UsageError
from megatron_npu.data.preprocessing import indexed_dataset
from megatron_npu.data.tokenization.tokenizer import Tokenizer
from megatron_npu.pretrain.data import epochs, tokenizers
from megatron_npu.pretrain.data.sources import PARTS, blend, sizes_of_parts, split_shares, tell_of_repeated
from megatron_npu.pretrain.flags import derive
from megatron_npu.pretrain.report import drawn_texts


def check(args: Namespace) -> None:
    """Check tokenizer and datasets by opening them; set the vocabulary sizes.

    Raises:
        UsageError: a file is missing or damaged, or a split that is used has no documents.
    """
    vocabulary = tokenizer(args).vocab_size
    _one_source(args)
    derive.split(args)
    derive.data(args, bool(args.mock_data or args.data_path or args.train_data_path))
    _validation(args)
    if not args.has_data:
        if args.trains or not args.save:
            raise UsageError("no --data-path", "the prefix of a dataset, or --mock-data", "Pass one.")
        return
    if args.train_data_path:
        _parts_of_their_own(args, vocabulary)
    else:
        _shared(args, vocabulary)
    if args.epochs is not None:
        derive.epoch(args, epochs.samples_of_one(args))


def tokenizer(args: Namespace) -> Tokenizer:
    """Return the tokenizer; set the vocabulary sizes.

    Raises:
        UsageError: a tokenizer file is missing or damaged.
    """
    if args.load:  # flags.txt of a converted checkpoint names files of its folder, which may have been moved
        derive.tokenizer_files(args, args.load)
    result = tokenizers.build(args)
    derive.tokenizer_hashes(args, tokenizers.hashes(args))
    derive.vocabulary(args, tokenizers.model_vocabulary(args, result))
    derive.padded_vocab_size(args)
    drawn_texts.check(args, result)
    return result


def _one_source(args: Namespace) -> None:
    """Reject several kinds of data sources, because Megatron takes only one."""
    parts = [f"--{part}-data-path" for part in PARTS if getattr(args, f"{part}_data_path")]
    kinds = [["--mock-data"] * args.mock_data, ["--data-path"] * bool(args.data_path), parts[:1]]
    given = [flag for kind in kinds for flag in kind]
    if len(given) > 1:
        raise UsageError(" and ".join(given), "only one of them", "Remove one.")
    if parts and not args.train_data_path:
        raise UsageError(parts[0], "--train-data-path with it", "Add --train-data-path.")
    if parts and args.split is not None:
        raise UsageError(
            f"--split {args.split!r} and --train-data-path", "only one of them", "--split is for --data-path."
        )


def _validates(args: Namespace) -> bool:
    return bool(args.eval_iters or args.full_validation)


def _validation(args: Namespace) -> None:
    """Check that the data supports --full-validation and --multiple-validation-sets, if they are given.

    Raises:
        UsageError: the data is generated or has weights, or there are no separate validation sets.
    """
    asked = [
        flag
        for flag in ("--full-validation", "--multiple-validation-sets")
        if getattr(args, flag[2:].replace("-", "_"))
    ]
    if not asked:
        return
    if args.mock_data:
        raise UsageError(f"{asked[0]} with --mock-data", "data of a known size", "Remove one.")
    if args.multiple_validation_sets and not args.valid_data_path:
        raise UsageError(
            "--multiple-validation-sets without --valid-data-path",
            "the prefixes of the sets",
            "Use --train-data-path and --valid-data-path instead of --data-path.",
        )
    flag = "--valid-data-path" if args.train_data_path else "--data-path"
    if blend(args.valid_data_path or args.data_path or [], flag)[0] is not None:
        raise UsageError(
            f"{asked[0]} with weights in {flag}", "only prefixes, as upstream requires", "Remove the weights."
        )


def _parts_of_their_own(args: Namespace, vocab_size: int) -> None:
    """Check the datasets of ``--train-data-path``, ``--valid-data-path`` and ``--test-data-path``."""
    if _validates(args) and not args.valid_data_path:
        raise UsageError(
            "--train-data-path without --valid-data-path",
            "data for validation too",
            "Add --valid-data-path, or pass --eval-iters 0.",
        )
    for part in PARTS:
        flag, words = f"--{part}-data-path", getattr(args, f"{part}_data_path") or []
        prefixes = blend(words, flag)[1]
        tell_of_repeated(prefixes, flag)
        for prefix in prefixes:
            indexed_dataset.validate(prefix, vocab_size)


def _shared(args: Namespace, vocab_size: int) -> None:
    """Check the datasets of ``--data-path``, and that each has documents in every split that is used."""
    shares = split_shares(args.split)
    _require_parts(args, shares, "")
    prefixes = blend(args.data_path or [])[1]
    tell_of_repeated(prefixes)
    for prefix in prefixes:
        sequences = indexed_dataset.validate(prefix, vocab_size).sequences
        _require_parts(args, sizes_of_parts(shares, sequences), f" of the {sequences} in {prefix}")


def _require_parts(args: Namespace, parts: Sequence[float], of: str) -> None:
    """Reject an empty split that is used: megatron-core 0.12 to 0.16 would search it for tokens endlessly."""
    for name, part, needed in zip(
        ("training", "validation"), parts, (args.trains, _validates(args)), strict=False
    ):
        if needed and part <= 0:
            raise UsageError(
                f"--split {args.split!r} leaves no document{of} for {name}",
                "a share above 0, and enough documents for it",
                "Change --split" + ("." if name == "training" else ", or pass --eval-iters 0."),
            )
