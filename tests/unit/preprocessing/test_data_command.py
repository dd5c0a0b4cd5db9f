"""``megatron-npu data``: what is in datasets, and several in one; and rows that are left out."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path

import numpy as np
import pytest

from megatron_npu.base.errors import UsageError
from megatron_npu.commands import cli
from megatron_npu.data.preprocessing import command, data_command, indexed_dataset

NULL = ["--tokenizer-type", "NullTokenizer", "--vocab-size", "99"]


def written(folder: Path, name: str, texts: list[object], *flags: str) -> str:
    """Preprocess texts of numbers; return the dataset's prefix."""
    source = folder / f"{name}.jsonl"
    source.write_text("".join(line if isinstance(line, str) else json.dumps(line) + "\n" for line in texts))
    prefix = str(folder / name)
    assert command.main(["--input", str(source), "--output-prefix", prefix, *NULL, *flags]) == 0
    return f"{prefix}_text_document"


@pytest.fixture
def two(tmp_path: Path) -> list[str]:
    return [
        written(tmp_path, "one", [{"text": "1 2 3"}, {"text": ""}, {"text": "4"}]),
        written(tmp_path, "two", [{"text": "5 6"}], "--append-eod"),
    ]


def test_what_is_in_it(two: list[str], capsys) -> None:
    capsys.readouterr()
    assert cli.main(["data", "inspect", "--json", two[0]]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["documents"], found["sequences"], found["tokens"]) == (3, 2, 4)
    assert (found["empty_documents"], found["largest_id"], found["type"]) == (1, 4, "uint16")
    assert found["tokens_of_a_document"] == {"least": 0, "median": 1, "most": 3}
    assert found["checksums"]
    assert cli.main(["data", "inspect", f"{two[0]}.bin"]) == 0
    assert "tokens of a document   least 0, median 1, most 3" in capsys.readouterr().out


def test_several_are_counted_together(two: list[str], capsys) -> None:
    capsys.readouterr()
    assert cli.main(["data", "count", *two]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "total: 4 documents, 3 sequences, 7 tokens"


def test_documents_are_shown_as_ids_or_text(two: list[str], gpt2_vocab, tmp_path: Path, capsys) -> None:
    capsys.readouterr()
    assert cli.main(["data", "decode", two[0], "--document", "1", "--count", "9"]) == 0
    assert capsys.readouterr().out == "document 1: 0 tokens\n\ndocument 2: 1 tokens\n4\n"
    (tmp_path / "text.jsonl").write_text('{"text": "Ein Übermut"}\n')
    files = ["--vocab-file", str(gpt2_vocab.vocab_file), "--merge-file", str(gpt2_vocab.merge_file)]
    command.main(["--input", str(tmp_path / "text.jsonl"), "--output-prefix", str(tmp_path / "text"), *files])
    capsys.readouterr()
    assert cli.main(["data", "decode", str(tmp_path / "text_text_document"), *files]) == 0
    assert capsys.readouterr().out.endswith(" tokens\nEin Übermut\n")
    assert cli.main(["data", "decode", two[0], "--document", "3"]) == 2
    assert (
        "--document must be from 0 to 2, because the dataset has 3 documents, but got 3"
        in capsys.readouterr().err
    )


def test_a_full_disk_is_named(two, tmp_path, monkeypatch, capsys):
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(indexed_dataset.Writer, "add", full)
    assert cli.main(["data", "merge", *two, "--output-prefix", str(tmp_path / "both")]) == 1
    assert f"No space left on device: '{tmp_path / 'both'}.bin'" in capsys.readouterr().err


def test_merged_they_are_what_one_run_would_have_written(
    two: list[str], tmp_path: Path, monkeypatch, capsys
) -> None:
    monkeypatch.setattr(data_command, "_PIECE", 2)
    assert cli.main(["data", "merge", *two, "--output-prefix", str(tmp_path / "both")]) == 0
    whole = written(tmp_path, "whole", [{"text": text} for text in ("1 2 3", "", "4", "5 6 99")])
    for end in ("bin", "idx"):
        assert Path(f"{tmp_path}/both.{end}").read_bytes() == Path(f"{whole}.{end}").read_bytes()
    assert cli.main(["data", "verify", f"{tmp_path}/both"]) == 0
    (tmp_path / "both.sums.json").unlink()
    assert cli.main(["data", "verify", f"{tmp_path}/both"]) == 1
    assert cli.main(["data", "merge", *two, "--output-prefix", two[1]]) == 2
    assert "is one of the datasets to merge" in capsys.readouterr().err


def test_datasets_of_two_types_are_not_merged(two: list[str], tmp_path: Path) -> None:
    with indexed_dataset.Writer(str(tmp_path / "wide"), np.dtype(np.int32)) as writer:
        writer.add(np.array([1], np.int32).tobytes(), np.array([1]), np.array([1]))
        writer.finish()
        indexed_dataset.publish([writer])
    with pytest.raises(UsageError, match=r"the datasets must have the same token dtype .* differ: .*int32"):
        data_command.main(["merge", two[0], str(tmp_path / "wide"), "--output-prefix", str(tmp_path / "x")])


BAD = [{"text": "1"}, "no JSON\n", "\n", {"text": None}, {"text": "2 3"}]


@pytest.mark.parametrize("workers", ["1", "2"])
def test_bad_rows_are_left_out_and_named(tmp_path: Path, workers: str, capsys) -> None:
    prefix = written(tmp_path, "some", BAD, "--skip-bad-rows", "3", "--workers", workers)
    assert indexed_dataset.validate(prefix).tokens == 3
    rows = [json.loads(line) for line in (tmp_path / "some.skipped.jsonl").read_text().splitlines()]
    assert [(row["line"], row["begins"]) for row in rows] == [(2, "no JSON"), (3, ""), (4, '{"text": null}')]
    assert rows[1]["why"] == "the line is empty"
    assert f"skipped 3 malformed rows: {tmp_path}/some.skipped.jsonl" in capsys.readouterr().err
    written(tmp_path, "some", [{"text": "1"}])
    assert not (tmp_path / "some.skipped.jsonl").exists()


def test_more_bad_rows_than_are_allowed_end_it(tmp_path: Path) -> None:
    with pytest.raises(
        UsageError, match=r"some.jsonl:4: 'text' holds NoneType; this is malformed row number 3"
    ):
        written(tmp_path, "some", BAD, "--skip-bad-rows", "2")
    with pytest.raises(UsageError, match=r"some.jsonl:2: the line is not valid JSON .*--skip-bad-rows N"):
        written(tmp_path, "some", BAD)
    assert not list(tmp_path.glob("some_*"))


def test_a_table_is_an_input(tmp_path: Path, capsys) -> None:
    """Parquet and csv, in which NA and null are texts like others, and an empty cell is a bad row."""
    library = pytest.importorskip("datasets")
    library.Dataset.from_dict({"text": ["1 2", "3"]}).to_parquet(tmp_path / "rows.parquet")
    command.main(["--input", str(tmp_path / "rows.parquet"), "--output-prefix", str(tmp_path / "p"), *NULL])
    assert indexed_dataset.validate(tmp_path / "p_text_document").tokens == 3
    from megatron_npu.data.preprocessing.hf_rows import Rows

    (tmp_path / "rows.csv").write_text("text,n\nNA,1\nnull,2\n,3\n")
    rows = Rows.opened(str(tmp_path / "rows.csv"), None, "train", ["text"], "--input")
    (batch,) = rows.batches()
    assert [json.loads(line)["text"] for line in batch.text.splitlines()] == ["NA", "null", None]
    with pytest.raises(UsageError, match=r"--input .*rows.csv has no column 'words'"):
        list(Rows.opened(str(tmp_path / "rows.csv"), None, "train", ["words"], "--input").batches())


@pytest.mark.parametrize("action", ["inspect", "count", "verify"])
def test_a_terminal_does_not_act_on_the_name_of_a_dataset(tmp_path: Path, capsys, action: str) -> None:
    """As ``data verify folder/*.bin`` passes it, in a folder of another user."""
    prefix = written(tmp_path, "\x1b]0;x\x07", [{"text": "1 2 3"}])
    capsys.readouterr()
    assert cli.main(["data", action, prefix]) == 0
    told = capsys.readouterr().out
    assert r"\x1b]0;x\x07_text_document" in told
    assert not {"\x1b", "\x07"} & {*told}
