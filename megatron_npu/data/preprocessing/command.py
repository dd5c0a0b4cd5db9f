"""``megatron-npu preprocess``: text to Megatron's ``.bin`` and ``.idx``."""

from __future__ import annotations

import argparse
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
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
    """Return the parser of the command; Megatron's own flags of the tool, and a few more."""
    result = Parser("megatron-npu preprocess", description=__doc__)
    result.epilog = f"megatron-npu preprocess {_VERIFY} PREFIX ...: compare datasets with their checksums"
    add = result.add_argument_group("documents").add_argument
    add(
        "--input",
        nargs="+",
        metavar="PATH",
        help="JSON lines, plain text (.txt, each a document), tables (.parquet, .arrow, .csv); folders; "
        "patterns; .gz, .xz, .bz2, .zst",
    )
    add("--json-keys", nargs="+", default=["text"], metavar="KEY", help="keys that hold text")
    add(
        "--hf-dataset",
        metavar="NAME",
        help="instead of --input: a dataset of Hugging Face, or csv, json, parquet, arrow files",
    )
    add("--hf-name", metavar="PART", help="the part of a --hf-dataset that has several")
    add("--hf-split", default="train", metavar="SPLIT", help="of a --hf-dataset")
    bad_rows.add_flag(add)
    _add_tokenizer(result.add_argument_group("tokenizer").add_argument)
    _add_shape(result.add_argument_group("dataset").add_argument)
    _add_work(result.add_argument_group("work").add_argument)
    return result


def _add_tokenizer(add: flags.Add) -> None:
    flags.add_tokenizer(
        add,
        tokenizer_files.KINDS,
        "GPT-2's, a tokenizer.json, BERT's in lower case or not, or none: text that is numbers already",
        vocab_file_aliases=["--vocab"],
        vocab_file="GPT-2's vocab.json or BERT's vocab.txt",
    )
    add(
        "--tokenizer-hf-include-special-tokens",
        action="store_true",
        help="with the tokens that a HuggingFaceTokenizer puts around every text, such as <s>",
    )
    add("--vocab-size", type=positive, help="ids of the NullTokenizer, without its end of document")
    flags.add_null_end(add)
    add("--append-eod", action="store_true", help="end each document with the token that ends a text")


def _add_shape(add: flags.Add) -> None:
    add(
        "--output-prefix",
        required=True,
        metavar="PREFIX",
        help="writes PREFIX_KEY_document.bin and .idx, or PREFIX_KEY_sentence with --split-sentences",
    )
    add(
        "--dataset-impl",
        choices=["mmap", "lazy", "cached"],
        default="mmap",
        help="format of the index: Megatron's of today, or that of 2019 to 2023, one under two names",
    )
    add("--split-sentences", action="store_true", help="each sentence is a sequence: for BERT and T5")
    add("--keep-newlines", action="store_true", help="with the blanks and line ends behind each sentence")
    add("--lang", default="english", metavar="LANGUAGE", help="of the sentences")
    add("--seq-length", type=positive, metavar="TOKENS", help="cut documents to windows of this length")
    add("--stride", type=positive, metavar="TOKENS", help="from one window's beginning to the next one's")


def _add_work(add: flags.Add) -> None:
    add("--workers", type=positive, default=1, help="CPU workers, none of which changes the output")
    add("--chunk-size", type=positive, help="taken as Megatron's tool takes it; changes nothing")
    add(
        "--partitions",
        type=positive,
        default=1,
        help="taken as Megatron's tool takes it; the order is the input's",
    )
    add("--keep-sequential-samples", action="store_true", help="that order, which is kept anyway")
    add(
        "--log-interval",
        type=positive,
        default=100_000,
        metavar="DOCUMENTS",
        help="documents between two log lines where there is no terminal for a bar",
    )


def main(argv: Sequence[str]) -> int:
    """Run the command; return its exit code (130 after an interrupt, with nothing written).

    Raises:
        UsageError: an input, the tokenizer's files or the place of the output are unfit.
    """
    if argv[:1] == [_VERIFY]:
        return _verify(argv)
    arguments = parser().parse_args(argv)
    try:
        with _terminated_like_interrupted():
            preprocess(arguments)
    except KeyboardInterrupt:
        print("megatron-npu preprocess: interrupted, nothing was written", file=sys.stderr)
        return 130
    return 0


def _verify(argv: Sequence[str]) -> int:
    result = Parser("megatron-npu preprocess", description="Compare datasets with their checksums.")
    result.add_argument(_VERIFY, nargs="+", metavar="PREFIX", help="paths without .bin and .idx")
    return data_command.verify(result.parse_args(argv).verify)


def preprocess(arguments: argparse.Namespace) -> None:
    """Encode all documents into one dataset a key; either all of them appear or none.

    Args:
        arguments: what ``parser()`` gives.

    Raises:
        UsageError: an input, the tokenizer's files or the place of the output are unfit, or full.
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
            f"{error.filename or f'--output-prefix {arguments.output_prefix}'}: {error.strerror}",
            "files that can be read, and room to write the dataset",
            "Free some room, or name another place; nothing was written.",
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
    """Return what the flags ask of the workers, all of it tried once here.

    Raises:
        UsageError: flags that contradict each other; unfit files of the tokenizer; no model of the sentences.
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
        raise UsageError("--keep-newlines without --split-sentences", "both or neither", "Leave it out.")
    cut, skips = windows.named_by(arguments), arguments.skip_bad_rows > 0
    return Recipe(tokenizer, keys, arguments.append_eod, dtype.name, sentences, cut, skips)


def _say_short(writer: indexed_dataset.Writer, cut: windows.Windows) -> None:
    if short := writer.count_shorter(cut.length):
        print(
            f"windows shorter than --seq-length {cut.length}, since their documents are: {short}; behind each"
            " of them samples of that length no longer begin where windows begin"
        )


class _Progress:
    """A bar on a terminal, a line every so many documents elsewhere, and one line at the end."""

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
        """Yield the results on, reporting them."""
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
            f"--output-prefix {prefix}: no directory {directory}",
            "an existing directory",
            "Make it first, or correct the path.",
        )


def _refuse_empty(writer: indexed_dataset.Writer, key: str) -> None:
    if not writer.tokens:
        raise UsageError(
            f"--input: no text under {key!r} in any document",
            "at least one document with text",
            "Look at the files and --json-keys; nothing was written.",
        )


@contextmanager
def _terminated_like_interrupted() -> Iterator[None]:
    """Let SIGTERM clean up as ctrl-C does; signals can be set in the main thread only."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
