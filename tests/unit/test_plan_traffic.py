"""The traffic of a planned CUDA rank: calls, bytes and members of each group, from torch's operations."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from megatron_npu.planning.fake_cuda import traffic

GROUP = SimpleNamespace(group_desc="TENSOR_MODEL_PARALLEL_GROUP", size=lambda: 2)
EIGHT = torch.empty(8, dtype=torch.bfloat16)  # 16 bytes
FOUR = torch.empty(4, dtype=torch.bfloat16)


@pytest.mark.parametrize(
    ("name", "arguments", "sent"),
    [
        ("allreduce_", ([EIGHT],), 16),
        ("_allgather_base_", (EIGHT, FOUR), 8),
        ("_reduce_scatter_base_", (FOUR, EIGHT), 16),
        ("alltoall_base_", (FOUR, EIGHT), 16),
        ("send", ([FOUR],), 8),
        ("recv_", ([FOUR],), 0),
    ],
)
def test_what_a_rank_sends(
    name: str, arguments: tuple[object, ...], sent: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(traffic, "_group", lambda each: each if each is GROUP else None)
    monkeypatch.setattr(dist, "get_process_group_ranks", lambda group: [9, 8])
    counted = traffic.Traffic()
    for _ in range(2):
        counted.note(getattr(torch.ops.c10d, name), (*arguments, GROUP, -1))
    counted.note(torch.ops.aten.mm, (EIGHT, EIGHT))
    expected = {"ranks": 2, "buffer": 0, "calls": 2, "bytes": 2 * sent}
    assert counted.groups == {"TENSOR_MODEL_PARALLEL_GROUP": expected}
    assert counted.members == {"TENSOR_MODEL_PARALLEL_GROUP": [8, 9]}
