"""Check the data of a run: the tokenizer, the dataset files, and that every used split contains documents."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence

from megatron_npu.base.errors import UsageError
from megatron_npu.data.preprocessing import indexed_dataset
from megatron_npu.data.tokenization.tokenizer import Tokenizer
from megatron_npu.pretrain.data import epochs, tokenizers
from megatron_npu.pretrain.data.sources import PARTS, blend, sizes_of_parts, split_shares, tell_of_repeated
from megatron_npu.pretrain.flags import derive
from megatron_npu.pretrain.flags.plan_parts import SourceFlags, TokenizerFlags
from megatron_npu.pretrain.report import drawn_texts


def check(args: Namespace) -> None:
    """Check the tokenizer and the datasets by opening them, and set the vocabulary sizes.

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
            raise UsageError(
                "neither --data-path nor --mock-data was given",
                remedy="Pass the path prefix of a dataset with --data-path, or --mock-data.",
            )
        return
    if args.train_data_path:
        _parts_of_their_own(args, vocabulary)
    else:
        _shared(args, vocabulary)
    if args.epochs is not None:
        derive.epoch(args, epochs.samples_of_one(SourceFlags.of(args)))


def tokenizer(args: Namespace) -> Tokenizer:
    """Return the tokenizer, and set the vocabulary sizes.

    Raises:
        UsageError: a tokenizer file is missing or damaged.
    """
    if args.load:  # flags.txt of a converted checkpoint names files of its folder, which may have been moved
        derive.tokenizer_files(args, args.load)
    flags = TokenizerFlags.of(args)
    result = tokenizers.build(flags)
    derive.tokenizer_hashes(args, tokenizers.hashes(flags))
    derive.vocabulary(args, tokenizers.model_vocabulary(flags, result))
    derive.padded_vocab_size(args)
    drawn_texts.require_room(args.sample_prompt or [], args.max_position_embeddings, result)
    return result


def _one_source(args: Namespace) -> None:
    """Reject flags that specify several kinds of data sources at the same time.

    Megatron accepts only one kind.
    """
    parts = [f"--{part}-data-path" for part in PARTS if getattr(args, f"{part}_data_path")]
    kinds = [["--mock-data"] * args.mock_data, ["--data-path"] * bool(args.data_path), parts[:1]]
    given = [flag for kind in kinds for flag in kind]
    if len(given) > 1:
        raise UsageError(f"{' and '.join(given)} are mutually exclusive", remedy="Remove one of them.")
    if parts and not args.train_data_path:
        raise UsageError(f"{parts[0]} requires --train-data-path", remedy="Add --train-data-path.")
    if parts and args.split is not None:
        raise UsageError(
            f"--split {args.split!r} cannot be used with --train-data-path, because it applies only to "
            "--data-path",
            remedy="Remove --split.",
        )


def _validates(args: Namespace) -> bool:
    return bool(args.eval_iters or args.full_validation)


def _validation(args: Namespace) -> None:
    """Check that the data supports --full-validation and --multiple-validation-sets if these flags are given.

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
        raise UsageError(
            f"{asked[0]} cannot be used with --mock-data, because the synthetic data has no fixed size",
            remedy="Remove one of the two flags.",
        )
    if args.multiple_validation_sets and not args.valid_data_path:
        raise UsageError(
            "--multiple-validation-sets requires --valid-data-path with the path prefixes of the "
            "validation sets",
            remedy="Use --train-data-path and --valid-data-path instead of --data-path.",
        )
    flag = "--valid-data-path" if args.train_data_path else "--data-path"
    if blend(args.valid_data_path or args.data_path or [], flag)[0] is not None:
        raise UsageError(
            f"{asked[0]} does not support weights in {flag}; upstream requires prefixes without weights",
            remedy="Remove the weights.",
        )


def _parts_of_their_own(args: Namespace, vocab_size: int) -> None:
    """Check the datasets of ``--train-data-path``, ``--valid-data-path`` and ``--test-data-path``."""
    if _validates(args) and not args.valid_data_path:
        raise UsageError(
            "--train-data-path requires --valid-data-path, unless the run has no validation",
            remedy="Add --valid-data-path, or pass --eval-iters 0.",
        )
    for part in PARTS:
        flag, words = f"--{part}-data-path", getattr(args, f"{part}_data_path") or []
        prefixes = blend(words, flag)[1]
        tell_of_repeated(prefixes, flag)
        for prefix in prefixes:
            indexed_dataset.validate(prefix, vocab_size)


def _shared(args: Namespace, vocab_size: int) -> None:
    """Check the datasets of ``--data-path``, and that each of them has documents in every used split."""
    shares = split_shares(args.split)
    _require_parts(args, shares, "")
    prefixes = blend(args.data_path or [])[1]
    tell_of_repeated(prefixes)
    for prefix in prefixes:
        sequences = indexed_dataset.validate(prefix, vocab_size).sequences
        _require_parts(args, sizes_of_parts(shares, sequences), f" of the {sequences} in {prefix}")


def _require_parts(args: Namespace, parts: Sequence[float], of: str) -> None:
    """Reject a split that is used but contains no documents.

    megatron-core 0.12 to 0.16 would search it for tokens endlessly.
    """
    for name, part, needed in zip(
        ("training", "validation"), parts, (args.trains, _validates(args)), strict=False
    ):
        if needed and part <= 0:
            raise UsageError(
                f"--split {args.split!r} leaves no document{of} for {name}; the share must be above 0, and "
                "there must be enough documents for it",
                remedy="Change --split" + ("." if name == "training" else ", or pass --eval-iters 0."),
            )
