"""Collectives of gloo on tensors whose shapes NCCL would not look at."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from megatron_npu import devices
from megatron_npu.devices.redirect import Redirection


@pytest.fixture
def group(tmp_path):
    redirection = Redirection(devices.CpuDevice())
    redirection.on()
    dist.init_process_group("nccl", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()
    redirection.off()


@pytest.mark.parametrize("asynchronous", [False, True])
def test_shards_are_gathered_into_a_flat_buffer(group, asynchronous):
    shard, whole = torch.arange(8.0).view(2, 4), torch.empty(8)
    work = dist.all_gather_into_tensor(whole, shard, async_op=asynchronous)
    if work is not None:
        work.wait()
    assert whole.equal(torch.arange(8.0))


def test_a_flat_buffer_is_reduced_into_shards(group):
    shard = torch.empty(2, 4)
    dist.reduce_scatter_tensor(shard, torch.arange(8.0))
    assert shard.equal(torch.arange(8.0).view(2, 4))


def test_keywords_are_passed_on(group):
    whole = torch.empty(3)
    dist.all_gather_into_tensor(output_tensor=whole, input_tensor=torch.ones(3))
    assert whole.equal(torch.ones(3))
