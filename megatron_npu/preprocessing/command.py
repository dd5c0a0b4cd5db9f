"""``megatron-npu preprocess``: JSON lines of text to Megatron's ``.bin`` and ``.idx``."""

from __future__ import annotations

import argparse
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import chain
from pathlib import Path

from tqdm import tqdm

from megatron_npu.arg_parser import Parser, positive
from megatron_npu.errors import UsageError
from megatron_npu.preprocessing import indexed_dataset, jsonl
from megatron_npu.preprocessing.encoder import GPT2Files, HuggingFaceFiles, Recipe, Result, encode_all
from megatron_npu.tokenization import flags


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command; the flags are those of Megatron's tools/preprocess_data.py."""
    result = Parser("megatron-npu preprocess", description=__doc__)
    add = result.add_argument
    add("--input", nargs="+", required=True, metavar="FILE", help="JSON lines; also .gz, .xz, .bz2, .zst")
    add("--output-prefix", required=True, metavar="PREFIX", help="writes PREFIX_KEY_document.bin and .idx")
    add("--json-keys", nargs="+", default=["text"], metavar="KEY", help="keys that hold text")
    flags.add_tokenizer(
        add,
        ["GPT2BPETokenizer", "HuggingFaceTokenizer"],
        "GPT-2's, or a tokenizer.json",
        vocab_file_aliases=["--vocab"],
    )
    add(
        "--tokenizer-hf-include-special-tokens",
        action="store_true",
        help="with the tokens that a HuggingFaceTokenizer puts around every text, such as <s>",
    )
    add("--append-eod", action="store_true", help="end each document with the token that ends a text")
    add("--workers", type=positive, default=1, help="CPU workers, none of which changes the output")
    add(
        "--log-interval",
        type=positive,
        default=100_000,
        metavar="DOCUMENTS",
        help="documents between two log lines where there is no terminal for a bar",
    )
    return result


def main(argv: Sequence[str]) -> int:
    """Run the command; return its exit code (130 after an interrupt, with nothing written).

    Raises:
        UsageError: an input, the tokenizer's files or the place of the output are unfit.
    """
    arguments = parser().parse_args(argv)
    try:
        with _terminated_like_interrupted():
            preprocess(arguments)
    except KeyboardInterrupt:
        print("megatron-npu preprocess: interrupted, nothing was written", file=sys.stderr)
        return 130
    return 0


def preprocess(arguments: argparse.Namespace) -> None:
    """Encode all files into one dataset a key; either all of them appear or none.

    Args:
        arguments: what ``parser()`` gives.

    Raises:
        UsageError: an input, the tokenizer's files or the place of the output are unfit.
    """
    size = jsonl.check(arguments.input)
    keys = tuple(dict.fromkeys(arguments.json_keys))
    tokenizer = _tokenizer(arguments)
    dtype = indexed_dataset.token_type(tokenizer.build().vocab_size)
    recipe = Recipe(tokenizer, keys, arguments.append_eod, dtype.name)
    _check_place(arguments.output_prefix)
    with ExitStack() as stack:
        prefixes = [f"{arguments.output_prefix}_{key}_document" for key in keys]
        writers = [stack.enter_context(indexed_dataset.Writer(prefix, dtype)) for prefix in prefixes]
        batches = chain.from_iterable(map(jsonl.batches, arguments.input))
        results = encode_all(batches, recipe, arguments.workers)
        stack.callback(results.close)  # first of all: the workers end before the files go
        with _Progress(size, arguments.log_interval) as progress:
            for result in progress.watch(results):
                for writer, encoded in zip(writers, result.keys, strict=True):
                    writer.add(encoded.tokens, encoded.lengths, encoded.sequences)
        for writer, key in zip(writers, keys, strict=True):
            _refuse_empty(writer, key)
            writer.finish()
        indexed_dataset.publish(writers)
    for writer in writers:
        print(f"{writer.prefix}.bin and .idx: {writer.tokens} tokens, {dtype.name}")


def _tokenizer(arguments: argparse.Namespace) -> GPT2Files | HuggingFaceFiles:
    """Return the files of the tokenizer that the flags name.

    Raises:
        UsageError: a flag is missing.
    """
    kind = arguments.tokenizer_type
    needed = {
        "GPT2BPETokenizer": {"--vocab-file": arguments.vocab_file, "--merge-file": arguments.merge_file},
        "HuggingFaceTokenizer": {"--tokenizer-model": arguments.tokenizer_model},
    }[kind]
    missing = [flag for flag, value in needed.items() if value is None]
    if missing:
        raise UsageError(
            f"--tokenizer-type {kind} without {' and '.join(missing)}", "its files", "Name them."
        )
    if kind == "HuggingFaceTokenizer":
        return HuggingFaceFiles(arguments.tokenizer_model, arguments.tokenizer_hf_include_special_tokens)
    return GPT2Files(arguments.vocab_file, arguments.merge_file)


class _Progress:
    """A bar on a terminal, a line every so many documents elsewhere, and one line at the end."""

    def __init__(self, size: int, interval: int) -> None:
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
