"""The data set of the tiny run, written once for each process of the tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.tiny import write_dataset


@pytest.fixture(scope="session")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_dataset(tmp_path_factory.mktemp("data") / "numbers")
