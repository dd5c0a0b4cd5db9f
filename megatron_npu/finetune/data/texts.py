"""Check that a task's columns contain texts or word lists in every row, and report where the first error
is.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from megatron_npu.base.errors import UsageError
from megatron_npu.finetune.data.parts import Parts

_STRINGS = ("string", "large_string", "string_view")


def require(parts: Parts, columns: Mapping[str, str | None], *, every: bool = True) -> None:
    """Check that the given columns contain text in every row.

    Args:
        parts: the rows of each split.
        columns: the column of each role, or None for a role without a column.
        every: whether each row must have a text. If False, a missing text is treated as an empty one.

    Raises:
        UsageError: a column contains values other than text, or a row has no text.
    """
    for part, rows in parts.items():
        for role, column in columns.items():
            if column is not None:
                _require_kind(rows.features[column], part, role, column, "texts")
                if every:
                    _require_values(parts, part, role, column)


def require_words(parts: Parts, tokens: str, tags: str) -> None:
    """Check that each row has a list of words and a list with the same number of tags.

    Raises:
        UsageError: a row does not contain these lists, or the lists' lengths differ.
    """
    for part, rows in parts.items():
        words = getattr(rows.features[tokens], "feature", None)
        _require_kind(words, part, "tokens", tokens, "lists of words")
        for role, column in (("tokens", tokens), ("tags", tags)):
            _require_values(parts, part, role, column)
        _require_pairs(parts, part, tokens, tags)


def _require_pairs(parts: Parts, part: str, tokens: str, tags: str) -> None:
    both = parts[part].select_columns([tokens, tags])[:]
    for row, (words, own) in enumerate(zip(both[tokens], both[tags], strict=True)):
        if len(words) != len(own):
            raise UsageError(
                f"there are {len(words)} words but {len(own)} tags in {parts.place(part, row)}, which "
                f"starts with {' '.join(map(str, words[:5]))!r}; each word must have one tag. Correct the "
                "row, or remove it."
            )
        if None in words:
            raise UsageError(
                f"word {words.index(None) + 1} is missing in {parts.place(part, row)}, column {tokens!r}. "
                "Correct the row, or remove it."
            )


def _require_kind(feature: Any, part: str, role: str, column: str, expected: str) -> None:
    kind = getattr(feature, "dtype", None)
    if kind not in _STRINGS:
        holds = f"holds {kind}" if isinstance(kind, str) and kind != "null" else f"contains no {expected}"
        raise UsageError(
            f"the column {column!r} of the split {part!r} must contain {expected}, but it {holds}. Choose "
            f"another column with --columns {role}=NAME, or convert its contents to {expected}."
        )


def _require_values(parts: Parts, part: str, role: str, column: str) -> None:
    rows = parts[part]
    if rows.data.column(column).null_count:  # of the whole file: the row may be of another part
        row = _first_without(rows.select_columns([column])[:][column])
        if row is not None:
            raise UsageError(
                f"{parts.place(part, row)} has no {role} in the column {column!r}. Correct the row, or "
                "remove it."
            )


def _first_without(values: Iterable[Any]) -> int | None:
    return next((row for row, value in enumerate(values) if value is None), None)
