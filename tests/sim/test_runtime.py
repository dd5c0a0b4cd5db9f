"""Streams, events, memory and devices of the simulated runtime, through torch.npu."""

from __future__ import annotations

import pytest
import torch

pytestmark = pytest.mark.simulated


def test_a_tensor_lives_on_the_device():
    x = torch.arange(6.0, device="npu").view(2, 3)
    assert x.device == torch.device("npu", 0)
    assert (x @ x.T).cpu().tolist() == [[5.0, 14.0], [14.0, 50.0]]
