"""Compute evaluation metrics for GLUE tasks, entity recognition, question answering and text overlap.

The metrics are short formulas, which are tested against scikit-learn, seqeval and others if those are
installed. The hub's ``evaluate`` package is not used, because it downloads and executes a program for each
metric.
"""

from __future__ import annotations

import collections
import math
import re
import string
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

# the metrics of each task of GLUE, by the name of its configuration
GLUE = {
    "cola": ("matthews_correlation",),
    "mrpc": ("accuracy", "f1"),
    "qqp": ("accuracy", "f1"),
    "stsb": ("pearson", "spearmanr"),
}


def classification(
    predictions: np.ndarray, references: np.ndarray, glue: str | None = None, *, classes: int
) -> dict[str, float]:
    """Return accuracy, F1 and Matthews' correlation, or GLUE's own metrics if a GLUE task is given.

    With more than two classes, the F1 is the mean over the classes, ``f1_macro``.

    Args:
        predictions: [n], integers.
        references: [n].
        glue: the task's name, or None.
        classes: number of classes, whether or not all of them occur.
    """
    known: dict[str, Callable[[np.ndarray, np.ndarray], float]] = {
        "accuracy": accuracy,
        "f1": f1,
        "f1_macro": f1_macro,
        "matthews_correlation": matthews_correlation,
    }
    every = ("accuracy", "f1" if classes <= 2 else "f1_macro", "matthews_correlation")
    wanted = every if glue is None else GLUE.get(glue, ("accuracy",))
    return {name: known[name](predictions, references) for name in wanted}


def regression(predictions: np.ndarray, references: np.ndarray) -> dict[str, float]:
    """Return Pearson's correlation and Spearman's rank correlation, as in GLUE's STS-B.

    Args:
        predictions: [n].
        references: [n].
    """
    ranks = _ranks(predictions), _ranks(references)
    return {"pearson": correlation(predictions, references), "spearmanr": correlation(*ranks)}


def accuracy(predictions: np.ndarray, references: np.ndarray) -> float:
    """Return the fraction of the predictions [n] that are correct."""
    return float((predictions == references).mean())


def f1(predictions: np.ndarray, references: np.ndarray, positive: int = 1) -> float:
    """Return the F1 score of a class, or 0 if the class does not occur."""
    hits = ((predictions == positive) & (references == positive)).sum()
    return _harmonic(int(hits), int((predictions == positive).sum()), int((references == positive).sum()))


def f1_macro(predictions: np.ndarray, references: np.ndarray) -> float:
    """Return the mean of the F1 scores of all classes that occur in the predictions or the references."""
    classes = np.union1d(predictions, references)
    return float(np.mean([f1(predictions, references, one) for one in classes]))


def matthews_correlation(predictions: np.ndarray, references: np.ndarray) -> float:
    """Return Matthews' correlation for any number of classes (R_K of Gorodkin, 2004), or 0 if it is
    undefined.
    """
    classes = np.union1d(predictions, references)
    guessed = np.array([(predictions == one).sum() for one in classes], np.float64)
    true = np.array([(references == one).sum() for one in classes], np.float64)
    total = float(len(references))
    covariance = float((predictions == references).sum()) * total - float(guessed @ true)
    scale = (total**2 - float(guessed @ guessed)) * (total**2 - float(true @ true))
    return covariance / math.sqrt(scale) if scale else 0.0


def correlation(one: np.ndarray, other: np.ndarray) -> float:
    """Return Pearson's correlation of two vectors ``[n]``, or nan if either of them is constant."""
    one = one.astype(np.float64) - one.mean(dtype=np.float64)
    other = other.astype(np.float64) - other.mean(dtype=np.float64)
    scale = math.sqrt(float(one @ one) * float(other @ other))
    return float(one @ other) / scale if scale else math.nan


def _ranks(numbers: np.ndarray) -> np.ndarray:
    """Return the ranks of the values in a vector ``[n]``.

    Equal values get the mean of their ranks.
    """
    _, inverse, counts = np.unique(numbers, return_inverse=True, return_counts=True)
    last = np.cumsum(counts)
    return ((last - counts + 1 + last) / 2)[inverse]


def _entities_of_rows(rows: Sequence[Sequence[str]]) -> set[tuple[Any, ...]]:
    """Return the entities in all rows, each together with its row number."""
    return {(row, *one) for row, tags in enumerate(rows) for one in entities(tags)}


def _harmonic(hits: int, guessed: int, true: int) -> float:
    """Return the F1 score ``2 hits / (guessed + true)``, or 0 if the denominator is 0."""
    return 2 * hits / (guessed + true) if guessed + true else 0.0


# -- entities

Entity = tuple[str, int, int]  # its type, its first and its last token


def entities(tags: Sequence[str]) -> list[Entity]:
    """Return the entities in a row of tags, as defined by CoNLL's script and seqeval's default mode.

    Tags are ``O``, or ``B``, ``I``, ``E``, ``S`` with ``-TYPE``. In this lenient mode, an ``I`` whose type
    differs from that of the previous tag starts a new entity.
    """
    found: list[Entity] = []
    before, kind_before, first = "O", "", 0
    for position, tag in enumerate([*tags, "O"]):
        mark, _, kind = tag.partition("-")
        kind = kind or "_"
        if _ends(before, mark, kind_before, kind):
            found.append((kind_before, first, position - 1))
        if _begins(before, mark, kind_before, kind):
            first = position
        before, kind_before = mark, kind
    return found


def _ends(before: str, mark: str, kind_before: str, kind: str) -> bool:
    if before in ("E", "S"):
        return True
    if before in ("B", "I") and mark in ("B", "S", "O"):
        return True
    return before not in ("O", ".") and kind_before != kind


def _begins(before: str, mark: str, kind_before: str, kind: str) -> bool:
    if mark in ("B", "S"):
        return True
    if mark in ("E", "I") and before in ("E", "S", "O"):
        return True
    return mark not in ("O", ".") and kind_before != kind


def are_entity_tags(names: Sequence[str]) -> bool:
    """Return True if tags are written as entity tags, unlike part-of-speech tags."""
    return all(name == "O" or re.match(r"[BIES]-.", name) for name in names)


def tagging(predictions: Sequence[Sequence[str]], references: Sequence[Sequence[str]]) -> dict[str, float]:
    """Return metrics for predicted tags, including the accuracy.

    For entity tags, also return precision, recall and F1 over entities.

    An entity is correct if its type, its first token and its last token are correct.

    Args:
        predictions: the tags of each row.
        references: the same number of tags in each row.
    """
    pairs = [
        (one, other)
        for row, true in zip(predictions, references, strict=True)
        for one, other in zip(row, true, strict=True)
    ]
    result = {"accuracy": sum(one == other for one, other in pairs) / max(len(pairs), 1)}
    if not are_entity_tags(sorted({tag for pair in pairs for tag in pair})):
        return result
    guessed, true_ones = _entities_of_rows(predictions), _entities_of_rows(references)
    hits = len(guessed & true_ones)
    return result | {
        "precision": hits / len(guessed) if guessed else 0.0,
        "recall": hits / len(true_ones) if true_ones else 0.0,
        "f1": _harmonic(hits, len(guessed), len(true_ones)),
    }


# -- answers, as SQuAD's own evaluation compares them (its versions 1.1 and 2.0)


def normal_answer(text: str) -> str:
    """Normalize a text for comparison: convert it to lower case, and remove punctuation, articles and
    extra spaces.
    """
    text = "".join(letter for letter in text.lower() if letter not in string.punctuation)
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", text).split())


def answers(predictions: Sequence[str], references: Sequence[Sequence[str]]) -> dict[str, float]:
    """Return exact match and word F1 in percent, using the true answer that matches each prediction best.

    Args:
        predictions: one text per question; an empty text means no answer.
        references: the true answers of each question; an empty list means no answer.
    """
    exact = together = 0.0
    for given, true in zip(predictions, references, strict=True):
        accepted = [answer for answer in true if normal_answer(answer)] or [""]
        exact += max(normal_answer(given) == normal_answer(answer) for answer in accepted)
        together += max(_word_f1(normal_answer(given).split(), normal_answer(a).split()) for a in accepted)
    number = max(len(predictions), 1)
    return {"exact_match": 100 * exact / number, "f1": 100 * together / number}


def _word_f1(given: list[str], true: list[str]) -> float:
    if not given or not true:
        return float(given == true)
    shared = collections.Counter(given) & collections.Counter(true)
    return _harmonic(sum(shared.values()), len(given), len(true))


# -- outputs of sequence-to-sequence models


def overlap(predictions: Sequence[str], references: Sequence[str]) -> dict[str, float]:
    """Return the fraction of texts that are exactly correct, and the mean ROUGE-L (F1), both from 0 to 1.

    ROUGE-L (Lin, 2004) compares the longest common subsequence of words; words are runs of letters a to z and
    digits in lower case, as in Google's ``rouge_score`` without its stemmer.
    """
    number = max(len(predictions), 1)
    pairs = list(zip(predictions, references, strict=True))
    return {
        "exact_match": sum(one.strip() == other.strip() for one, other in pairs) / number,
        "rouge_l": sum(rouge_l(one, other) for one, other in pairs) / number,
    }


def rouge_l(prediction: str, reference: str) -> float:
    """Return the F1 score of the longest common subsequence of words in two texts."""
    one, other = (re.findall(r"[a-z0-9]+", text.lower()) for text in (prediction, reference))
    row = [0] * (len(other) + 1)  # lengths for the words of ``one`` so far, and so many of ``other``
    for word in one:
        before = row
        row = [0]
        for place, compared in enumerate(other, 1):
            row.append(before[place - 1] + 1 if word == compared else max(before[place], row[-1]))
    return _harmonic(row[-1], len(one), len(other))


def perplexity(loss: float) -> float:
    """Return the perplexity for a mean loss in nats, or inf if it overflows."""
    try:
        return math.exp(loss)
    except OverflowError:
        return math.inf
