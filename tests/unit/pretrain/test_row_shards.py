"""Rows of parameters that torch's FSDP shares out."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from megatron_npu.base.errors import UsageError
from megatron_npu.pretrain.checkpoint.weights import row_shards


@pytest.fixture
def sharded():
    """Return a function: outputs of a linear layer -> that layer as the second of two ranks has it."""
    dist.init_process_group("fake", rank=1, world_size=2, store=FakeStore())
    mesh = init_device_mesh("cpu", (2,))
    yield lambda outputs: fully_shard(torch.nn.Linear(3, outputs), mesh=mesh)
    dist.destroy_process_group()


def test_a_rank_has_its_rows(sharded):
    layer = sharded(6)
    row_shards.require_even([layer])
    rows, where = row_shards.rows_of_rank(layer.weight)
    assert (tuple(rows.shape), where) == ((3, 3), slice(3, 6))
    assert row_shards.rows_of_rank(torch.ones(5))[1] == slice(0, 5)


def test_rows_that_do_not_come_out_even_are_refused(sharded):
    told = "the same number of rows on each rank, but 5 rows of weight cannot be distributed evenly over 2"
    with pytest.raises(UsageError, match=told):
        row_shards.require_even([sharded(5)])


def test_what_was_read_becomes_shards_again(sharded):
    layer = sharded(6)
    rows = torch.full((3, 3), 7.0)
    found = row_shards.shared_out(
        {"list": [rows], "step": 3, "new": rows}, {"list": [layer.weight], "step": layer.weight}
    )
    assert found["step"] == 3
    assert found["new"] is rows
    assert found["list"][0].shape == (6, 3)
    assert torch.equal(found["list"][0].to_local(), rows)
