"""Megatron-LM patched and initialised in this process, and its modules as they were written."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch

from tests.hosts.megatron_lm import runs


def load_stock(name: str) -> ModuleType:
    """Return a second copy of the module ``name``, which no patch has touched."""
    spec = importlib.util.find_spec(name)
    parent, _, last = name.rpartition(".")
    copy = importlib.util.spec_from_file_location(f"{parent}._stock_{last}", spec.origin)
    module = importlib.util.module_from_spec(copy)
    copy.loader.exec_module(module)
    return module


def here() -> torch.device:
    """Return the device of this run: the NPU under ``megatron-npu sim``."""
    from megatron_npu import devices

    return devices.current().torch_device()


def leaf(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return normal numbers on the device of this run, for which gradients are wanted."""
    return torch.randn(shape, dtype=dtype, device=here(), requires_grad=True)


def same_gradients(ours, stock, leaves, atol=1e-5, rtol=1e-5):
    """Compare two results and their gradients for ``leaves``."""
    torch.testing.assert_close(ours, stock, atol=atol, rtol=rtol)
    grad = torch.randn_like(stock)
    a = torch.autograd.grad(ours, leaves, grad.clone())
    b = torch.autograd.grad(stock, leaves, grad.clone())
    for left, right in zip(a, b, strict=True):
        torch.testing.assert_close(left, right, atol=atol, rtol=rtol)


@pytest.fixture(scope="session", autouse=True)
def initialised() -> Iterator[None]:
    """Model-parallel groups of one process, arguments, timers: by the stock ``initialize_megatron``."""
    import megatron_npu

    megatron_npu.install()
    folder = Path(os.environ["CHECK_DATA"])
    # upstream's softmax kernels would be ours in its own attention too: leave them out of the comparison
    sys.argv = ["check", *runs.flags(folder), "--no-masked-softmax-fusion"]
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
