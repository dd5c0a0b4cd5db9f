"""Groups of parameters that differ in their rates alone are found in a checkpoint of other rates."""

from __future__ import annotations

from tests.support import on_version


def test_groups_are_found_by_their_places() -> None:
    on_version.run("found_groups_worker", "0.19.2")
