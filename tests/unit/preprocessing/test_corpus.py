"""What ``--input`` means: JSON lines, plain text, folders, patterns."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from megatron_npu.base.errors import UsageError
from megatron_npu.data.preprocessing import plain_text
from megatron_npu.data.tokenization.gpt2_bpe import GPT2Tokenizer
from tests.conftest import Vocabulary
from tests.unit.preprocessing.conftest import SAMPLE
from tests.unit.preprocessing.test_command import contents, texts

Run = Callable[..., Path]


@pytest.fixture
def books(tmp_path: Path) -> Path:
    """A folder with three books, one of them compressed and deeper, a JSON file, and things to leave out."""
    folder = tmp_path / "books"
    (folder / "deeper").mkdir(parents=True)
    (folder / "b.txt").write_text(SAMPLE + "\n\n", encoding="utf-8")
    (folder / "a.txt").write_text("first\nbook", encoding="utf-8-sig")
    (folder / "deeper" / "c.txt.gz").write_bytes(gzip.compress(b"third"))
    (folder / "d.jsonl").write_text(json.dumps({"text": "a line"}) + "\n")
    (folder / "cover.jpg").write_bytes(b"\xff\xd8")
    (folder / ".hidden.txt").write_text("never")
    return folder


def test_a_folder_is_all_its_text_in_the_order_of_names(
    tiny: Vocabulary, books: Path, preprocess: Run, capfd: pytest.CaptureFixture[str]
) -> None:
    prefix = preprocess(books, flags=["--workers", "2"])
    assert texts(prefix, GPT2Tokenizer(*tiny)) == ["first\nbook", SAMPLE + "\n\n", "a line", "third"]
    assert "ignoring files of other types: 1" in capfd.readouterr().err


def test_a_pattern_is_the_files_that_it_matches(tiny: Vocabulary, books: Path, preprocess: Run) -> None:
    prefix = preprocess(books / "**" / "*.txt*")
    assert texts(prefix, GPT2Tokenizer(*tiny)) == ["first\nbook", SAMPLE + "\n\n", "third"]


def test_json_lines_may_be_called_txt(
    tiny: Vocabulary, tmp_path: Path, preprocess: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For Megatron's tools a name means nothing; a text that only looks like JSON stays a text."""
    file = tmp_path / "corpus.txt"
    file.write_text(json.dumps({"text": "one"}) + "\n" + json.dumps({"text": "two"}) + "\n")
    assert texts(preprocess(file), GPT2Tokenizer(*tiny)) == ["one", "two"]
    file.write_text("{not json}\ntwo")
    assert texts(preprocess(file), GPT2Tokenizer(*tiny)) == ["{not json}\ntwo"]
    monkeypatch.setattr(plain_text, "_HEAD", 64)
    line = json.dumps({"text": "x" * 100})  # longer than what is looked at
    file.write_text(line + "\n" + line + "\n")
    assert len(texts(preprocess(file), GPT2Tokenizer(*tiny))) == 2


def test_plain_text_goes_where_the_key_says(tmp_path: Path, books: Path, preprocess: Run) -> None:
    preprocess(books / "b.txt", flags=["--json-keys", "content"])
    assert contents(tmp_path / "out_content_document")[0]
    with pytest.raises(
        UsageError, match=r"--json-keys must be a single key for .*b\.txt, .* but got text title"
    ):
        preprocess(books / "b.txt", flags=["--json-keys", "text", "title"])


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("absent.txt", "no such file"),
        ("absent*.txt", "no such file"),
        ("empty", "but none of its 0 files has the extension .txt, .json, .jsonl"),
        ("latin.txt", "byte 3 is not valid UTF-8"),
    ],
)
def test_what_is_no_text(tmp_path: Path, preprocess: Run, name: str, message: str) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "latin.txt").write_bytes("caf\xe9".encode("latin-1"))
    with pytest.raises(UsageError, match=f"--input .* {message}"):
        preprocess(tmp_path / name)
    assert not list(tmp_path.glob("out*"))


def test_input_or_a_dataset_of_hugging_face(tiny: Vocabulary, preprocess: Run, books: Path) -> None:
    with pytest.raises(UsageError, match="both --input and --hf-dataset were given"):
        preprocess(books, flags=["--hf-dataset", "x"])
