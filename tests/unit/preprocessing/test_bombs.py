"""Small files that decompress to a document which no memory holds."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest

from megatron_npu.base.errors import UsageError
from megatron_npu.data.preprocessing import compressed, jsonl, plain_text


@pytest.fixture
def bomb(tmp_path: Path, monkeypatch) -> Path:
    monkeypatch.setattr(compressed, "MOST_BYTES", 1000)
    path = tmp_path / "bomb.gz"
    path.write_bytes(gzip.compress(b"0" * 5000))
    return path


def test_a_document_that_decompresses_to_too_much_is_refused(bomb: Path) -> None:
    with pytest.raises(UsageError, match="a document of over 1,000 bytes after decompression"):
        plain_text.batch(str(bomb), "text")
    with pytest.raises(UsageError, match="a document of over 1,000 bytes after decompression"):
        list(jsonl.batches(str(bomb), 100))


def test_what_is_as_large_on_the_disk_and_many_lines_are_read(bomb: Path, tmp_path: Path) -> None:
    plain = tmp_path / "plain"
    plain.write_bytes(b"0" * 5000)
    assert len(plain_text.batch(str(plain), "text").text) > 5000
    assert sum(len(batch.text) for batch in jsonl.batches(str(plain), 100)) == 5000
    lines = tmp_path / "lines.gz"
    lines.write_bytes(gzip.compress((b"1" * 99 + b"\n") * 50))
    assert sum(len(batch.text) for batch in jsonl.batches(str(lines), 120)) == 5000
