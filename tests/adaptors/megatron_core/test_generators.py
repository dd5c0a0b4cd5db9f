"""The states of random generators that a checkpoint holds, on another kind of device than saved them."""

from __future__ import annotations

import random

import torch

from megatron_npu import devices
from megatron_npu.pretrain.checkpoint import generators


def test_a_state_of_another_kind_of_device_is_left_out_and_said(single_process, capsys):
    device = devices.current()
    saved = generators.state() | {
        "cuda_rng_state": torch.zeros(16, dtype=torch.uint8),  # of an NPU or a GPU
        "rng_tracker_states": {"model-parallel-rng": torch.zeros(16, dtype=torch.uint8)},
    }
    random.random(), device.set_host_rng_state(torch.Generator().manual_seed(99).get_state())
    before = device.rng_state()
    generators.set_state(saved)
    assert random.getstate() == saved["random_rng_state"]
    assert torch.equal(device.host_rng_state(), saved["torch_rng_state"])
    assert torch.equal(device.rng_state(), before)
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith(" the device's random generators start from --seed")
    assert (
        "because the checkpoint was saved on another type of device (16 bytes of generator state there, "
        "5056 here)" in line
    )


def test_a_state_of_its_own_kind_is_set_without_a_word(single_process, capsys):
    saved = generators.state()
    torch.rand(3)
    generators.set_state(saved)
    assert torch.equal(devices.current().rng_state(), saved["cuda_rng_state"])
    assert not capsys.readouterr().out
