"""Megatron-LM patched and initialised in this process."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.support import stock_lm


@pytest.fixture(scope="session", autouse=True)
def initialised() -> Iterator[None]:
    """Model-parallel groups of one process, arguments, timers: by the stock ``initialize_megatron``."""
    import megatron_npu

    megatron_npu.install()
    folder = Path(os.environ["CHECK_DATA"])
    # upstream's softmax kernels would be ours in its own attention too: leave them out of the comparison
    sys.argv = ["check", *stock_lm.flags(folder), "--no-masked-softmax-fusion"]
    from megatron.initialize import initialize_megatron

    initialize_megatron(args_defaults={"tokenizer_type": "GPT2BPETokenizer"})
    yield
    torch.distributed.destroy_process_group()


@pytest.fixture
def args(monkeypatch):
    """Return a function that changes Megatron's arguments until the test ends."""
    from megatron import get_args

    def change(**values):
        for name, value in values.items():
            monkeypatch.setattr(get_args(), name, value, raising=False)
        return get_args()

    return change
