"""Splits of a dataset, and the position of each row in the user's files."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from datasets import Dataset

_WITH_HEAD = (".csv", ".tsv")


class Parts(dict[str, Any]):
    """The rows of each part by its name; messages about a row ask where the user finds it.

    Args:
        rows: of each part.
        files: those that a part was read from, as the user named them; a part without is none of files.
    """

    def __init__(
        self, rows: Mapping[str, Dataset], files: Mapping[str, Sequence[Path]] | None = None
    ) -> None:
        super().__init__(rows)
        self._files = dict(files or {})
        self._taken: dict[str, tuple[str, Sequence[int]]] = {}

    def split(self, part: str, rows: Mapping[str, Sequence[int]]) -> None:
        """Put rows of one part into several.

        Args:
            part: the one; it may be among the several.
            rows: the numbers that each of them gets.
        """
        whole = self.pop(part)
        source, before = self._taken.pop(part, (part, None))
        for name, numbers in rows.items():
            self[name] = whole.select(numbers)
            self._taken[name] = source, _of(before, numbers)

    def keep(self, part: str, numbers: Sequence[int]) -> None:
        """Leave rows of a part out; ``numbers`` are those that stay."""
        self.split(part, {part: numbers})

    def tell_rows(self, part: str, numbers: Sequence[int]) -> None:
        """Be told which rows of its files a part has, where some were left out before."""
        self._taken[part] = part, numbers

    def numbered(self, part: str, row: int) -> tuple[str, int]:
        """Return the file of a row, or the part where that is not known, and its number there, from 1 on."""
        source, numbers = self._taken.get(part, (part, None))
        files = self._files.get(source, ())
        place = str(files[0]) if len(files) == 1 else f"part {source!r}"
        return place, (row if numbers is None else int(numbers[row])) + 1

    def changed(self, change: Callable[[Dataset], Dataset]) -> Parts:
        """Return the parts with something done to their columns; rows stay where they are."""
        found = Parts({part: change(rows) for part, rows in self.items()}, self._files)
        found._taken = self._taken
        return found

    def place(self, part: str, row: int) -> str:
        """Return in words where a row stands: ``row 7 below the head of reviews.csv (part 'train')``.

        Args:
            part: its part.
            row: its number there, from 0 on.
        """
        source, numbers = self._taken.get(part, (part, None))
        number = (row if numbers is None else int(numbers[row])) + 1
        files = self._files.get(source, ())
        if len(files) == 1:
            head = "below the head of" if files[0].suffix in _WITH_HEAD else "of"
            return f"row {number} {head} {files[0]} (part {part!r})"
        taken = f", used for {part!r}" if source != part else ""
        return f"row {number} of the part {source!r}{taken}"


def _of(before: Sequence[int] | None, numbers: Sequence[int]) -> Sequence[int]:
    """Return what numbers of rows are in the whole of which those were taken before."""
    return numbers if before is None else [int(before[number]) for number in numbers]
