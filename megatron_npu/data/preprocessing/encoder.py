"""Encode batches of lines to bytes of tokens, in one or several processes, in the order of the input."""

from __future__ import annotations

import contextlib
import errno
import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass

import numpy as np

from megatron_npu.base.errors import UsageError
from megatron_npu.data.preprocessing import jsonl, windows
from megatron_npu.data.preprocessing.sentences import Sentences
from megatron_npu.data.preprocessing.tokenizer_files import HuggingFaceFiles, TokenizerFiles
from megatron_npu.data.tokenization import gigatoken_bpe
from megatron_npu.data.tokenization.bert_wordpiece import BertWordPieceTokenizer
from megatron_npu.data.tokenization.gpt2_bpe import GPT2Tokenizer
from megatron_npu.data.tokenization.hf import HuggingFaceTokenizer
from megatron_npu.data.tokenization.null import NullTokenizer
from megatron_npu.process import interruption

WordTokenizer = GPT2Tokenizer | BertWordPieceTokenizer  # those that cut a text into words of our own

# Words that are worth remembering: longer ones hardly come back. Full, the table takes about 40 MB.
_WORD_LENGTH = 32
_WORDS_CACHED = 200_000


@dataclass(frozen=True)
class Recipe:
    """The settings of a worker, which are small enough to be sent to each worker process.

    Attributes:
        tokenizer: the settings of the tokenizer.
        keys: the JSON keys, each of which becomes a dataset.
        append_eod: whether to end every non-empty document with ``eod``.
        dtype: the name of the numpy dtype of the tokens.
        sentences: how to split texts into sentences. If None, each text is one sequence.
        windows: how to split documents into windows. If None, documents are not split.
        skips: whether to skip malformed lines.
    """

    tokenizer: TokenizerFiles
    keys: tuple[str, ...]
    append_eod: bool
    dtype: str
    sentences: Sentences | None = None
    windows: windows.Windows | None = None
    skips: bool = False


@dataclass(frozen=True)
class Encoded:
    """The documents of one batch, encoded for one key.

    Attributes:
        tokens: the bytes of the tokens in the dataset's dtype.
        lengths: [sequences] int32, the number of tokens in each sequence; empty sequences are not included.
        sequences: [documents] int64, the number of sequences in each document; 0 for an empty document.
        unknown: the number of unknown tokens.
    """

    tokens: bytes
    lengths: np.ndarray
    sequences: np.ndarray
    unknown: int = 0


@dataclass(frozen=True)
class Result:
    """The result of encoding one batch.

    The result contains an ``Encoded`` object per key, the number of documents, the number of bytes of text
    and of bytes on disk, and the skipped rows.
    """

    keys: tuple[Encoded, ...]
    documents: int
    text_bytes: int
    read: int
    bad: tuple[jsonl.BadRow, ...] = ()


class _WordCache(dict[str, bytes]):
    """A cache that maps words to the bytes of their tokens.

    Words repeat often, and a lookup is many times cheaper than byte-pair encoding.
    """

    def __init__(self, tokenizer: WordTokenizer, dtype: np.dtype) -> None:
        super().__init__()
        self._tokenizer, self._dtype = tokenizer, dtype

    def __missing__(self, word: str) -> bytes:
        tokens = np.array(self._tokenizer.encode_word(word), dtype=self._dtype).tobytes()
        if len(word) <= _WORD_LENGTH:
            if len(self) >= _WORDS_CACHED:
                self.clear()
            self[word] = tokens
        return tokens


def _text_encoder(
    tokenizer: WordTokenizer | HuggingFaceTokenizer | NullTokenizer, special: bool, dtype: np.dtype
) -> Callable[[str], bytes]:
    """Return a function that tokenizes a text and returns the tokens as bytes.

    The function adds special tokens if ``special`` is set.
    """
    if isinstance(tokenizer, GPT2Tokenizer) and gigatoken_bpe.is_used():
        encode = gigatoken_bpe.encoder(tokenizer)
        return lambda text: encode(text).astype(dtype).tobytes()
    if isinstance(tokenizer, WordTokenizer):
        bytes_of, words = _WordCache(tokenizer, dtype).__getitem__, tokenizer.words
        return lambda text: b"".join(map(bytes_of, words(text)))
    if isinstance(tokenizer, NullTokenizer):
        return lambda text: np.array(tokenizer.encode(text), dtype=dtype).tobytes()
    return lambda text: np.array(tokenizer.encode(text, special_tokens=special), dtype=dtype).tobytes()


class Encoder:
    """Encodes batches of documents.

    The tokens of a batch do not depend on other batches.

    Raises:
        UsageError: the tokenizer's files are invalid, or the language has no sentence model.
    """

    def __init__(self, recipe: Recipe) -> None:
        self._recipe = recipe
        self._dtype = np.dtype(recipe.dtype)
        files = recipe.tokenizer
        tokenizer = files.build()
        special = isinstance(files, HuggingFaceFiles) and files.special_tokens
        self._bytes_of = _text_encoder(tokenizer, special, self._dtype)
        self._unknown = tokenizer.unknown
        self._eod = np.array([tokenizer.eod], dtype=self._dtype).tobytes() if recipe.append_eod else b""
        self._sentences = recipe.sentences.splitter() if recipe.sentences else None

    def encode(self, batch: jsonl.Batch) -> Result:
        """Encode a batch, and return its tokens.

        Raises:
            LineError: a line is malformed, and lines are not skipped.
        """
        bad: list[jsonl.BadRow] | None = [] if self._recipe.skips else None
        documents = list(jsonl.documents(batch, self._recipe.keys, bad))
        columns = list(zip(*documents, strict=True)) or [()] * len(self._recipe.keys)
        keys = tuple(self._encode_key(column) for column in columns)
        return Result(keys, len(documents), len(batch.text), batch.read, tuple(bad or ()))

    def _encode_key(self, documents: Sequence[list[str]]) -> Encoded:
        pieces: list[bytes] = []
        counts: list[int] = []
        for texts in documents:
            for sequences in self._documents(self._sequences(texts)):
                pieces += sequences
                counts.append(len(sequences))
        lengths = np.fromiter(map(len, pieces), dtype=np.int64, count=len(pieces)) // self._dtype.itemsize
        tokens = b"".join(pieces)
        unknown = 0 if self._unknown is None else np.frombuffer(tokens, self._dtype) == self._unknown
        return Encoded(
            tokens, lengths.astype(np.int32), np.array(counts, dtype=np.int64), int(np.count_nonzero(unknown))
        )

    def _sequences(self, texts: list[str]) -> list[bytes]:
        """Return the sequences of a document that are not empty, with ``eod`` at the end of the last one."""
        if self._sentences is not None:
            texts = [sentence for text in texts for sentence in self._sentences(text)]
        sequences = [tokens for text in texts if (tokens := self._bytes_of(text))]
        if sequences:
            sequences[-1] += self._eod
        return sequences

    def _documents(self, sequences: list[bytes]) -> list[list[bytes]]:
        """Split a document into windows, if this is enabled.

        Each resulting document is a list of sequences.
        """
        if self._recipe.windows is None or not sequences:
            return [sequences]
        tokens = b"".join(sequences)
        return [[window] for window in self._recipe.windows.cut(tokens, self._dtype.itemsize)]


def encode_all(batches: Iterable[jsonl.Batch], recipe: Recipe, workers: int) -> Generator[Result, None, None]:
    """Yield the results of all batches in order, as encoded by ``workers`` processes.

    1 means this process only.

    At most two batches per worker are in progress, regardless of the length of the input.

    Raises:
        UsageError: a line is malformed, or a worker was killed.
    """
    if workers == 1:
        yield from map(Encoder(recipe).encode, batches)
        return
    pool = _pool(recipe, workers)
    # A worker that has just been forked would take both for its own. A SIGTERM waits until it can end it:
    # with the handler of this process it could be lost, and a pool waits forever for whom it has ended.
    with interruption.deferred(), _holding(*interruption.TERMINATING):
        pool.submit(os.getpid)  # the first task starts all of them
    try:
        yield from _in_order(pool, batches, 2 * workers)
    except BrokenProcessPool as error:
        raise UsageError(
            f"one of the {workers} worker processes was killed. If the machine ran out of memory, lower "
            "--workers; nothing was written."
        ) from error
    finally:
        # a second Ctrl-C would end the wait for the pool, whose workers would then wait for tasks forever
        with interruption.deferred():
            pool.shutdown(cancel_futures=True)


_OPENED = "Let all users write to it (mode 1777)"
_OF_SHARED_MEMORY = {
    errno.ENOSPC: "Enlarge it (docker run --shm-size), remove files from it",
    errno.EACCES: _OPENED,
    errno.EROFS: _OPENED,
    errno.ENOENT: "Mount it",
    errno.ENOSYS: "Mount it",
}


def _pool(recipe: Recipe, workers: int) -> ProcessPoolExecutor:
    try:
        return ProcessPoolExecutor(workers, _context(), _start_worker, (recipe,))
    except OSError as error:
        if error.errno not in _OF_SHARED_MEMORY:
            raise
        raise UsageError(
            f"/dev/shm, which holds the locks of the worker processes, cannot be used ({error.strerror}). "
            f"{_OF_SHARED_MEMORY[error.errno]}, or pass --workers 1; nothing was written."
        ) from error


@contextlib.contextmanager
def _holding(*numbers: signal.Signals) -> Iterator[None]:
    """Delay the delivery of signals until the end of the ``with`` block.

    Processes forked inside the block keep the signals blocked until they unblock them.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _in_order(pool: ProcessPoolExecutor, batches: Iterable[jsonl.Batch], ahead: int) -> Iterator[Result]:
    pending: deque[Future[Result]] = deque()
    for batch in batches:
        pending.append(pool.submit(_encode, batch))
        if len(pending) >= ahead:
            yield pending.popleft().result()
    while pending:
        yield pending.popleft().result()


def _context() -> multiprocessing.context.BaseContext:
    """Return the method by which worker processes are started.

    Fork is preferred, because forked workers start immediately.

    Forking is safe, because a worker never uses torch or a device.
    """
    return multiprocessing.get_context(
        "fork" if "fork" in multiprocessing.get_all_start_methods() else "spawn"
    )


_encoder: Encoder | None = None  # of this worker process


def _start_worker(recipe: Recipe) -> None:
    """Make a worker ignore Ctrl-C and SIGHUP, which its parent handles, and exit if its parent has ended."""
    global _encoder
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
    threading.Thread(target=_leave_with_parent, daemon=True).start()
    _encoder = Encoder(recipe)


def _leave_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _encode(batch: jsonl.Batch) -> Result:
    assert _encoder is not None
    return _encoder.encode(batch)
