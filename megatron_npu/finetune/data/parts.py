"""Store the splits of a dataset, with the position of each row in the user's files."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from datasets import Dataset

_WITH_HEAD = (".csv", ".tsv")


class Parts(dict[str, Any]):
    """The rows of each split by name, with the position of each row in the user's files.

    Args:
        rows: the rows of each split.
        files: the files of each split, as named by the user; a split without an entry does not come from
            files.
    """

    def __init__(
        self, rows: Mapping[str, Dataset], files: Mapping[str, Sequence[Path]] | None = None
    ) -> None:
        super().__init__(rows)
        self._files = dict(files or {})
        self._taken: dict[str, tuple[str, Sequence[int]]] = {}

    def split(self, part: str, rows: Mapping[str, Sequence[int]]) -> None:
        """Divide the rows of one split among several splits.

        Args:
            part: the split; it may be one of the results.
            rows: the row numbers for each resulting split.
        """
        whole = self.pop(part)
        source, before = self._taken.pop(part, (part, None))
        for name, numbers in rows.items():
            self[name] = whole.select(numbers)
            self._taken[name] = source, _of(before, numbers)

    def keep(self, part: str, numbers: Sequence[int]) -> None:
        """Remove all rows of a split except those whose numbers are in ``numbers``."""
        self.split(part, {part: numbers})

    def tell_rows(self, part: str, numbers: Sequence[int]) -> None:
        """Record which rows of the files remain in a split after rows have been removed from it."""
        self._taken[part] = part, numbers

    def numbered(self, part: str, row: int) -> tuple[str, int]:
        """Return the file that contains a row, and the row's number in the file, counted from 1.

        If the file is unknown, return the split.
        """
        source, numbers = self._taken.get(part, (part, None))
        files = self._files.get(source, ())
        place = str(files[0]) if len(files) == 1 else f"part {source!r}"
        return place, (row if numbers is None else int(numbers[row])) + 1

    def changed(self, change: Callable[[Dataset], Dataset]) -> Parts:
        """Return the splits with changed columns but the same row positions."""
        found = Parts({part: change(rows) for part, rows in self.items()}, self._files)
        found._taken = self._taken
        return found

    def place(self, part: str, row: int) -> str:
        """Describe the position of a row, such as ``row 7 below the header of reviews.csv (split 'train')``.

        Args:
            part: the split that contains the row.
            row: the row's number in the split, from 0.
        """
        source, numbers = self._taken.get(part, (part, None))
        number = (row if numbers is None else int(numbers[row])) + 1
        files = self._files.get(source, ())
        if len(files) == 1:
            head = "below the header of" if files[0].suffix in _WITH_HEAD else "of"
            return f"row {number} {head} {files[0]} (split {part!r})"
        taken = f", used for {part!r}" if source != part else ""
        return f"row {number} of the split {source!r}{taken}"


def _of(before: Sequence[int] | None, numbers: Sequence[int]) -> Sequence[int]:
    """Convert row numbers in a selection to row numbers in the original rows."""
    return numbers if before is None else [int(before[number]) for number in numbers]
