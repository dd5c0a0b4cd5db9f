"""Evaluate PEP 440 version specifiers: check whether a version matches, and whether two specifiers
overlap.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    pass


@cache  # asked for each patch of each module, twice where a run asks for backports
def admits(versions: str, version: str) -> bool:
    """Return True if the specifier ``versions`` accepts ``version``.

    An empty specifier accepts every version.

    A version that does not follow PEP 440 (a commit) is accepted only by an empty specifier.
    """
    if not versions:
        return True
    from packaging.specifiers import SpecifierSet
    from packaging.version import InvalidVersion

    try:
        return SpecifierSet(versions).contains(version, prereleases=True)
    except InvalidVersion:
        return False


def versions_overlap(first: str, second: str) -> bool:
    """Return True if at least one version satisfies both specifiers.

    A specifier set is an interval (with holes from ``!=``), so if there is a common version, one of these is:
    zero, a version named in one of the two specifiers, or a version just above such a version.
    """
    if not first or not second or first == second:
        return True
    from packaging.specifiers import SpecifierSet

    both = SpecifierSet(first) & SpecifierSet(second)
    named = [specifier.version.removesuffix(".*") for specifier in both]
    candidates = ["0", *named, *(f"{version.partition('+')[0]}.0.0.0.1" for version in named)]
    return any(_contains(both, candidate) for candidate in candidates)


def _contains(specifiers: Any, version: str) -> bool:
    from packaging.version import InvalidVersion

    try:
        return specifiers.contains(version, prereleases=True)
    except InvalidVersion:  # "just above" a pre-release has no spelling
        return False
