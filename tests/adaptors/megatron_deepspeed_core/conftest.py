"""The tree of deepspeedai's Megatron-DeepSpeed, and data for it."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_npu import upstream
from tests.adaptors.megatron_deepspeed.pretraining import train
from tests.adaptors.megatron_lm import runs
from tests.conftest import checkout as find_or_skip


@pytest.fixture(scope="session")
def checkout() -> Path:
    """Return the tree, which is not to be written to."""
    return find_or_skip("megatron_deepspeed_core", upstream.DEEPSPEEDAI_VERSION)


@pytest.fixture(scope="session")
def data(tmp_path_factory) -> Path:
    """A folder with a vocabulary and a GPT dataset."""
    return runs.write_data(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="session")
def expected(checkout, data) -> dict[int, float]:
    """The curve of one process without DeepSpeed's engine."""
    return train(checkout, data)
