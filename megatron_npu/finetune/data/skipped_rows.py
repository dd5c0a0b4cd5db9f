"""Implement ``--skip-bad-rows N`` of ``train``, which skips malformed rows, counts them, and lists them in a
file.

Malformed rows are JSON lines that are not objects, table rows with more or fewer cells than the header, rows
that are not UTF-8, and rows without a value that the task needs.
"""

from __future__ import annotations

import contextlib
import csv
import io
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from megatron_npu.base import files
from megatron_npu.base.errors import UsageError
from megatron_npu.data.preprocessing.bad_rows import FLAG
from megatron_npu.data.preprocessing.jsonl import BadRow
from megatron_npu.finetune.data.parts import Parts
from megatron_npu.finetune.run.flag_parts import SkipFlags

FILE = "skipped_rows.jsonl"  # in --save
_BEGINS = 80  # characters of a bad row that are shown
_SEPARATORS = {".csv": ",", ".tsv": "\t"}

Row = tuple[int, str, str]  # its line, what it is written as, and what is wrong with it, or nothing


class Skipped:
    """A record of the rows that have been skipped so far.

    Args:
        flags: how many rows may be skipped, and where they are listed.
    """

    def __init__(self, flags: SkipFlags) -> None:
        self._flags, self._most = flags, flags.skip_bad_rows
        self._rows: list[BadRow] = []

    def add(self, row: BadRow) -> None:
        """Add a skipped row to the record.

        Raises:
            UsageError: more rows are skipped than allowed.
        """
        self._rows.append(row)
        if len(self._rows) > self._most:
            raise UsageError(
                f"{row.file}:{row.line}: {row.why}; this is malformed row number {len(self._rows)}, but "
                f"{FLAG} allows at most {self._most}. Correct the files, or pass a larger number."
            )

    def publish(self) -> None:
        """On rank 0, log the number of skipped rows, and list the rows in ``--save`` or on stderr."""
        if self._flags.rank or not self._rows:
            return
        text = "".join(json.dumps(asdict(row)) + "\n" for row in self._rows)
        where = "these"
        if self._flags.save:
            where = str(Path(self._flags.save) / FILE)
            files.write(Path(where), text)
        print(
            f"megatron-npu train: skipped {len(self._rows)} malformed rows: {where}",
            file=sys.stderr,
            flush=True,
        )
        if not self._flags.save:
            print(text, end="", file=sys.stderr, flush=True)


def copies(
    parts: Mapping[str, Sequence[Path]], folder: Path, skipped: Skipped
) -> tuple[dict[str, list[Path]], dict[str, list[int]]]:
    """Write copies of the data files without the malformed rows.

    Args:
        parts: the files of each split.
        folder: the folder for the copies.
        skipped: the object that collects the skipped rows.

    Returns:
        The copies of each split's files, and the numbers of the rows that the copies contain, counted from 0
        over all files of the split.
    """
    found: dict[str, list[Path]] = {}
    numbers: dict[str, list[int]] = {}
    for part, paths in parts.items():
        begin, kept = 0, numbers.setdefault(part, [])
        for number, path in enumerate(paths):
            reader = _reader(path)
            if reader is None:
                found.setdefault(part, []).append(path)
                continue
            copy = folder / f"{part}-{number}{path.suffix}"
            head, rows = reader(path)
            with copy.open("w", encoding="utf-8", newline="") as stream:
                stream.write(head)
                for line, text, why in rows:
                    if why:
                        skipped.add(BadRow(str(path), line, why, text[:_BEGINS].rstrip("\n")))
                    else:
                        stream.write(text)
                        kept.append(begin)
                    begin += 1
            found.setdefault(part, []).append(copy)
    return found, {part: rows for part, rows in numbers.items() if rows}


def first(parts: Mapping[str, Sequence[Path]]) -> BadRow | None:
    """Return the first malformed row of the files, or None if every row can be read."""
    for path in (path for paths in parts.values() for path in paths):
        reader = _reader(path)
        with contextlib.suppress(OSError, csv.Error):  # then the file is at fault, and not a row
            for line, text, why in reader(path)[1] if reader else ():
                if why:
                    return BadRow(str(path), line, why, text[:_BEGINS].rstrip("\n"))
    return None


def without_value(parts: Parts, columns: Sequence[str], skipped: Skipped) -> None:
    """Skip rows that have no value in one of the required columns.

    A test split may have hidden labels.
    """
    for part in [part for part in parts if part != "test" and columns]:
        values = parts[part].select_columns(list(columns))[:]
        kept = []
        for row in range(len(parts[part])):
            missing = next((column for column in columns if values[column][row] is None), None)
            if missing is None:
                kept.append(row)
            else:
                place, number = parts.numbered(part, row)
                skipped.add(BadRow(place, number, f"the column {missing!r} has no value", ""))
        if len(kept) < len(parts[part]):
            parts.keep(part, kept)


def _reader(path: Path) -> Callable[[Path], tuple[str, Iterator[Row]]] | None:
    """Return a function that reads a file's rows, or None for formats in which single rows cannot be
    malformed.
    """
    if path.suffix in _SEPARATORS:
        return _of_a_table
    if path.suffix == ".txt":
        return lambda path: ("", _lines(path))
    if path.suffix == ".jsonl" or (path.suffix == ".json" and not _is_a_list(path)):
        return lambda path: ("", _of_json_lines(path))
    return None


def _is_a_list(path: Path) -> bool:
    with path.open("rb") as stream:
        return stream.read(1024).lstrip().startswith(b"[")


def _lines(path: Path) -> Iterator[Row]:
    with path.open("rb") as stream:
        for number, line in enumerate(stream, 1):
            try:
                yield number, line.decode("utf-8"), ""
            except UnicodeDecodeError as error:
                yield (
                    number,
                    line.decode("utf-8", "backslashreplace"),
                    f"byte {error.start} is not valid UTF-8",
                )


def _of_json_lines(path: Path) -> Iterator[Row]:
    for number, text, why in _lines(path):
        if text.strip():
            yield number, text, why or _no_object(text)


def _no_object(text: str) -> str:
    try:
        value = json.loads(text.rstrip())
    except json.JSONDecodeError as error:  # whose own "line 1" is not the file's
        return f"the line is not valid JSON ({error.msg}: column {error.colno})"
    except (ValueError, RecursionError) as error:
        return f"the line is not valid JSON ({error})"
    return (
        "" if isinstance(value, dict) else f"the line is JSON of type {type(value).__name__}, not an object"
    )


def _of_a_table(path: Path) -> tuple[str, Iterator[Row]]:
    """Return the header and the rows of a table file.

    A row may span several lines.
    """
    separator = _SEPARATORS[path.suffix]
    text = path.read_bytes().decode("utf-8-sig", "surrogateescape")
    rows = csv.reader(io.StringIO(text, newline=""), delimiter=separator)
    head = next(rows, [])
    return _as_text(head, separator), _rows_of_a_table(rows, len(head), separator)


def _rows_of_a_table(rows: Any, width: int, separator: str) -> Iterator[Row]:
    for cells in rows:
        if not cells:
            continue
        text, why = _as_text(cells, separator), ""
        if len(cells) != width:
            why = f"the row has {len(cells)} cells, but the header has {width}"
        elif any("\udc80" <= letter <= "\udcff" for letter in text):
            why = "it contains a byte that is not valid UTF-8"
        if why:
            text = text.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")
        yield rows.line_num, text, why


def _as_text(cells: Sequence[str], separator: str) -> str:
    stream = io.StringIO(newline="")
    csv.writer(stream, delimiter=separator, lineterminator="\n").writerow(cells)
    return stream.getvalue()
