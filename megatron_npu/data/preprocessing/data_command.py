"""``megatron-npu data``: inspect, decode, count, merge and verify ``.bin`` and ``.idx`` files."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from megatron_npu.base import files
from megatron_npu.base.arg_parser import Parser, positive, whole
from megatron_npu.base.errors import UsageError, printable
from megatron_npu.data.preprocessing import dataset_sums, indexed_dataset, tokenizer_files
from megatron_npu.data.tokenization import flags
from megatron_npu.safe_files import lazy_index

_PREFIX = "path of a dataset without .bin and .idx"
_SHOWN = 20  # tokens of a document that decode shows without a tokenizer
_PIECE = 4096  # documents that merge copies at a time


@dataclass(frozen=True)
class Opened:
    """A dataset that has been checked, whose files are memory-mapped.

    Attributes:
        prefix: the path of the dataset without ``.bin`` and ``.idx``.
        summary: the summary of the dataset.
        tokens: all tokens of the dataset.
        lengths: [S], the number of tokens in each sequence.
        documents: [D + 1], the index of the first sequence of each document, followed by S.
    """

    prefix: str
    summary: indexed_dataset.DatasetSummary
    tokens: np.ndarray
    lengths: np.ndarray
    documents: np.ndarray


def main(argv: Sequence[str]) -> int:
    """Run the command, and return its exit code.

    Raises:
        UsageError: the dataset does not exist, or is damaged.
    """
    parser = Parser("megatron-npu data", description=__doc__)
    parser.epilog = (
        "inspect and count: --json; decode: --document N, --count N and the tokenizer flags "
        "(--vocab-file, --merge-file, --tokenizer-type, --tokenizer-model); merge: "
        "--output-prefix PREFIX. Exit code 0: success; 1: verify found damage or no "
        "checksums; 2: bad usage"
    )
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    for name, (function, text) in _ACTIONS.items():
        own = actions.add_parser(name, help=text, description=text)
        own.set_defaults(function=function)
        _add_flags(name, own)
    options = parser.parse_args(list(argv))
    return options.function(options)


def _add_flags(action: str, parser: argparse.ArgumentParser) -> None:
    many: dict[str, Any] = {} if action == "decode" else {"nargs": "+"}
    parser.add_argument("prefix", metavar="PREFIX", help=_PREFIX, **many)
    if action in ("inspect", "count"):
        parser.add_argument("--json", action="store_true", help="print one JSON object per dataset")
    elif action == "merge":
        parser.add_argument(
            "--output-prefix",
            required=True,
            metavar="PREFIX",
            help="prefix of the output files: PREFIX.bin, .idx and .sums.json",
        )
    elif action == "decode":
        parser.add_argument(
            "--document",
            type=whole,
            default=0,
            metavar="N",
            help="index of the first document to print, counted from 0",
        )
        parser.add_argument(
            "--count", type=positive, default=1, metavar="N", help="number of documents to print"
        )
        group = parser.add_argument_group("tokenizer for decoding; without one, token ids are printed")
        flags.add_tokenizer(
            group.add_argument, tokenizer_files.KINDS, "the tokenizer with which the dataset was created"
        )
        group.add_argument("--vocab-size", type=positive, help="vocabulary size of the NullTokenizer")
        flags.add_null_end(group.add_argument)
        parser.set_defaults(tokenizer_hf_include_special_tokens=False)


def opened(prefix: str) -> Opened:
    """Check a dataset's files, index and ids, and open the dataset.

    Raises:
        UsageError: the dataset does not exist, or is damaged.
    """
    prefix = _bare(prefix)
    summary = indexed_dataset.validate(prefix)
    lengths, documents = (
        indexed_dataset.sequence_lengths(prefix),
        indexed_dataset.document_boundaries(prefix),
    )
    tokens = np.memmap(f"{prefix}.bin", dtype=summary.dtype, mode="r")
    return Opened(prefix, summary, tokens, lengths, documents)


def _bare(prefix: str) -> str:
    return prefix.removesuffix(".bin").removesuffix(".idx")


def facts(data: Opened) -> dict[str, Any]:
    """Return the values that the subcommand ``inspect`` prints."""
    lengths, summary = data.lengths, data.summary
    per_document = np.diff(np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])[data.documents])
    return {
        "dataset": data.prefix,
        "format": "lazy or cached" if lazy_index.is_lazy(f"{data.prefix}.idx") else "mmap",
        "type": summary.dtype.name,
        "documents": summary.documents,
        "sequences": summary.sequences,
        "tokens": summary.tokens,
        "empty_documents": int(np.count_nonzero(per_document == 0)),
        "tokens_of_a_document": _spread(per_document),
        "tokens_of_a_sequence": _spread(lengths),
        "largest_id": summary.largest_token,
        "sampled": summary.sampled,
        "bytes": sum(Path(f"{data.prefix}.{end}").stat().st_size for end in ("bin", "idx")),
        "checksums": dataset_sums.exist(data.prefix),
    }


def _spread(values: np.ndarray) -> dict[str, int]:
    if not len(values):
        return {"least": 0, "median": 0, "most": 0}
    return {"least": int(values.min()), "median": int(np.median(values)), "most": int(values.max())}


def _inspect(options: argparse.Namespace) -> int:
    for prefix in options.prefix:
        found = facts(opened(prefix))
        if options.json:
            print(json.dumps(found))
            continue
        print(f"{printable(found.pop('dataset'))}:")
        for name, value in found.items():
            told = (
                ", ".join(f"{key} {one}" for key, one in value.items()) if isinstance(value, dict) else value
            )
            print(f"  {name.replace('_', ' '):<22} {told}")
    return 0


def _count(options: argparse.Namespace) -> int:
    names = ("documents", "sequences", "tokens")
    total = dict.fromkeys(names, 0)
    for prefix in options.prefix:
        summary = opened(prefix).summary
        found = {name: getattr(summary, name) for name in names}
        total = {name: total[name] + found[name] for name in names}
        _tell_counts(prefix, found, as_json=options.json)
    if len(options.prefix) > 1:
        _tell_counts("total", total, as_json=options.json)
    return 0


def _tell_counts(what: str, counts: dict[str, int], *, as_json: bool) -> None:
    told = ", ".join(f"{value} {name}" for name, value in counts.items())
    print(json.dumps({"dataset": what, **counts}) if as_json else f"{printable(what)}: {told}")


def _decode(options: argparse.Namespace) -> int:
    data = opened(options.prefix)
    if options.document >= data.summary.documents:
        raise UsageError(
            f"--document must be from 0 to {data.summary.documents - 1}, because the dataset has "
            f"{data.summary.documents} documents, but got {options.document}. Pass a smaller "
            "number; `megatron-npu data count` prints the number of documents."
        )
    tokenizer = tokenizer_files.named_by(options).build() if _names_a_tokenizer(options) else None
    starts = np.concatenate([[0], np.cumsum(data.lengths, dtype=np.int64)])[data.documents]
    last = min(options.document + options.count, data.summary.documents)
    for number in range(options.document, last):
        ids = data.tokens[starts[number] : starts[number + 1]].tolist()
        print(f"document {number}: {len(ids)} tokens")
        print(_ids(ids) if tokenizer is None else tokenizer.decode(ids))
    return 0


def _names_a_tokenizer(options: argparse.Namespace) -> bool:
    names = ("vocab_file", "merge_file", "tokenizer_model", "vocab_size")
    return any(getattr(options, name, None) is not None for name in names)


def _ids(ids: list[int]) -> str:
    more = f" … ({len(ids) - _SHOWN} more)" if len(ids) > _SHOWN else ""
    return " ".join(map(str, ids[:_SHOWN])) + more


def _merge(options: argparse.Namespace) -> int:
    parts = [opened(prefix) for prefix in options.prefix]
    kinds = {part.summary.dtype.name for part in parts}
    if len(kinds) > 1:
        told = ", ".join(f"{part.prefix} ({part.summary.dtype.name})" for part in parts)
        raise UsageError(
            f"the datasets must have the same token dtype and tokenizer, but their dtypes differ: {told}. "
            "Preprocess them again with the same tokenizer."
        )
    _require_new(options.output_prefix, parts)
    try:
        with indexed_dataset.Writer(options.output_prefix, parts[0].summary.dtype) as writer:
            for part in parts:
                for tokens, lengths, sequences in _pieces(part):
                    writer.add(tokens, lengths, sequences)
            writer.finish()
            indexed_dataset.publish([writer])
    except OSError as error:
        files.name(error, f"{options.output_prefix}.bin")  # a full disk names none
        raise
    documents = sum(part.summary.documents for part in parts)
    print(f"{printable(options.output_prefix)}.bin and .idx: {documents} documents, {writer.tokens} tokens")
    return 0


def _require_new(prefix: str, parts: Sequence[Opened]) -> None:
    place = Path(f"{prefix}.bin")
    if not place.parent.is_dir():
        raise UsageError(
            f"--output-prefix {prefix}: the directory {place.parent} does not exist. Create it first, or "
            "correct the path."
        )
    if any(place.exists() and place.samefile(f"{part.prefix}.bin") for part in parts):
        raise UsageError(
            f"--output-prefix {prefix} is one of the datasets to merge, but the output must be a new "
            "dataset. Pass another --output-prefix."
        )


def _pieces(part: Opened) -> Iterator[tuple[bytes, np.ndarray, np.ndarray]]:
    """Yield a few thousand documents at a time, in the form that ``Writer.add`` expects."""
    at = 0
    for first in range(0, part.summary.documents, _PIECE):
        bounds = np.asarray(part.documents[first : first + _PIECE + 1])
        lengths = np.asarray(part.lengths[bounds[0] : bounds[-1]])
        end = at + int(lengths.sum(dtype=np.int64))
        yield part.tokens[at:end].tobytes(), lengths, np.diff(bounds)
        at = end


def verify(prefixes: Sequence[str]) -> int:
    """Compare datasets with their checksums.

    Return 1 if a dataset is damaged or has no checksums.
    """
    code = 0
    for prefix in prefixes:
        try:
            indexed_dataset.validate(prefix)
            known = dataset_sums.require(prefix, whole=True)
            told = (
                "unchanged since it was written"
                if known
                else f"the dataset has no checksums ({dataset_sums.path_of(prefix)})"
            )
        except UsageError as error:
            known, told = False, str(error)
        code |= not known
        print(printable(f"{prefix}: {told}"), flush=True)
    return int(code)


_ACTIONS = {
    "inspect": (
        _inspect,
        "print the number of documents and tokens, their lengths and dtype, for one or more datasets",
    ),
    "decode": (_decode, "print documents, as text if a tokenizer is given"),
    "count": (
        _count,
        "count documents, sequences and tokens, with totals over several datasets",
    ),
    "merge": (_merge, "concatenate datasets created with the same tokenizer"),
    "verify": (
        lambda options: verify([*map(_bare, options.prefix)]),
        "compare every byte with the stored checksums",
    ),
}
