"""The tree of bigscience's Megatron-DeepSpeed, and data for it."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_npu.upstream import megatrons
from tests.conftest import checkout as find_or_skip
from tests.support import stock_lm
from tests.support.deepspeed_pretraining import train


@pytest.fixture(scope="session")
def checkout() -> Path:
    """Return the tree, which is not to be written to."""
    return find_or_skip("megatron_deepspeed", megatrons.BIGSCIENCE_VERSION)


@pytest.fixture(scope="session")
def data(tmp_path_factory) -> Path:
    """A folder with a vocabulary and a GPT dataset."""
    return stock_lm.write_data(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="session")
def expected(data) -> dict[int, float]:
    """The curve of Megatron-LM 285068c8."""
    return train(find_or_skip("megatron_lm", megatrons.LEGACY_VERSION), data)
