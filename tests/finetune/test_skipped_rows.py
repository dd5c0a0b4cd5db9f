"""``train --skip-bad-rows N``: bad rows are left out, counted, written down; by default the first stops."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import pytest

from megatron_npu.base.errors import UsageError
from megatron_npu.finetune.tasks.causal_lm import CausalLM
from megatron_npu.finetune.tasks.sequence_classification import SequenceClassification
from tests.finetune.test_data import _own_cache

__all__ = ["_own_cache"]

LINES = [
    b'{"sentence": "one", "label": 0}\n',
    b"no json\n",
    b'{"sentence": "two", "label": 1}\n',
    b"\n",
    b'{"sentence": null, "label": 1}\n',
    b'{"sentence": "\xff", "label": 1}\n',
    b'["three"]\n',
    b'{"sentence": "four", "label": 0}\n',
]
TABLE = b'sentence,label\none,0\n"two\nlines",1\nthree\n"null",1\n,1\n\xff,0\n"a ""word""",1,2\n'


def parts(path: Path, most: int, kind: type = SequenceClassification, **changes: Any) -> Any:
    """Return the parts as a task of these flags reads them."""
    task = object.__new__(kind)
    flags = {"data_path": str(path), "data_name": None, "columns": [], "save": None, "rank": 0, "seed": 1}
    task.args = argparse.Namespace(**flags, validation_fraction=0.4, skip_bad_rows=most)
    vars(task.args).update(changes)
    return task.parts


def written(folder: Path) -> list[tuple[int, str]]:
    rows = map(json.loads, (folder / "skipped_rows.jsonl").read_text().splitlines())
    return [(row["line"], row["why"]) for row in rows]


def every(found: Any) -> set[str]:
    return {text for rows in found.values() for text in rows["sentence"]}


def test_json_lines(tmp_path, capsys):
    (tmp_path / "rows.jsonl").write_bytes(b"".join(LINES))
    found = parts(tmp_path / "rows.jsonl", 4, save=str(tmp_path))
    assert every(found) == {"one", "two", "four"}
    (broken, utf8, kind, nothing) = written(tmp_path)
    assert broken[0] == 2
    assert broken[1].startswith("the line is not valid JSON")
    assert utf8 == (6, "byte 14 is not valid UTF-8")
    assert kind == (7, "the line is JSON of type list, not an object")
    assert nothing == (4, "the column 'sentence' has no value")  # of those with something on the line
    assert f"skipped 4 malformed rows: {tmp_path / 'skipped_rows.jsonl'}" in capsys.readouterr().err


def test_a_table(tmp_path, capsys):
    (tmp_path / "rows.csv").write_bytes(TABLE)
    found = parts(tmp_path / "rows.csv", 9)
    assert every(found) == {"one", "two\nlines", "null"}
    told = capsys.readouterr().err
    assert "skipped 4 malformed rows: these" in told
    assert "the row has 1 cells, but the header has 2" in told
    assert "the row has 3 cells, but the header has 2" in told
    assert "it contains a byte that is not valid UTF-8" in told


def test_a_row_of_a_language_model_may_be_empty(tmp_path):
    (tmp_path / "rows.txt").write_bytes(b"one\n\xff\ntwo\nthree\n")
    found = parts(tmp_path / "rows.txt", 1, CausalLM)
    assert {text for rows in found.values() for text in rows["text"]} == {"one", "two", "three"}


def test_one_too_many_stops_and_so_does_the_first_by_default(tmp_path):
    (tmp_path / "rows.jsonl").write_bytes(b"".join(LINES))
    with pytest.raises(
        UsageError, match=r"rows.jsonl:7: the line is JSON of type list.*malformed row number 3.*at most 2"
    ):
        parts(tmp_path / "rows.jsonl", 2)
    with pytest.raises(UsageError, match="is not UTF-8"):
        parts(tmp_path / "rows.jsonl", 0)


@pytest.mark.parametrize(
    ("name", "text", "told"),
    [
        (
            "rows.jsonl",
            b"".join(LINES[i] for i in (0, 2, 3, 1, 7)),
            "rows.jsonl:4: the line is not valid JSON",
        ),
        (
            "rows.jsonl",
            LINES[0] + b'{"sentence": "cut", "label":\n' + LINES[2],
            "rows.jsonl:2: the line is not valid JSON (Expecting value: column 29).",
        ),
        (
            "rows.json",
            LINES[0] + LINES[6] + LINES[7],
            "rows.json:2: the line is JSON of type list, not an object",
        ),
        (
            "rows.csv",
            b"sentence,label\none,0\ntwo,1,2\n",
            "rows.csv:3: the row has 3 cells, but the header has 2",
        ),
    ],
)
def test_by_default_the_line_its_fault_and_the_flag_are_told(tmp_path, name, text, told):
    (tmp_path / name).write_bytes(text)
    with pytest.raises(UsageError) as caught:
        parts(tmp_path / name, 0)
    message = str(caught.value)
    assert f"{tmp_path}/{told}" in message
    assert "skip malformed rows with --skip-bad-rows N" in message
    assert "\n" not in message


def test_rows_have_the_numbers_of_the_file(tmp_path):
    lines = [LINES[0], LINES[1], *LINES[2:3] * 8]
    (tmp_path / "rows.jsonl").write_bytes(b"".join(lines))
    found = parts(tmp_path / "rows.jsonl", 1)
    places = {found.numbered(part, row)[1] for part in found for row in range(len(found[part]))}
    assert places == {1, *range(3, 11)}
