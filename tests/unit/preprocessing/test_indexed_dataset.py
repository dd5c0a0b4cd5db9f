"""The format: read by megatron-core itself, and every way in which a dataset can be broken."""

from __future__ import annotations

import os
import stat
import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from megatron_npu.base import files
from megatron_npu.base.errors import UsageError
from megatron_npu.data.preprocessing import indexed_dataset

LENGTHS = np.array([3, 1, 4], dtype=np.int32)
SEQUENCES = np.array([1, 0, 2], dtype=np.int64)  # sequences of each of three documents


def write(prefix: Path, tokens: np.ndarray | None = None) -> Path:
    tokens = np.arange(8, dtype=np.uint16) if tokens is None else tokens
    with indexed_dataset.Writer(str(prefix), tokens.dtype) as writer:
        writer.add(tokens.tobytes(), LENGTHS, SEQUENCES)
        writer.finish()
        indexed_dataset.publish([writer])
    return prefix


@pytest.mark.parametrize("dtype", [np.uint16, np.int32])
def test_megatron_core_reads_it(tmp_path: Path, dtype: type) -> None:
    from megatron.core.datasets.indexed_dataset import IndexedDataset

    dataset = IndexedDataset(str(write(tmp_path / "d", np.arange(8, dtype=dtype))), mmap=True)
    assert [dataset[i].tolist() for i in range(len(dataset))] == [[0, 1, 2], [3], [4, 5, 6, 7]]
    assert dataset.document_indices.tolist() == [0, 1, 1, 3]
    assert dataset.index.dtype is dtype


def test_megatron_core_writes_the_same_bytes(tmp_path: Path) -> None:
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    builder = IndexedDatasetBuilder(str(tmp_path / "core.bin"), dtype=np.uint16)
    for tokens, lengths in (([0, 1, 2], [3]), ([], []), ([3, 4, 5, 6, 7], [1, 4])):
        builder.add_document(tokens, lengths)
    builder.finalize(str(tmp_path / "core.idx"))
    ours = write(tmp_path / "ours")
    for end in ("bin", "idx"):
        assert (tmp_path / f"core.{end}").read_bytes() == ours.with_suffix(f".{end}").read_bytes()


@pytest.mark.parametrize(("size", "name"), [(50257, "uint16"), (65499, "uint16"), (65500, "int32")])
def test_token_type_is_the_one_of_megatron(size: int, name: str) -> None:
    from megatron.core.datasets.indexed_dataset import DType

    assert indexed_dataset.token_type(size) == np.dtype(DType.optimal_dtype(size)) == np.dtype(name)


def test_summary_and_mode(tmp_path: Path) -> None:
    prefix = write(tmp_path / "d")
    expected = indexed_dataset.DatasetSummary(np.dtype("<u2"), 3, 3, 8, largest_token=7, sampled=False)
    assert indexed_dataset.validate(prefix, vocab_size=8) == expected
    for path in tmp_path.iterdir():
        assert stat.S_IMODE(path.stat().st_mode) & 0o137 == 0  # 640 or less
    assert sorted(path.name for path in tmp_path.iterdir()) == ["d.bin", "d.idx", "d.sums.json"]


@pytest.mark.parametrize(
    ("given", "advice"),
    [
        ("text", "Did you mean {}/text_text_document?"),  # what --output-prefix was
        ("text_text_document.bin", "Did you mean {}/text_text_document?"),
        ("text_text_document.idx", "Did you mean {}/text_text_document?"),
        (
            "other",
            "Pass the path without its extension, or create the dataset with `megatron-npu preprocess`.",
        ),
    ],
)
def test_a_wrong_prefix_gets_the_dataset_that_was_meant(tmp_path: Path, given: str, advice: str) -> None:
    write(tmp_path / "text_text_document")
    with pytest.raises(UsageError) as error:
        indexed_dataset.validate(tmp_path / given)
    told = f"{tmp_path / given}.idx does not exist, but a dataset consists of a .bin and an .idx file"
    assert str(error.value) == f"{told} in the same folder. {advice.format(tmp_path)}"


def test_an_index_without_tokens_gets_no_other_name(tmp_path: Path) -> None:
    write(tmp_path / "text").with_suffix(".bin").unlink()
    with pytest.raises(UsageError, match=r"text\.bin does not exist, .* Pass the path without its extension"):
        indexed_dataset.validate(tmp_path / "text")


def test_several_chunks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = write(tmp_path / "whole").with_suffix(".idx").read_bytes()
    monkeypatch.setattr(indexed_dataset, "_CHUNK", 2)
    assert write(tmp_path / "pieces").with_suffix(".idx").read_bytes() == whole
    assert indexed_dataset.validate(tmp_path / "pieces").tokens == 8


def test_sequences_beyond_2_gib_are_where_the_index_says(tmp_path: Path) -> None:
    """In a .bin of 4.8 GB, of which all but the last 12 bytes is a hole."""
    from megatron.core.datasets.indexed_dataset import IndexedDataset

    lengths = np.array([600_000_000, 600_000_000, 3], np.int32)
    pointers = np.concatenate([*indexed_dataset._sequence_pointers(lengths, 4)])
    assert pointers.tolist() == [0, 2_400_000_000, 4_800_000_000]
    prefix = tmp_path / "d"
    with indexed_dataset.Writer(str(prefix), np.dtype("<i4")) as writer:
        writer.add(b"", lengths, np.ones(3, np.int64))
        writer.finish()
        indexed_dataset.publish([writer])
    with open(f"{prefix}.bin", "r+b") as stream:
        stream.seek(int(pointers[-1]))
        stream.write(np.array([7, 8, 9], "<i4").tobytes())
    data = IndexedDataset(str(prefix))
    assert data[2].tolist() == [7, 8, 9]
    assert data.get(1, offset=599_999_998, length=2).tolist() == [0, 0]


def test_a_large_dataset_is_sampled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(indexed_dataset, "_SAMPLE_BYTES", 8)
    monkeypatch.setattr(indexed_dataset, "_SAMPLE_BLOCKS", 2)
    summary = indexed_dataset.validate(write(tmp_path / "d"))
    assert summary.sampled
    assert summary.largest_token == 7  # the last block is always read


@pytest.mark.parametrize("end", ["bin", "idx"])
def test_missing(tmp_path: Path, end: str) -> None:
    prefix = write(tmp_path / "d")
    prefix.with_suffix(f".{end}").unlink()
    with pytest.raises(UsageError, match=rf"d\.{end} does not exist"):
        indexed_dataset.validate(prefix)


@pytest.mark.parametrize("end", ["bin", "idx"])
@pytest.mark.parametrize("cut", [1, 15])
def test_truncated(tmp_path: Path, end: str, cut: int) -> None:
    path = write(tmp_path / "d").with_suffix(f".{end}")
    os.truncate(path, path.stat().st_size - cut)
    with pytest.raises(UsageError, match=rf"d\.{end} has .* bytes, so it seems truncated"):
        indexed_dataset.validate(tmp_path / "d")


@pytest.mark.parametrize("size", [0, 5, 20, 33])
def test_truncated_in_the_header(tmp_path: Path, size: int) -> None:
    os.truncate(write(tmp_path / "d").with_suffix(".idx"), size)
    with pytest.raises(UsageError, match=r"d\.idx"):
        indexed_dataset.validate(tmp_path / "d")


def test_too_long(tmp_path: Path) -> None:
    path = write(tmp_path / "d").with_suffix(".bin")
    path.write_bytes(path.read_bytes() + b"\0\0")
    with pytest.raises(UsageError, match="18 bytes; it must have 16"):
        indexed_dataset.validate(tmp_path / "d")


LENGTHS_AT = indexed_dataset.HEADER.size
BEGINS_AT = LENGTHS_AT + 4 * 3
DOCUMENTS_AT = BEGINS_AT + 8 * 3


@pytest.mark.parametrize(
    ("at", "value", "message"),
    [
        (0, b"X", "an indexed dataset"),
        (9, struct.pack("<Q", 2), "version 2"),
        (17, b"\x06", "token type 6"),
        (18, struct.pack("<Q", 1 << 62), "bytes for its"),
        (LENGTHS_AT, struct.pack("<i", -3), "the length of a sequence must be at least 0, but it is -3"),
        (LENGTHS_AT, struct.pack("<i", 4), "sums of the lengths"),
        (BEGINS_AT + 8, struct.pack("<q", 2), "sums of the lengths"),
        (DOCUMENTS_AT, struct.pack("<q", 1), "invalid document boundaries"),
        (DOCUMENTS_AT + 8, struct.pack("<q", 3), "invalid document boundaries"),
        (DOCUMENTS_AT + 24, struct.pack("<q", 2), "invalid document boundaries"),
    ],
)
def test_damaged_index(tmp_path: Path, at: int, value: bytes, message: str) -> None:
    path = write(tmp_path / "d").with_suffix(".idx")
    content = bytearray(path.read_bytes())
    content[at : at + len(value)] = value
    path.write_bytes(content)
    with pytest.raises(UsageError, match=message):
        indexed_dataset.validate(tmp_path / "d")


def test_ids_outside_the_vocabulary(tmp_path: Path) -> None:
    prefix = write(tmp_path / "d", np.array([0, 1, 2, 3, 4, 500, 6, 7], dtype=np.uint16))
    indexed_dataset.validate(prefix, vocab_size=501)
    with pytest.raises(UsageError, match="contains the token id 500, but ids must be from 0 to 499"):
        indexed_dataset.validate(prefix, vocab_size=500)
    with pytest.raises(UsageError, match="token id -1"):
        indexed_dataset.validate(write(tmp_path / "n", np.array([0, -1, 2, 3, 4, 5, 6, 7], dtype=np.int32)))


def test_no_tokens(tmp_path: Path) -> None:
    with indexed_dataset.Writer(str(tmp_path / "d"), np.dtype(np.uint16)) as writer:
        writer.finish()
        indexed_dataset.publish([writer])
    with pytest.raises(UsageError, match="no tokens"):
        indexed_dataset.validate(tmp_path / "d")


def test_nothing_remains_of_what_was_not_published(tmp_path: Path) -> None:
    with indexed_dataset.Writer(str(tmp_path / "d"), np.dtype(np.uint16)) as writer:
        writer.add(b"\0\0", np.array([1]), np.array([1]))
        writer.finish()
        assert len(list(tmp_path.iterdir())) == 2
    assert list(tmp_path.iterdir()) == []


def test_nothing_remains_when_a_rename_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rename: Callable[[Path, Path], None] = os.replace

    def fail_at_last(source: Path, target: Path) -> None:
        if target.name == "b.idx":
            raise OSError("disk trouble")
        rename(source, target)

    monkeypatch.setattr(os, "replace", fail_at_last)
    kind = np.dtype(np.uint16)
    with (
        indexed_dataset.Writer(f"{tmp_path}/a", kind) as one,
        indexed_dataset.Writer(f"{tmp_path}/b", kind) as two,
    ):
        for writer in (one, two):
            writer.add(bytes(16), LENGTHS, SEQUENCES)
            writer.finish()
        with pytest.raises(OSError, match="disk trouble"):
            indexed_dataset.publish([one, two])
    assert list(tmp_path.iterdir()) == []


def test_a_link_at_a_temporary_name_is_not_written_through(tmp_path: Path) -> None:
    """Another user has guessed the process number; the folder is shared."""
    target = tmp_path / "precious"
    target.write_text("precious")
    for end in ("bin", "idx"):
        files.partial_file(tmp_path / f"text.{end}").symlink_to(target)
    with indexed_dataset.Writer(str(tmp_path / "text"), np.dtype(np.uint16)) as writer:
        writer.add(bytes(4), np.array([2]), np.array([1]))
        writer.finish()
        indexed_dataset.publish([writer])
    assert target.read_text() == "precious"
    assert not (tmp_path / "text.bin").is_symlink()
