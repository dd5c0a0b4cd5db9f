"""Groups of parameters that differ in their rates alone are found in a checkpoint of other rates."""

from __future__ import annotations

import pytest

from tests.support import on_version


@pytest.mark.parametrize("version", ["0.17.1", "0.19.2"])
def test_groups_are_found_by_their_places(version: str) -> None:
    """Before 0.19 they are told apart with the backport alone."""
    on_version.run("found_groups_worker", version, MEGATRON_NPU_BACKPORT="1")
