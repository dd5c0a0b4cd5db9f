"""Reading lines: every compression, batches of whole lines, and lines that are no documents."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
import pickle
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_npu.base.errors import UsageError
from megatron_npu.data.preprocessing import compressed, jsonl

LINES = b"".join(b'{"text": "line %d"}\n' % number for number in range(50))


def _zstd(data: bytes) -> bytes:
    module = compressed.zstd_module()
    if module is None:
        pytest.skip("neither Python 3.14 nor backports.zstd is there")
    return module.compress(data)


COMPRESSIONS = {
    "": lambda data: data,
    ".gz": gzip.compress,
    ".xz": lzma.compress,
    ".bz2": bz2.compress,
    ".zst": _zstd,
}


@pytest.mark.parametrize("ending", COMPRESSIONS)
@pytest.mark.parametrize("parts", [1, 2])
def test_compressions(tmp_path: Path, ending: str, parts: int) -> None:
    """Several compressed streams one after another are one file, as the tools of the formats have it."""
    compress: Callable[[bytes], bytes] = COMPRESSIONS[ending]
    path = tmp_path / f"corpus.jsonl{ending}"
    path.write_bytes(compress(LINES) * parts)
    batches = list(jsonl.batches(str(path), size=100))
    assert b"".join(batch.text for batch in batches) == LINES * parts
    assert sum(batch.read for batch in batches) == path.stat().st_size


@pytest.mark.parametrize("ending", [".gz", ".xz", ".zst"])
def test_truncated_or_not_compressed(tmp_path: Path, ending: str) -> None:
    path = tmp_path / f"corpus.jsonl{ending}"
    for content in (COMPRESSIONS[ending](LINES)[:-10], b"plain text"):
        path.write_bytes(content)
        with pytest.raises(UsageError, match=r"corpus\.jsonl\S+ is damaged"):
            list(jsonl.batches(str(path)))


@given(lines=st.lists(st.binary(max_size=12).map(lambda line: line.replace(b"\n", b" "))), last=st.booleans())
def test_batches_are_whole_lines_with_their_numbers(
    tmp_path_factory: pytest.TempPathFactory, lines: list[bytes], last: bool
) -> None:
    content = b"\n".join(lines) + (b"\n" if last else b"")
    path = tmp_path_factory.getbasetemp() / "lines"
    path.write_bytes(content)
    number = 1
    batches = list(jsonl.batches(str(path), size=7))
    assert b"".join(batch.text for batch in batches) == content
    for batch in batches:
        assert batch.first_line == number
        number += batch.text.count(b"\n")
        assert batch.text.endswith(b"\n") or batch is batches[-1]


def _documents(text: bytes, *keys: str) -> list[list[list[str]]]:
    return list(jsonl.documents(jsonl.Batch("f.jsonl", 7, text, 0), keys or ("text",)))


def test_keys_and_lists() -> None:
    text = b'{"a": "x", "b": ["y", "z"]}\r\n{"b": "", "a": []}'
    assert _documents(text, "a", "b") == [[["x"], ["y", "z"]], [[], [""]]]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'{"text": "a"', "the line is not valid JSON"),
        (b"", "the line is empty"),
        (b"[" * 100_000, "the line is not valid JSON"),
        (b"1" * 5000, "the line is not valid JSON"),
        (b'["text"]', "the line is JSON of type list"),
        (b'{"body": "a"}', r"the object has no key 'text' \(the object's keys are 'body'\)"),
        (b"{}", r"the object has no key 'text' \(the object's keys are none\)"),
        (b'{"text": null}', "'text' holds NoneType"),
        (b'{"text": ["a", 1]}', "'text' holds int"),
        (b'{"text": "\xff"}', "byte 10 is not valid UTF-8"),
        (b'{"text": "\\ud83d"}', "the text under 'text' contains the lone surrogate"),
    ],
)
def test_a_line_that_is_no_document(line: bytes, message: str) -> None:
    with pytest.raises(UsageError, match=rf"^f\.jsonl:8: {message}") as caught:
        _documents(b'{"text": "a"}\n' + line + b"\n")
    copy = pickle.loads(pickle.dumps(caught.value))  # as it comes back from a worker
    assert str(copy) == str(caught.value)


def test_a_whole_surrogate_pair_is_text() -> None:
    assert _documents(json.dumps({"text": "🙂"}).encode()) == [[["🙂"]]]
