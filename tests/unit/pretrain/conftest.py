"""A tiny dataset of numbers and the flags of a tiny run."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.tiny import flags_for, write_dataset


@pytest.fixture(scope="session")
def dataset(tmp_path_factory) -> Path:
    return write_dataset(tmp_path_factory.mktemp("data") / "numbers")


@pytest.fixture
def flags(dataset):
    """Return a function: changes to the flags -> argv."""
    return lambda *changes: [*flags_for(dataset), *changes]
