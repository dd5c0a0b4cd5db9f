"""Parse the flags for the sources of samples: dataset prefixes, their weights, and the sizes of the
splits.
"""

from __future__ import annotations

import itertools
import math
import os
import re
import sys
from collections import Counter
from collections.abc import Sequence

from megatron_npu.base.errors import UsageError

PARTS = ("train", "valid", "test")  # in the order of a split; a flag --PART-data-path each


def blend(words: Sequence[str], flag: str = "--data-path") -> tuple[list[float] | None, list[str]]:
    """Parse a list of dataset prefixes, each of which may be preceded by a weight.

    Return the weights (or None) and the prefixes.

    Raises:
        UsageError: only some prefixes have weights, or a weight is not greater than 0.
    """
    weights = [_number(word) for word in words[::2]]
    if all(weight is None for weight in weights):
        return None, list(words)
    known = [weight for weight in weights if weight is not None]
    if len(words) % 2 or len(known) < len(weights) or not all(0 < weight < math.inf for weight in known):
        raise UsageError(
            f"{flag} must list path prefixes, with a positive weight before each of them or before none, "
            f"but got {' '.join(words)}",
            remedy=f"Pass, for example, {flag} 0.7 first 0.3 second.",
        )
    return known, list(words[1::2])


def tell_of_repeated(prefixes: Sequence[str], flag: str = "--data-path") -> None:
    """Log on rank 0 which datasets are listed more than once, even under different names.

    Each occurrence is sampled separately, so the number of times that a sample occurs per epoch follows from
    the sum of the weights.

    Args:
        prefixes: the prefixes of a blend.
        flag: the flag that names them.
    """
    places = Counter(os.path.realpath(f"{prefix}.bin") for prefix in prefixes)
    often = [place.removesuffix(".bin") for place, count in places.items() if count > 1]
    if often and os.environ.get("RANK", "0") == "0":
        print(
            f"megatron_npu: warning: {flag} names {', '.join(often)} more than once; the weights are added",
            file=sys.stderr,
            flush=True,
        )


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def split_shares(text: str) -> list[float]:
    """Return the fractions of training, validation and test data in ``--split``.

    Raises:
        UsageError: the shares are not valid numbers.
    """
    try:
        shares = [float(part) for part in text.split(",")]
    except ValueError:
        shares = []
    fit = all(0 <= share < math.inf for share in shares)  # which nan is not
    if not 1 <= len(shares) <= 3 or not fit or sum(shares) <= 0:
        raise UsageError(
            "--split must consist of one to three finite numbers, separated by commas, none of them negative "
            f"and at least one of them positive, but got {text!r}",
            remedy="Pass, for example, --split 969,30,1.",
        )
    return [*shares, 0.0, 0.0][:3]


def split_text(text: str) -> str:
    """Return the value of ``--split`` in megatron-core's format, with digits and dots only.

    A value that already has this form is unchanged, because it is part of the name of cached indices.
    """
    if re.fullmatch(r"[\d.,\s]+", text):
        return text
    return ",".join(f"{share:.12f}" for share in split_shares(text))


def sizes_of_parts(shares: Sequence[float], sequences: int) -> list[int]:
    """Return how many sequences (usually one per document) megatron-core assigns to each split."""
    bounds = [round(sum(shares[:part]) / sum(shares) * sequences) for part in range(4)]
    return [last - first for first, last in itertools.pairwise(bounds)]
