"""Barriers and collectives of objects of a planned rank are where those of the job are."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist
from torch.distributed import distributed_c10d

from megatron_npu.planning.rank import object_collectives
from megatron_npu.planning.rank.object_collectives import ObjectCollectives

WORLD, OTHER = SimpleNamespace(group_name="0"), SimpleNamespace(group_name="1")


@pytest.fixture
def objects(monkeypatch: pytest.MonkeyPatch) -> ObjectCollectives:
    monkeypatch.setattr(dist, "get_backend", lambda group: "hccl")
    monkeypatch.setattr(distributed_c10d, "_get_default_group", lambda: WORLD)
    monkeypatch.setattr(distributed_c10d, "_get_object_coll_device", lambda group: "cpu")
    return ObjectCollectives()


@pytest.mark.parametrize(
    ("world", "other", "expected"),
    [
        ("nccl", None, ["npu", "npu"]),
        ("hccl", "gloo", ["npu", "cpu"]),
        ("cpu:gloo,npu:hccl", None, ["cpu", "cpu"]),
        (None, "hccl", ["cpu", "npu"]),
    ],
)
def test_a_group_without_gloo_works_on_the_device(
    objects: ObjectCollectives, world: str | None, other: str | None, expected: list[str]
) -> None:
    objects.note(WORLD, world)
    objects.note(OTHER, other)
    assert [objects.place(WORLD), objects.place(OTHER)] == expected
    assert objects.place() == expected[0]


def test_objects_are_sent_for_their_memory_and_each_rank_has_ours(
    objects: ObjectCollectives, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[Any] = []

    def gather(found: list[Any], mine: Any, group: Any = None) -> None:
        sent.append(mine)
        found[:] = [distributed_c10d._tensor_to_object(None, None, group)] * len(found)

    monkeypatch.setattr(objects, "_gather", gather)
    objects.note(WORLD, "nccl")
    found: list[Any] = [None, None]
    objects.all_gather_object(found, "mine")
    assert (sent, found) == (["mine"], ["mine", "mine"])
    assert object_collectives.distributed_c10d._tensor_to_object.__name__ == "_tensor_to_object"


def test_groups_of_others_are_no_groups(objects: ObjectCollectives) -> None:
    objects.note(None, "nccl")
    objects.note(dist.GroupMember.NON_GROUP_MEMBER, "nccl")
    assert objects.place(OTHER) == "cpu"
