"""``--hf-dataset``: the bytes of the same documents as JSON lines, whatever holds them."""

from __future__ import annotations

import datetime
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megatron_npu.base.errors import UsageError
from megatron_npu.data.preprocessing import command, hf_rows
from tests.conftest import Vocabulary
from tests.unit.preprocessing.conftest import SAMPLE
from tests.unit.preprocessing.test_command import contents

Write, Run = Callable[..., Path], Callable[..., Path]
ROWS = [{"content": f"{SAMPLE} {number}", "license": "mit"} for number in range(12)]


@pytest.fixture
def library() -> Any:
    return pytest.importorskip(
        "datasets", reason="could not import datasets (pip install megatron_npu[data])"
    )


@pytest.fixture
def read(tiny: Vocabulary, tmp_path: Path) -> Callable[..., tuple[bytes, bytes]]:
    """Return a function: a dataset's name and flags -> the bytes of what is written for ``content``."""

    def run(name: object, *flags: str) -> tuple[bytes, bytes]:
        files = ["--vocab-file", str(tiny.vocab_file), "--merge-file", str(tiny.merge_file)]
        place = ["--output-prefix", str(tmp_path / "rows"), "--json-keys", "content", "--append-eod"]
        assert command.main(["--hf-dataset", str(name), *place, *files, *flags]) == 0
        return contents(tmp_path / "rows_content_document")

    return run


@pytest.mark.parametrize("kind", ["json", "csv", "parquet", "arrow", "folder", "saved", "saved splits"])
def test_every_format_gives_the_bytes_of_json_lines(
    library: Any,
    tmp_path: Path,
    corpus_file: Write,
    preprocess: Run,
    read: Callable[..., tuple[bytes, bytes]],
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
) -> None:
    expected = preprocess(corpus_file(ROWS), flags=["--append-eod", "--json-keys", "content"])
    rows = library.Dataset.from_list(ROWS)
    place = tmp_path / f"data.{kind}"
    if kind == "saved":
        rows.save_to_disk(str(place))
    elif kind == "saved splits":
        library.DatasetDict(train=rows, test=rows.select([0])).save_to_disk(str(place))
    elif kind == "folder":
        place.mkdir()
        rows.to_parquet(str(place / "train-00000.parquet"))
    elif kind == "arrow":
        rows.save_to_disk(str(tmp_path / "saved"))
        next((tmp_path / "saved").glob("*.arrow")).rename(place)
    else:
        getattr(rows, f"to_{kind}")(str(place))
    monkeypatch.setattr(hf_rows, "BATCH_BYTES", 500)  # several batches
    assert read(place, "--workers", "2") == contents(expected.with_name("out_content_document"))


def test_a_split_and_a_part(
    library: Any, tmp_path: Path, read: Callable[..., tuple[bytes, bytes]], tiny: Vocabulary
) -> None:
    rows = library.Dataset.from_list(ROWS)
    library.DatasetDict(train=rows, test=rows.select([0])).save_to_disk(str(tmp_path / "saved"))
    assert len(read(tmp_path / "saved", "--hf-split", "test")[0]) * 12 < len(read(tmp_path / "saved")[0]) + 30


@pytest.mark.parametrize(
    ("name", "flags", "message"),
    [
        ("data.csv", ["--json-keys", "text"], r"no column 'text' \(the columns are 'content', 'license'\)"),
        ("data.csv", ["--json-keys", "content", "license", "when"], "no column 'when'"),
        ("data.odt", [], r"must end in one of \.csv"),
        ("saved", ["--hf-split", "test"], "--hf-split test"),
        ("./absent", [], "--hf-dataset ./absent --hf-split train"),
        ("dates", ["--json-keys", "when"], "row 1 must contain text: Object of type datetime"),
        ("none.json", [], "'content' holds NoneType"),
    ],
)
def test_what_cannot_be_read(
    library: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    read: Callable[..., tuple[bytes, bytes]],
    name: str,
    flags: list[str],
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    rows = library.Dataset.from_list(ROWS)
    rows.to_csv("data.csv")
    (tmp_path / "data.odt").write_text("")
    library.DatasetDict(train=rows).save_to_disk("saved")
    library.Dataset.from_list([{"when": datetime.datetime(2020, 1, 1)}]).save_to_disk("dates")
    (tmp_path / "none.json").write_text('{"content": "a"}\n{"content": null}\n')
    with pytest.raises(UsageError, match=message):
        read(name, *flags)
    assert not list(tmp_path.glob("rows*"))


def test_without_the_library(
    read: Callable[..., tuple[bytes, bytes]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(UsageError, match=r"Install it: pip install 'megatron_npu\[data\]'"):
        read("codeparrot/codeparrot-clean-train")
