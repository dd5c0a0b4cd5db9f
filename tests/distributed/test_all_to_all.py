"""The ``all_to_all`` through which gradients go, over gloo in a group that does not begin with rank 0."""

from __future__ import annotations

import datetime
import json
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from megatron_npu import devices
from megatron_npu.devices.redirect import Redirection
from tests.conftest import LONGEST
from tests.distributed import spawned

pytestmark = pytest.mark.usefixtures("warm_children")
MEMBERS = [1, 2]


def exchange(rank: int, folder: Path) -> None:
    """Send each member its own number of rows of this rank's; write what came, and the gradient of it."""
    Redirection(devices.CpuDevice()).on()
    timeout = datetime.timedelta(seconds=LONGEST)
    store = f"file://{folder / 'store'}"
    dist.init_process_group("nccl", init_method=store, rank=rank, world_size=3, timeout=timeout)
    group = dist.new_group(MEMBERS)
    if rank in MEMBERS:
        given = torch.full((rank, 2), float(rank), requires_grad=True)
        room = [torch.empty(member, 2) for member in MEMBERS]
        came = dist.nn.functional.all_to_all(room, [given] * len(MEMBERS), group=group)
        (rank * torch.cat(came)).sum().backward()
        found = {"came": [part.tolist() for part in came], "gradient": given.grad.tolist()}
        (folder / f"rank{rank}").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def test_a_group_without_rank_0_exchanges(tmp_path: Path) -> None:
    assert spawned.exit_codes(exchange, 3, tmp_path) == [0, 0, 0]
    for member in MEMBERS:
        found = json.loads((tmp_path / f"rank{member}").read_text())
        assert found["came"] == [[[float(source)] * 2] * source for source in MEMBERS]
        assert found["gradient"] == [[float(sum(MEMBERS))] * 2] * member
