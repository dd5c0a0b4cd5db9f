"""A checkpoint that another type of device saved: its generators' states do not fit this one's."""

from __future__ import annotations

import logging

import pytest
import torch
import torch.distributed as dist

from megatron_npu import devices
from megatron_npu.adaptors.shared import random

FOREIGN = torch.zeros(16, dtype=torch.uint8)  # an NPU's or a GPU's


def states(device_state: torch.Tensor) -> dict:
    return {"cuda_rng_state": device_state, "rng_tracker_states": {"model-parallel-rng": device_state}}


@pytest.fixture
def loaded(monkeypatch):
    """Return a function: content of a checkpoint -> the same, loaded."""
    pytest.importorskip("megatron.core")
    monkeypatch.setattr(dist, "get_rank", lambda: 0)

    def _load_base_checkpoint(load_dir, args, rank0=False):
        return load_dir, "latest", False

    return lambda content, **more: random.with_own_generators(_load_base_checkpoint, content, None, **more)[0]


@pytest.mark.parametrize("shape", ["0.12 and later", "fsdp_dtensor", "before data-parallel states"])
def test_the_run_keeps_its_own_generators(loaded, caplog, shape) -> None:
    found = states(FOREIGN)
    content = {
        "0.12 and later": {"rng_state": [found]},
        "fsdp_dtensor": {"rng_state": {"(0, 0)": [found]}},
        "before data-parallel states": found,
    }[shape]
    with caplog.at_level(logging.WARNING):
        loaded(content)
    assert torch.equal(found["cuda_rng_state"], devices.current().rng_state())
    assert all(len(each) != len(FOREIGN) for each in found["rng_tracker_states"].values())
    assert (
        "because the checkpoint was saved on another type of device (16 bytes of generator state there, "
        "5056 here)" in caplog.text
    )


def test_states_of_this_type_are_loaded(loaded, caplog) -> None:
    found = states(torch.Generator().manual_seed(4).get_state())
    loaded({"rng_state": [found]})
    assert torch.equal(found["cuda_rng_state"], torch.Generator().manual_seed(4).get_state())
    assert "generator state" not in caplog.text


def test_what_is_read_for_its_arguments_is_left_alone(loaded) -> None:
    found = states(FOREIGN)
    loaded({"rng_state": [found]}, rank0=True)
    assert found["cuda_rng_state"] is FOREIGN
