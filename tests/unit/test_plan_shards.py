"""The check of Megatron-FSDP's shards, by Megatron's own function, on a rank whose peers do not exist."""

from __future__ import annotations

import functools

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from megatron_npu.planning.rank import process_groups, uneven_shards

ROWS = 10


@pytest.fixture(params=(0, 1))
def check(request, monkeypatch):
    """Return a function that lets Megatron check this rank's shard: 6 of 10 rows, or the other 4."""
    uneven = pytest.importorskip("megatron.core.distributed.fsdp.src.megatron_fsdp.uneven_dtensor")
    monkeypatch.setenv("RANK", str(request.param))
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr(torch.Tensor, "cuda", lambda tensor: tensor)
    with process_groups.absent(lambda _: "fake"):
        dist.init_process_group("gloo")
        mesh = init_device_mesh("cpu", (2,))
        mine = torch.zeros(4 if request.param else 6, 3)
        shard = DTensor.from_local(mine, mesh, [Shard(0)], shape=torch.Size((ROWS, 3)), stride=(3, 1))
        yield lambda: uneven.validate_uneven_dtensor(shard)
    dist.destroy_process_group()


def test_a_shard_passes_without_the_others(check):
    with pytest.raises(AssertionError, match="DTensor chunk metadata"):
        check()
    with uneven_shards.unchecked():
        check()


def test_a_shard_passes_when_a_device_wraps_the_collectives(check, monkeypatch):
    with uneven_shards.unchecked():
        reduce = dist.all_reduce
        monkeypatch.setattr(
            dist, "all_reduce", functools.wraps(reduce)(lambda *a, **named: reduce(*a, **named))
        )
        check()
