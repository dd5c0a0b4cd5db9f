"""Shapes that the stages of a planned pipeline exchange, with Megatron's own exchange."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from megatron_npu.base.errors import UsageError
from megatron_npu.planning.rank import process_groups, stage_shapes

SHAPE = (64, 2, 32)


@pytest.fixture
def communicator(monkeypatch):
    """Return a function: fields of a configuration -> the communicator of the second of two stages."""
    p2p = pytest.importorskip("megatron.core.pipeline_parallel.p2p_communication")
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr(torch.cuda, "current_device", lambda: "cpu")
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    fields = {"use_ring_exchange_p2p": False, "batch_p2p_comm": True, "batch_p2p_sync": False}
    fields |= {"pipeline_dtype": torch.float32, "timers": None, "virtual_pipeline_model_parallel_size": None}
    with process_groups.absent(lambda _: "fake"):
        dist.init_process_group("gloo")
        yield lambda **more: p2p.P2PCommunicator(
            dist.group.WORLD, SimpleNamespace(**fields, mtp_standalone=False, **more)
        )
    dist.destroy_process_group()


def test_a_stage_receives_the_shape_that_it_expects(communicator):
    with stage_shapes.nominal():
        received = communicator(variable_seq_lengths=True).recv_forward(SHAPE, is_first_stage=False)
    assert tuple(received.shape) == SHAPE


def test_shapes_that_no_plan_knows_are_refused(communicator):
    stage = communicator(variable_seq_lengths=False)
    stage.config.mtp_standalone = True
    with (
        stage_shapes.nominal(),
        pytest.raises(UsageError, match="multi-token prediction"),
    ):
        stage.recv_forward(SHAPE, is_first_stage=False)
