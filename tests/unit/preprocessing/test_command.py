"""The command as a whole: equal bytes for any number of workers, lossless, all or nothing."""

from __future__ import annotations

import errno
import fcntl
import gzip
import hashlib
import multiprocessing
import os
import signal
import struct
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import BinaryIO

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_npu.base import files
from megatron_npu.base.errors import UsageError
from megatron_npu.commands import cli
from megatron_npu.data.preprocessing import encoder, indexed_dataset, jsonl
from megatron_npu.data.preprocessing.tokenizer_files import GPT2Files
from megatron_npu.data.tokenization.gpt2_bpe import GPT2Tokenizer
from tests.conftest import LONGEST, ROOT, Vocabulary, on_a_leash, wait_until
from tests.support import processes
from tests.unit.preprocessing.conftest import SAMPLE

Write = Callable[..., Path]
Run = Callable[..., Path]
ODD = [SAMPLE, "", "rose", " \n", "It's <|endoftext|> 'll", "\x00\x1f\x85\u2028é", "x" * 3000, "\U00031350🙂"]


def contents(prefix: Path) -> tuple[bytes, bytes]:
    return prefix.with_suffix(".bin").read_bytes(), prefix.with_suffix(".idx").read_bytes()


def texts(prefix: Path, tokenizer: GPT2Tokenizer) -> list[str]:
    """Read a dataset by its documented layout; return the text of each document."""
    data, index = contents(prefix)
    _, _, code, sequences, boundaries = indexed_dataset.HEADER.unpack_from(index)
    tokens = np.frombuffer(data, indexed_dataset.CODES[code]).tolist()
    lengths = np.frombuffer(index, "<i4", sequences, indexed_dataset.HEADER.size)
    limits = np.frombuffer(index, "<i8", boundaries, indexed_dataset.HEADER.size + 12 * sequences)
    ends = np.concatenate([[0], np.cumsum(lengths)])[limits]
    return [tokenizer.decode(tokens[a:b]) for a, b in pairwise(ends)]


@settings(max_examples=25)
@given(
    documents=st.lists(st.text(max_size=40), min_size=1, max_size=12).filter(any),
    workers=st.integers(2, 3),
    batch=st.integers(1, 200),
)
def test_lossless_and_equal_for_any_number_of_workers(
    tiny: Vocabulary, corpus_file: Write, preprocess: Run, documents: list[str], workers: int, batch: int
) -> None:
    file = corpus_file({"text": text} for text in documents)
    alone = preprocess(file, prefix="alone")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jsonl.batches, "__defaults__", (batch,))
        together = preprocess(file, prefix="together", flags=["--workers", str(workers)])
    assert contents(together) == contents(alone)
    assert texts(alone, GPT2Tokenizer(*tiny)) == documents


def test_append_eod_spares_empty_documents(tiny: Vocabulary, corpus_file: Write, preprocess: Run) -> None:
    prefix = preprocess(corpus_file({"text": text} for text in ODD), flags=["--append-eod"])
    expected = [text + "<|endoftext|>" if text else "" for text in ODD]
    assert texts(prefix, GPT2Tokenizer(*tiny)) == expected
    assert indexed_dataset.validate(prefix, 400).documents == len(ODD)


@pytest.mark.parametrize("workers", ["1", "2"])
def test_text_that_is_numbers(workers: str, tmp_path: Path, corpus_file: Write) -> None:
    source = corpus_file([{"text": "1 2 30"}, {"text": ""}, {"text": "99"}])
    line = ["preprocess", "--input", str(source), "--output-prefix", str(tmp_path / "n"), "--append-eod"]
    line += ["--tokenizer-type", "NullTokenizer", "--vocab-size", "99", "--workers", workers]
    assert cli.main(line) == 0
    data, _ = contents(tmp_path / "n_text_document")
    assert np.frombuffer(data, np.uint16).tolist() == [1, 2, 30, 99, 99, 99]
    assert cli.main([*line, "--null-tokenizer-eod-id", "5"]) == 0
    data, _ = contents(tmp_path / "n_text_document")
    assert np.frombuffer(data, np.uint16).tolist() == [1, 2, 30, 5, 99, 5]


@pytest.mark.parametrize(
    ("text", "flags", "named"),
    [
        ("1 two", "--tokenizer-type NullTokenizer --vocab-size 99", "numbers from 0 to 99"),
        ("1 100", "--tokenizer-type NullTokenizer --vocab-size 99 --workers 2", "numbers from 0 to 99"),
        ("1", "--tokenizer-type NullTokenizer", "requires --vocab-size"),
        (
            "1",
            "--tokenizer-type NullTokenizer --vocab-size 9 --null-tokenizer-eod-id 10",
            "must be at most --vocab-size 9",
        ),
        (
            "1",
            "--vocab-size 9",
            "--vocab-size can be used only with --tokenizer-type NullTokenizer, but got "
            "--tokenizer-type GPT2BPETokenizer",
        ),
    ],
)
def test_numbers_that_are_none(
    text: str,
    flags: str,
    named: str,
    tmp_path: Path,
    corpus_file: Write,
    capsys: pytest.CaptureFixture[str],
) -> None:
    source = corpus_file([{"text": text}])
    line = ["preprocess", "--input", str(source), "--output-prefix", str(tmp_path / "n"), *flags.split()]
    assert cli.main(line) == 2
    error = capsys.readouterr().err
    assert named in error
    assert "Traceback" not in error
    assert not list(tmp_path.glob("n_*"))


def test_several_files_are_one_corpus(tmp_path: Path, corpus_file: Write, preprocess: Run) -> None:
    whole = preprocess(corpus_file({"text": text} for text in ODD), prefix="whole")
    first = corpus_file(({"text": text} for text in ODD[:3]), "first.jsonl")
    second = tmp_path / "second.jsonl.gz"
    second.write_bytes(gzip.compress(corpus_file({"text": text} for text in ODD[3:]).read_bytes()))
    assert contents(preprocess(first, second, prefix="parts")) == contents(whole)


def test_several_keys_and_lists(
    tmp_path: Path, tiny: Vocabulary, corpus_file: Write, preprocess: Run
) -> None:
    file = corpus_file([{"text": "rose", "parts": ["a b", "", "c"]}, {"text": "", "parts": []}])
    prefix = preprocess(file, flags=["--json-keys", "text", "parts"])
    parts = tmp_path / "out_parts_document"
    assert texts(prefix, GPT2Tokenizer(*tiny)) == ["rose", ""]
    assert texts(parts, GPT2Tokenizer(*tiny)) == ["a bc", ""]
    assert indexed_dataset.validate(parts).sequences == 2


def test_the_word_table_is_bounded_and_changes_nothing(
    tiny: Vocabulary, corpus_file: Write, preprocess: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = corpus_file({"text": text} for text in ODD)
    plenty = preprocess(file, prefix="plenty")
    monkeypatch.setattr(encoder, "_WORDS_CACHED", 2)
    assert contents(preprocess(file, prefix="scarce")) == contents(plenty)
    words = encoder._WordCache(GPT2Tokenizer(*tiny), np.dtype(np.uint16))
    for word in ["a", "b", "c" * 100, "d", "e"]:
        assert words[word]
        assert len(words) <= 2


@pytest.mark.parametrize("workers", ["1", "2"])
def test_a_bad_line_leaves_everything_as_it_was(
    tmp_path: Path, corpus_file: Write, preprocess: Run, workers: str
) -> None:
    before = contents(preprocess(corpus_file([{"text": "old"}])))
    file = corpus_file([{"text": "new"}] * 2000 + [{"other": 1}, {"text": 0}], "bad.jsonl")
    with pytest.raises(UsageError, match=r"bad\.jsonl:2001: the object has no key 'text'"):
        preprocess(file, flags=["--workers", workers])
    assert contents(tmp_path / "out_text_document") == before
    assert not list(tmp_path.glob("*.partial"))


def test_input_without_text(tmp_path: Path, corpus_file: Write, preprocess: Run) -> None:
    with pytest.raises(UsageError, match="no document has text under the key 'text'"):
        preprocess(corpus_file([{"text": ""}]))
    assert not list(tmp_path.glob("out*"))


def test_what_a_killed_run_has_left_goes_at_the_next_start(corpus_file: Write, preprocess: Run) -> None:
    """Other names, and what a living process writes, stay."""
    file = corpus_file([{"text": "a"}])
    prefix = preprocess(file)
    left = [prefix.with_name(f"{prefix.name}.{end}.123456.partial") for end in ("bin", "idx")]
    other = [prefix.with_name(f"{prefix.name}2.bin.7.partial"), prefix.with_name("x.partial")]
    for path in (*left, *other):
        path.write_bytes(b"half")
    with left[1].open("r+b") as stream:
        files.claim(stream)
        preprocess(file)
        assert [path.exists() for path in (*left, *other)] == [False, True, True, True]
    preprocess(file)
    assert not left[1].exists()


def test_a_full_disk_is_one_line_and_leaves_nothing(
    tmp_path: Path,
    tiny: Vocabulary,
    corpus_file: Write,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    create = files.created

    def on_a_full_disk(path: Path, *rest: int) -> BinaryIO:
        create(path, *rest).close()
        return open("/dev/full", "wb")  # which the kernel treats as a disk without space

    monkeypatch.setattr(files, "created", on_a_full_disk)
    flags = ["--vocab-file", str(tiny.vocab_file), "--merge-file", str(tiny.merge_file)]
    file = corpus_file([{"text": SAMPLE}] * 4)
    place = ["--output-prefix", str(tmp_path / "out")]
    assert cli.main(["preprocess", "--input", str(file), *place, *flags]) == 2
    [line] = [line for line in capsys.readouterr().err.splitlines() if "error" in line]
    assert f"--output-prefix {tmp_path / 'out'}: No space left on device." in line
    assert not list(tmp_path.glob("out*"))


GPT2_LINES = [  # as documents write them; the name of the tool apart
    """--input oscar.jsonl --output-prefix meg-gpt2 --vocab gpt2-vocab.json --dataset-impl mmap
    --tokenizer-type GPT2BPETokenizer --merge-file gpt2-merges.txt --append-eod --workers 8""",
    """--input oscar.jsonl --output-prefix meg-gpt2 --vocab gpt2-vocab.json --dataset-impl mmap
    --tokenizer-type GPT2BPETokenizer --merge-file gpt2-merges.txt --append-eod""",
    """--input oscar.jsonl --output-prefix meg-gpt2 --vocab gpt2-vocab.json --dataset-impl mmap
    --tokenizer-type GPT2BPETokenizer --merge-file gpt2-merges.txt --json-keys text --workers 32
    --chunk-size 25 --append-eod""",
]


@pytest.mark.parametrize("line", GPT2_LINES)
def test_command_lines_of_megatron_s_users(
    tmp_path: Path,
    tiny: Vocabulary,
    corpus_file: Write,
    preprocess: Run,
    monkeypatch: pytest.MonkeyPatch,
    line: str,
) -> None:
    expected = preprocess(corpus_file({"text": text} for text in ODD), flags=["--append-eod"])
    monkeypatch.chdir(tmp_path)
    (tmp_path / "corpus.jsonl").rename("oscar.jsonl")
    (tmp_path / "gpt2-vocab.json").symlink_to(tiny.vocab_file)
    (tmp_path / "gpt2-merges.txt").symlink_to(tiny.merge_file)
    assert cli.main(["preprocess", *line.replace("--workers 32", "--workers 3").split()]) == 0
    assert contents(tmp_path / "meg-gpt2_text_document") == contents(expected)


def test_no_directory_for_the_output(corpus_file: Write, preprocess: Run) -> None:
    with pytest.raises(UsageError, match=r"--output-prefix .*the directory .* does not exist"):
        preprocess(corpus_file([{"text": "a"}]), prefix="absent/out")


def test_exit_codes(capsys: pytest.CaptureFixture[str], tiny: Vocabulary) -> None:
    flags = [
        "--output-prefix",
        "x",
        "--vocab-file",
        str(tiny.vocab_file),
        "--merge-file",
        str(tiny.merge_file),
    ]
    assert cli.main(["preprocess", "--input", "absent.jsonl", *flags]) == 2
    told = capsys.readouterr().err
    assert "absent.jsonl must be a text file, or a folder of text files, but there is no such file" in told
    assert cli.main(["preprocess", "--input", "absent.jsonl", "--workers", "0", *flags]) == 2
    assert "--workers must be a positive integer, but got 0" in capsys.readouterr().err


def test_reading_keeps_close_to_encoding(tiny: Vocabulary) -> None:
    """Memory is bounded because only two batches a worker are ever ahead of what was taken."""
    read = 0

    def batches() -> Iterator[jsonl.Batch]:
        nonlocal read
        for _ in range(100):
            read += 1
            yield jsonl.Batch("f", 1, b'{"text": "a"}\n', 0)

    files = GPT2Files(str(tiny.vocab_file), str(tiny.merge_file))
    recipe = encoder.Recipe(files, ("text",), False, "uint16")
    for taken, _ in enumerate(encoder.encode_all(batches(), recipe, workers=2), start=1):
        assert read - taken < 4


def test_a_killed_worker_is_said(tiny: Vocabulary) -> None:
    files = GPT2Files(str(tiny.vocab_file), str(tiny.merge_file))
    recipe = encoder.Recipe(files, ("text",), False, "uint16")
    batches = iter([jsonl.Batch("f", 1, b'{"text": "a"}\n', 0)] * 1000)
    others = set(multiprocessing.active_children())  # megatron-core keeps a process of its own
    results = encoder.encode_all(batches, recipe, workers=2)
    next(results)
    for child in set(multiprocessing.active_children()) - others:
        child.kill()
    with pytest.raises(UsageError, match="worker processes was killed"):
        list(results)


def test_a_worker_is_killed_while_another_begins(
    tiny: Vocabulary, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The pool ends that one with a SIGTERM, for which it has the handler of this process yet."""
    start, others = encoder._start_worker, set(multiprocessing.active_children())

    def late(recipe: encoder.Recipe) -> None:
        try:
            time.sleep(0.3)
        except KeyboardInterrupt:
            (tmp_path / "interrupted").touch()
            raise
        start(recipe)

    def kill_one() -> None:
        while not (found := set(multiprocessing.active_children()) - others):
            time.sleep(0.001)
        found.pop().kill()

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(encoder, "_start_worker", late)
    before = signal.signal(signal.SIGTERM, interrupt)
    killer = threading.Thread(target=kill_one)
    killer.start()
    try:
        files = GPT2Files(str(tiny.vocab_file), str(tiny.merge_file))
        recipe = encoder.Recipe(files, ("text",), False, "uint16")
        batches = iter([jsonl.Batch("f", 1, b'{"text": "a"}\n', 0)])
        with pytest.raises(UsageError, match="worker processes was killed"):
            list(encoder.encode_all(batches, recipe, workers=2))
    finally:
        signal.signal(signal.SIGTERM, before)
        killer.join()
    assert list(tmp_path.iterdir()) == []


def test_a_second_ctrl_c_does_not_leave_the_workers(
    tiny: Vocabulary, monkeypatch: pytest.MonkeyPatch
) -> None:
    end = encoder.ProcessPoolExecutor.shutdown

    def interrupted(pool: encoder.ProcessPoolExecutor, *words: bool, **named: bool) -> None:
        signal.raise_signal(signal.SIGINT)  # the second one
        end(pool, *words, **named)

    monkeypatch.setattr(encoder.ProcessPoolExecutor, "shutdown", interrupted)
    files = GPT2Files(str(tiny.vocab_file), str(tiny.merge_file))
    recipe = encoder.Recipe(files, ("text",), False, "uint16")
    batches = iter([jsonl.Batch("f", 1, b'{"text": "a"}\n', 0)] * 1000)
    others = set(multiprocessing.active_children())
    results = encoder.encode_all(batches, recipe, workers=2)
    next(results)
    with pytest.raises(KeyboardInterrupt):
        results.close()
    assert set(multiprocessing.active_children()) <= others


def test_log_lines_without_a_terminal(
    corpus_file: Write, preprocess: Run, capfd: pytest.CaptureFixture[str]
) -> None:
    preprocess(corpus_file({"text": text} for text in ODD), flags=["--log-interval", "4"])
    captured = capfd.readouterr()
    assert "8 documents" in captured.err
    assert "MB/s" in captured.err
    assert "uint16" in captured.out


@pytest.mark.skipif(sys.platform != "linux", reason="needs a pseudo-terminal")
def test_bar_on_a_terminal(tmp_path: Path, tiny: Vocabulary, corpus_file: Write) -> None:
    file = corpus_file({"text": text} for text in ODD)
    ours, terminal = os.openpty()
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("4H", 24, 120, 0, 0))  # rows, columns
    command = [
        sys.executable,
        "-m",
        "megatron_npu",
        "preprocess",
        "--input",
        str(file),
        "--log-interval",
        "1",
    ]
    command += ["--output-prefix", str(tmp_path / "out"), "--vocab-file", str(tiny.vocab_file)]
    command += ["--merge-file", str(tiny.merge_file)]
    processes.run(command, cwd=ROOT, stderr=terminal, check=True)
    os.close(terminal)
    shown = os.read(ours, 1 << 16).decode()
    os.close(ours)
    assert "100%" in shown
    assert "MB/s of text" in shown
    assert shown.count(" documents, ") == 1  # the last line; the bar stands for the others


def _members(group: int) -> list[int]:
    """Return the live processes of a process group."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[2]) == group and fields[0] != "Z":
            found.append(int(stat.parent.name))
    return found


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs /proc")
@pytest.mark.parametrize(
    ("number", "code"),
    [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129), (signal.SIGKILL, -signal.SIGKILL)],
)
def test_stopped_half_way(
    tmp_path: Path, tiny: Vocabulary, corpus_file: Write, number: signal.Signals, code: int
) -> None:
    """Ctrl-C and SIGHUP reach the whole group, the others the command alone; no worker outlives it."""
    file = corpus_file([{"text": SAMPLE * 40}])  # one line, repeated below
    file.write_bytes(file.read_bytes() * 4000)
    command = [sys.executable, "-m", "megatron_npu", "preprocess", "--input", str(file), "--workers", "2"]
    command += ["--output-prefix", str(tmp_path / "out"), "--vocab-file", str(tiny.vocab_file)]
    command += ["--merge-file", str(tiny.merge_file)]
    process = subprocess.Popen(command, cwd=ROOT, start_new_session=True, stderr=subprocess.PIPE)
    with on_a_leash(process):
        wait_until(lambda: any(path.stat().st_size for path in tmp_path.glob("out*.partial")), process)
        (os.killpg if number in (signal.SIGINT, signal.SIGHUP) else os.kill)(process.pid, number)
        _, errors = process.communicate(timeout=LONGEST)
    assert process.returncode == code
    assert b"Traceback" not in errors
    assert not list(tmp_path.glob("out*.bin")) + list(tmp_path.glob("out*.idx"))
    if number != signal.SIGKILL:
        how = "interrupted" if number == signal.SIGINT else "terminated"
        assert errors.splitlines()[-1].decode() == f"megatron-npu preprocess: {how}; nothing was written"
        assert not list(tmp_path.glob("out*"))
    wait_until(lambda: not _members(process.pid))
    indexed_dataset.Writer(str(tmp_path / "out_text_document"), np.dtype(np.uint16)).__exit__(
        None, None, None
    )
    assert not list(tmp_path.glob("out*")), "the next start cleans up"


IN_ORDER = ("--append-eod", "--partitions", "2", "--keep-sequential-samples")


@pytest.mark.parametrize("more", [(), IN_ORDER])
def test_bytes_of_the_stock_tool(
    gpt2_vocab: Vocabulary,
    corpus_file: Write,
    preprocess: Run,
    stock_tool: Callable[..., Path],
    more: tuple[str, ...],
) -> None:
    documents = [*ODD, ["a b", "", "c"], [], *(f"{SAMPLE} {number}" for number in range(60))]
    file = corpus_file({"text": text} for text in documents)
    ours = preprocess(file, vocabulary=gpt2_vocab, flags=["--workers", "2", *more])
    files = ["--vocab-file", str(gpt2_vocab.vocab_file), "--merge-file", str(gpt2_vocab.merge_file)]
    kind = ["--tokenizer-type", "GPT2BPETokenizer", "--legacy-tokenizer"]
    stock = stock_tool("--input", str(file), "--workers", "2", *kind, *files, *more)
    digests = [[hashlib.sha256(part).hexdigest() for part in contents(prefix)] for prefix in (ours, stock)]
    assert digests[0] == digests[1]


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EACCES, errno.ENOENT])
def test_a_shared_memory_is_not_called_a_disk(corpus_file, preprocess, monkeypatch, number):
    """Found by an attack: the line named --output-prefix and its disk."""

    def full(*_: object) -> None:
        raise OSError(number, os.strerror(number))  # of a semaphore, without a name

    monkeypatch.setattr(encoder, "ProcessPoolExecutor", full)
    with pytest.raises(
        UsageError, match="/dev/shm, which holds the locks of the worker processes, cannot be used"
    ):
        preprocess(corpus_file([{"text": SAMPLE}] * 3), flags=["--workers", "2"])
