"""The overflow flag: never set where inf and nan show, asked of the device where they do not."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from megatron_npu.ops import overflow


def test_inf_and_nan_are_left_to_the_numbers(device):
    torch.full((2,), 3e38, device=device).mul_(10)
    overflow.clear()
    assert not overflow.happened()


def test_a_saturating_npu_is_asked(device):
    """The kernels are called; a simulated NPU never saturates, so that the answer is no."""
    if device != "npu":
        pytest.skip("needs an NPU")
    code = """
import torch, torch_npu
from megatron_npu.ops import overflow
asked = []
for name in ("npu_get_float_status", "npu_clear_float_status"):
    kernel = getattr(torch_npu, name)
    setattr(torch_npu, name, lambda t, kernel=kernel, name=name: (asked.append(name), kernel(t))[1])
assert overflow._saturates()
overflow.clear()
assert overflow.happened() is False
assert asked == ["npu_clear_float_status", "npu_get_float_status"], asked
"""
    environment = {**os.environ, "INF_NAN_MODE_FORCE_DISABLE": "1", "INF_NAN_MODE_ENABLE": "0"}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
