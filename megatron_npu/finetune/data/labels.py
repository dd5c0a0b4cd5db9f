"""Collect the labels of a dataset: class numbers, class names, or numbers for regression."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from megatron_npu.base import digits
from megatron_npu.base.errors import UsageError
from megatron_npu.finetune.data.parts import Parts
from megatron_npu.finetune.rapidformer.state import get_logger

if TYPE_CHECKING:
    from datasets import Dataset

IGNORED = -100  # of a position that has none, as torch's and Transformers' losses have it
_SHOWN = 8  # of many labels, in a message
HIDDEN = -1  # what the hub's data sets have for labels that are not given away


@dataclass(frozen=True)
class Labels:
    """The labels that occur in a dataset.

    Attributes:
        names: names of the classes, in order; empty for regression.
        numbers: the class number of each label value in the data.
    """

    names: tuple[str, ...]
    numbers: Mapping[Any, int]

    @property
    def regression(self) -> bool:
        """True if the labels are numbers for a regression task."""
        return not self.names

    def config(self) -> dict[str, Any]:
        """Return the label settings for a model's configuration."""
        if self.regression:
            return {"num_labels": 1, "problem_type": "regression"}
        return {
            "num_labels": len(self.names),
            "id2label": dict(enumerate(self.names)),
            "label2id": {name: number for number, name in enumerate(self.names)},
        }

    def number(self, label: Any) -> float:
        """Convert a label to the value that the model expects."""
        return float(label) if self.regression else self.numbers[label]


def of_rows(parts: Parts, column: str, own: Sequence[str] = ()) -> Labels:
    """Return the labels of a column that has one label per row.

    Args:
        own: the model's class names, which are used if they include all class names in the data.

    Raises:
        UsageError: a label is missing, out of range, or not in the training split; or some class numbers
            occur neither in the data nor in the model.
    """
    feature = parts["train"].features[column]
    kinds = {str(getattr(feature, "dtype", "")).rstrip("0123456789").removesuffix("_")}
    if kinds & {"float", "double", "decimal"}:
        for part, rows in parts.items():
            for row, label in enumerate(values(rows, column)):
                if label is None or not math.isfinite(label):
                    raise _odd(parts.place(part, row), label, "a number")
        return Labels((), {})
    rows = {part: enumerate(values(rows, column)) for part, rows in parts.items()}
    return _classes(feature, rows, parts.place, own)


def of_tokens(parts: Parts, column: str, own: Sequence[str] = ()) -> Labels:
    """Return the labels of a column that has one label per token.

    Raises:
        UsageError: for the reasons listed in ``of_rows``, or because the column does not contain lists.
    """
    feature = require_lists(parts["train"], column)
    return _classes(
        feature,
        {
            part: ((row, tag) for row, tags in enumerate(values(rows, column)) for tag in tags or ())
            for part, rows in parts.items()
        },
        parts.place,
        own,
    )


def require_lists(rows: Dataset, column: str) -> Any:
    """Return the type of the elements in a column that contains lists.

    Raises:
        UsageError: the column does not contain lists.
    """
    feature = getattr(rows.features[column], "feature", None)
    if feature is None:
        raise UsageError(
            f"the column {column!r} has one label per row, but this task requires a list with one label per "
            "token. Choose another column with --columns tags=NAME, or use --task sequence_classification."
        )
    return feature


def values(rows: Dataset, column: str) -> list[Any]:
    """Return all values of a column."""
    return rows.select_columns([column])[:][column]


def are_hidden(rows: Dataset, column: str) -> bool:
    """Return True if no row of a split has a label, as in the test splits of GLUE."""
    return all(label is None or label == HIDDEN for label in values(rows, column))


def not_given_away(dataset: Any) -> bool:
    """Return True if the samples have the label -1, which stands for an unpublished label.

    Only the first few samples are checked, because a dataset hides either all of its labels or none.
    """
    few = [dataset[index] for index in range(min(8, len(dataset)))] if dataset is not None else []
    found = [one.get("labels", one.get("label")) for one in few if isinstance(one, Mapping)]
    return bool(found) and all(isinstance(label, int) and label == HIDDEN for label in found)


def _classes(
    feature: Any,
    parts: Mapping[str, Iterable[tuple[int, Any]]],
    place: Callable[[str, int], str],
    own: Sequence[str] = (),
) -> Labels:
    rows = {part: list(pairs) for part, pairs in parts.items()}
    names = list(getattr(feature, "names", None) or ())
    known: Sequence[Any] = range(len(names))
    if not names:
        _require_classes(rows["train"], place)
        known, names = _of_trained(rows["train"], place, own)
    numbers = {label: number for number, label in enumerate(known)}
    expected = f"one of the labels of the training data ({_few(known)})"
    for part, pairs in rows.items():
        for row, label in pairs:
            if label not in numbers:
                raise _odd(place(part, row), label, expected)
    if len(names) < 2:
        raise _single(names)
    return Labels(tuple(map(str, names)), numbers)


def _first_text(rows: Iterable[tuple[int, Any]]) -> tuple[int, str]:
    """Return the number and the label of the first row whose label is a string."""
    return next((row, label) for row, label in rows if isinstance(label, str))


def _require_classes(pairs: Sequence[tuple[int, Any]], place: Callable[[str, int], str]) -> None:
    for row, label in pairs:
        if not isinstance(label, int | str) or (isinstance(label, int) and label < 0):
            raise _odd(place("train", row), label, "a non-negative integer or a name")


def _of_trained(
    pairs: Sequence[tuple[int, Any]], place: Callable[[str, int], str], own: Sequence[str]
) -> tuple[Sequence[Any], list[Any]]:
    """Return the classes as they are written in the training rows, with their names.

    Raises:
        UsageError: there are fewer than two classes, or the labels mix numbers and names.
    """
    trained = {label for _, label in pairs}
    if len(trained) < 2:
        raise _single(sorted(trained))
    kinds = {isinstance(label, str) for label in trained}
    if kinds == {True}:
        names = list(own) if trained <= set(own) else sorted(trained)
        return names, names
    if len(kinds) > 1:
        row, label = _first_text(pairs)
        raise _odd(
            place("train", row),
            label,
            "an integer, because other labels are integers; labels cannot mix numbers and names",
        )
    return _of_numbers({label for label in trained if isinstance(label, int)}, own)


def _of_numbers(trained: set[int], own: Sequence[str]) -> tuple[Sequence[int], list[str]]:
    """Return the class numbers that occur in the training split, each with its name.

    Raises:
        UsageError: numbers are missing from the data, and the model has no classes for them.
    """
    least, count = min(trained), max(trained) + 1
    if least and (named := _from_above_0(trained, own)):
        return named
    first = 0 if count <= len(own) else least
    # the first ones alone: labels such as 20231122 leave out millions
    left = (number for number in range(first, count) if number not in trained)
    absent = list(itertools.islice(left, _SHOWN + 1))
    if absent and count > len(own):
        raise UsageError(
            f"the training data has the labels {_few(sorted(trained))}, but not {_few(absent)}. Use "
            f"every number from {first} to {count - 1}, write the labels as text, or use a model whose "
            f"config.json names {count} classes in id2label."
        )
    if absent:
        line = "no training row has the label %s, although the model has %d labels"
        get_logger("labels").warning(line, _few(absent), len(own))
        return range(len(own)), list(own)
    names = list(own) if len(own) == count else [f"LABEL_{number}" for number in range(count)]
    return range(count), names


def _from_above_0(trained: set[int], own: Sequence[str]) -> tuple[Sequence[int], list[str]] | None:
    """Return class numbers and names if the numbers are consecutive but start above 0, such as 1 to 5 stars.

    The model is saved with these names, so it can be trained further on the same data. Returns None if the
    numbers are not consecutive or do not start above 0.
    """
    least, count = min(trained), max(trained) + 1
    if {str(label) for label in trained} <= set(own):
        known = [number for number in map(digits.number, own) if number is not None]
        if len(known) == len(own):
            return known, list(own)
    if count > len(own) and count - least == len(trained):
        return range(least, count), [str(label) for label in range(least, count)]
    return None


def _few(known: Sequence[Any]) -> str:
    if isinstance(known, range):
        return f"{known[0]} to {known[-1]}"
    return ", ".join(map(repr, known[:_SHOWN])) + (", …" if len(known) > _SHOWN else "")


def _single(known: Sequence[Any]) -> UsageError:
    return UsageError(
        f"all rows have the same label, {_few(known)}, but training requires at least two classes. If this "
        "is not the label column, specify the right one with --columns label=NAME."
    )


def _odd(place: str, label: Any, expected: str) -> UsageError:
    return UsageError(
        f"the label {label!r} in {place} is invalid; it must be {expected}. Correct the row, or choose "
        "another column with --columns."
    )
