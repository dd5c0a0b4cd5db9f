"""A checkout of Megatron-LM 285068c8, which must come out of the tests as it went in."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from megatron_npu.upstream import megatrons
from tests.conftest import checkout as find_or_skip
from tests.support import processes, stock_lm


def status(checkout: Path) -> str:
    """Return what git says has changed in the checkout; nothing where it is a plain copy."""
    command = ["git", "-C", str(checkout), "status", "--short", "--ignored"]
    return processes.run(command, capture_output=True, text=True, check=False).stdout


@pytest.fixture(scope="session")
def checkout() -> Iterator[Path]:
    found = find_or_skip("megatron_lm", megatrons.LEGACY_VERSION)
    before = status(found)
    yield found
    assert status(found) == before, "the checkout was written to"


@pytest.fixture(scope="session")
def data(tmp_path_factory) -> Path:
    """A folder with a vocabulary and a GPT dataset."""
    return stock_lm.write_data(tmp_path_factory.mktemp("data"))
