"""``megatron-npu preprocess``: convert text to Megatron's ``.bin`` and ``.idx`` files."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

import numpy as np
from tqdm import tqdm

from megatron_npu.base.arg_parser import Parser, positive
from megatron_npu.base.errors import UsageError
from megatron_npu.data.preprocessing import (
    bad_rows,
    corpus,
    data_command,
    indexed_dataset,
    tokenizer_files,
    windows,
)
from megatron_npu.data.preprocessing.encoder import Recipe, Result, encode_all
from megatron_npu.data.preprocessing.sentences import Sentences
from megatron_npu.data.tokenization import flags, gigatoken_bpe
from megatron_npu.data.tokenization import unknown as unknown_tokens

_VERIFY = "--verify"


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command, which has all flags of Megatron's own tool and some more."""
    result = Parser("megatron-npu preprocess", description=__doc__)
    result.epilog = f"megatron-npu preprocess {_VERIFY} PREFIX ...: compare datasets with their checksums"
    add = result.add_argument_group("documents").add_argument
    add(
        "--input",
        nargs="+",
        metavar="PATH",
        help="input files, folders or patterns: JSON lines, plain text (.txt, one document per file) or "
        "tables (.parquet, .arrow, .csv); .gz, .xz, .bz2 and .zst are decompressed",
    )
    add(
        "--json-keys",
        nargs="+",
        default=["text"],
        metavar="KEY",
        help="keys in each row whose values are tokenized",
    )
    add(
        "--hf-dataset",
        metavar="NAME",
        help="read a Hugging Face dataset, or csv, json, parquet or arrow files, instead of --input",
    )
    add("--hf-name", metavar="PART", help="configuration to use if the --hf-dataset has several")
    add("--hf-split", default="train", metavar="SPLIT", help="split of the --hf-dataset")
    bad_rows.add_flag(add)
    _add_tokenizer(result.add_argument_group("tokenizer").add_argument)
    _add_shape(result.add_argument_group("dataset").add_argument)
    _add_work(result.add_argument_group("work").add_argument)
    return result


def _add_tokenizer(add: flags.Add) -> None:
    flags.add_tokenizer(
        add,
        tokenizer_files.KINDS,
        "tokenizer: that of GPT-2, a tokenizer.json, that of BERT (lower case or cased), or NullTokenizer "
        "for texts that are already token ids",
        vocab_file_aliases=["--vocab"],
        vocab_file="GPT-2's vocab.json or BERT's vocab.txt",
    )
    add(
        "--tokenizer-hf-include-special-tokens",
        action="store_true",
        help="keep the special tokens that a HuggingFaceTokenizer adds to each text, such as <s>",
    )
    add(
        "--vocab-size",
        type=positive,
        help="vocabulary size of the NullTokenizer, without its end-of-document token",
    )
    flags.add_null_end(add)
    add("--append-eod", action="store_true", help="append the end-of-document token to each document")


def _add_shape(add: flags.Add) -> None:
    add(
        "--output-prefix",
        required=True,
        metavar="PREFIX",
        help="prefix of the output files: PREFIX_KEY_document.bin and .idx, or "
        "PREFIX_KEY_sentence with --split-sentences",
    )
    add(
        "--dataset-impl",
        choices=["mmap", "lazy", "cached"],
        default="mmap",
        help=(
            "index format: mmap, which current Megatron reads; or lazy or cached, two names of the "
            "format that Megatron wrote from 2019 to 2023"
        ),
    )
    add("--split-sentences", action="store_true", help="store each sentence as a sequence, for BERT and T5")
    add("--keep-newlines", action="store_true", help="keep the whitespace that follows each sentence")
    add("--lang", default="english", metavar="LANGUAGE", help="language of the sentence splitter")
    add(
        "--seq-length",
        type=positive,
        metavar="TOKENS",
        help="split documents into windows of this many tokens",
    )
    add(
        "--stride",
        type=positive,
        metavar="TOKENS",
        help="number of tokens between the starts of two consecutive windows",
    )


def _add_work(add: flags.Add) -> None:
    add(
        "--workers",
        type=positive,
        default=1,
        help="number of worker processes; it does not change the output",
    )
    add("--chunk-size", type=positive, help="has no effect; accepted for compatibility with Megatron's tool")
    add(
        "--partitions",
        type=positive,
        default=1,
        help=(
            "has no effect, because the output always keeps the order of the input; accepted for "
            "compatibility with Megatron's tool"
        ),
    )
    add(
        "--keep-sequential-samples",
        action="store_true",
        help=(
            "has no effect, because the output always keeps the order of the input; accepted for "
            "compatibility"
        ),
    )
    add(
        "--log-interval",
        type=positive,
        default=100_000,
        metavar="DOCUMENTS",
        help="number of documents between two log lines when no progress bar is shown",
    )


def main(argv: Sequence[str]) -> int:
    """Run the command, and return its exit code.

    Raises:
        UsageError: an input, a tokenizer file or the output path is invalid.
        KeyboardInterrupt: Ctrl-C was pressed, or another signal ends the command; no file is written.
    """
    if argv[:1] == [_VERIFY]:
        return _verify(argv)
    arguments = parser().parse_args(argv)
    try:
        preprocess(arguments)
    except KeyboardInterrupt as interrupt:
        raise type(interrupt)("; nothing was written") from None
    return 0


def _verify(argv: Sequence[str]) -> int:
    result = Parser("megatron-npu preprocess", description="Compare datasets with their checksum files.")
    result.add_argument(
        _VERIFY, nargs="+", metavar="PREFIX", help="path prefixes of datasets, without .bin and .idx"
    )
    return data_command.verify(result.parse_args(argv).verify)


def preprocess(arguments: argparse.Namespace) -> None:
    """Encode all documents, and write one dataset for each key. Either all datasets are written, or none.

    Args:
        arguments: the arguments that were parsed by ``parser()``.

    Raises:
        UsageError: an input, a tokenizer file or the output path is invalid, or the disk is full.
    """
    keys = tuple(dict.fromkeys(arguments.json_keys))
    recipe = _recipe(arguments, keys)
    documents = corpus.named_by(arguments, keys)
    _check_place(arguments.output_prefix)
    try:
        _write(documents, recipe, arguments)
    except BrokenPipeError:
        raise
    except OSError as error:
        raise UsageError(
            f"{error.filename or f'--output-prefix {arguments.output_prefix}'}: {error.strerror}. The input "
            "files must be readable, and the disk must have enough space for the dataset. Free some space, "
            "or use another folder; nothing was written."
        ) from error


def _write(documents: corpus.Corpus, recipe: Recipe, arguments: argparse.Namespace) -> None:
    level = "sentence" if recipe.sentences else "document"
    dtype = np.dtype(recipe.dtype)
    with ExitStack() as stack:
        prefixes = [f"{arguments.output_prefix}_{key}_{level}" for key in recipe.keys]
        lazy = arguments.dataset_impl != "mmap"
        writers = [
            stack.enter_context(indexed_dataset.Writer(prefix, dtype, lazy=lazy)) for prefix in prefixes
        ]
        unknown = [0] * len(writers)
        skipped = bad_rows.Skipped(arguments.output_prefix, arguments.skip_bad_rows)
        results = encode_all(documents.batches(), recipe, arguments.workers)
        stack.callback(results.close)  # first of all: the workers end before the files go
        with _Progress(documents.size, arguments.log_interval) as progress:
            for result in progress.watch(results):
                skipped.add(result.bad)
                for index, (writer, encoded) in enumerate(zip(writers, result.keys, strict=True)):
                    writer.add(encoded.tokens, encoded.lengths, encoded.sequences)
                    unknown[index] += encoded.unknown
        for writer, key in zip(writers, recipe.keys, strict=True):
            writer.finish()
            _refuse_empty(writer, key)
        indexed_dataset.publish(writers)
        skipped.publish()
    vocabulary = tokenizer_files.shown(recipe.tokenizer)
    for writer, count in zip(writers, unknown, strict=True):
        print(f"{writer.prefix}.bin and .idx: {writer.tokens} tokens, {dtype.name}")
        if told := unknown_tokens.warning(count, writer.tokens, f"{writer.prefix}.bin", vocabulary):
            print(f"megatron-npu preprocess: {told}", file=sys.stderr)
        if recipe.windows is not None:
            _say_short(writer, recipe.windows)


def _recipe(arguments: argparse.Namespace, keys: tuple[str, ...]) -> Recipe:
    """Return the settings for the workers, after checking that they work in this process.

    Raises:
        UsageError: flags contradict each other, a tokenizer file is invalid, or the sentence model is
            missing.
    """
    tokenizer = tokenizer_files.named_by(arguments)
    if isinstance(tokenizer, tokenizer_files.GPT2Files):
        print(gigatoken_bpe.said(), file=sys.stderr)
    dtype = indexed_dataset.token_type(tokenizer.build().vocab_size)
    if arguments.dataset_impl != "mmap":
        dtype = np.dtype(np.int32)  # whatever the vocabulary, as Megatron's tool
    sentences = Sentences(arguments.lang, arguments.keep_newlines) if arguments.split_sentences else None
    if sentences is not None:
        sentences.splitter()
    elif arguments.keep_newlines:
        raise UsageError("--keep-newlines requires --split-sentences. Remove it, or add --split-sentences.")
    cut, skips = windows.named_by(arguments), arguments.skip_bad_rows > 0
    return Recipe(tokenizer, keys, arguments.append_eod, dtype.name, sentences, cut, skips)


def _say_short(writer: indexed_dataset.Writer, cut: windows.Windows) -> None:
    if short := writer.count_shorter(cut.length):
        print(
            f"number of windows shorter than --seq-length {cut.length}, at the ends of documents: {short}; "
            "after each of them, samples are no longer aligned with windows"
        )


class _Progress:
    """Display of the progress, as a bar on a terminal or as log lines at regular intervals."""

    def __init__(self, size: int | None, interval: int) -> None:
        self._interval = interval
        self._documents = self._text = 0
        self._begin = time.monotonic()
        # disable=None: no bar where stderr is not a terminal
        self._bar = tqdm(total=size, unit="B", unit_scale=True, disable=None, dynamic_ncols=True)

    def __enter__(self) -> _Progress:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._bar.close()
        if kind is None:
            print(self._line(), file=sys.stderr, flush=True)

    def watch(self, results: Iterator[Result]) -> Iterator[Result]:
        """Yield the results unchanged, and report the progress."""
        for result in results:
            yield result
            before, self._documents = self._documents, self._documents + result.documents
            self._text += result.text_bytes
            self._bar.update(result.read)
            self._bar.set_postfix_str(self._speed(), refresh=False)
            if self._bar.disable and self._documents // self._interval > before // self._interval:
                print(self._line(), file=sys.stderr, flush=True)

    def _speed(self) -> str:
        return f"{self._text / 1e6 / max(time.monotonic() - self._begin, 1e-9):.2f} MB/s of text"

    def _line(self) -> str:
        return f"{self._documents} documents, {self._text / 1e6:.1f} MB, {self._speed()}"


def _check_place(prefix: str) -> None:
    directory = Path(prefix).parent
    if not directory.is_dir():
        raise UsageError(
            f"--output-prefix {prefix}: the directory {directory} does not exist. Create it first, or "
            "correct the path."
        )


def _refuse_empty(writer: indexed_dataset.Writer, key: str) -> None:
    if not writer.tokens:
        raise UsageError(
            f"--input: no document has text under the key {key!r}, but at least one is required. Check the "
            "files and --json-keys; nothing was written."
        )
