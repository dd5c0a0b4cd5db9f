"""A planned rank receives the batch that the tensor-parallel rank before it has broadcast."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from megatron_npu.planning.job import Job
from megatron_npu.planning.rank import exchanged_batches
from megatron_npu.planning.ranks import Ranks

TENSOR: Any = SimpleNamespace(group_name="7")
OUTSIDE: Any = dist.GroupMember.NON_GROUP_MEMBER
LAYOUT = "--tensor-model-parallel-size 4 --pipeline-model-parallel-size 2"


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a function that makes this process a rank, whose own broadcast moves nothing."""
    monkeypatch.setattr(distributed_c10d, "_get_default_group", lambda: SimpleNamespace(group_name="0"))
    for owner in (dist, distributed_c10d):
        monkeypatch.setattr(owner, "broadcast", lambda tensor, src=None, group=None: "sent")
    return lambda rank: monkeypatch.setattr(dist, "get_rank", lambda: rank)


def received(here: Any, folder: Path, sent: Iterable[torch.Tensor], at: Iterable[torch.Tensor]) -> None:
    for rank, tensors in ((0, sent), (1, at)):
        here(rank)
        with exchanged_batches.exchanged(folder):
            for tensor in tensors:
                assert dist.broadcast(tensor, 0, group=TENSOR) == "sent"


def test_integers_and_booleans_arrive_in_their_order(here: Any, tmp_path: Path) -> None:
    mask = torch.ones(1, 1, 8, 8, dtype=torch.bool).triu(1)
    sent = [torch.arange(4), torch.rand(3), mask, torch.tensor(5, dtype=torch.int32), mask]
    at = [torch.zeros_like(tensor) for tensor in sent]
    received(here, tmp_path, sent, at)
    assert not at[1].any()  # numbers of layers are nobody's concern
    at[1] = sent[1]
    assert all(map(torch.equal, sent, at))
    assert len({path.read_bytes() for path in tmp_path.iterdir() if len(path.name) == 64}) == 3


def test_a_rank_that_receives_nothing_keeps_what_it_has(here: Any, tmp_path: Path) -> None:
    here(1)
    at = torch.arange(3)
    with exchanged_batches.exchanged(tmp_path):
        dist.broadcast(at, 0, group=TENSOR)
        dist.broadcast(at, 0, group=OUTSIDE)
    assert at.tolist() == [0, 1, 2]


def test_what_is_larger_than_a_dry_run_knows_is_not_sent(here: Any, tmp_path: Path) -> None:
    here(0)
    with exchanged_batches.exchanged(tmp_path):
        dist.broadcast(torch.zeros((1 << 17) + 1, dtype=torch.int64), 0, group=TENSOR)
        dist.broadcast(torch.zeros((1 << 23) + 1, dtype=torch.bool), 0, group=TENSOR)
    assert not list(tmp_path.iterdir())


def test_a_rank_that_expects_another_size_is_told(here: Any, tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match=r"sends 32 bytes, but this rank expects 24 bytes"):
        received(here, tmp_path, [torch.arange(4)], [torch.zeros(3, dtype=torch.int64)])


def script(tmp_path: Path, words: str, devices: int = 16) -> Job:
    (tmp_path / "pretrain_gpt.py").touch()
    return Job.of(devices, [str(tmp_path / "pretrain_gpt.py"), *words.split()])


def test_ranks_of_a_script_that_do_not_read_the_data_are_a_kind_of_their_own(tmp_path: Path) -> None:
    job = script(tmp_path, LAYOUT)
    assert job.classes()[:2] == [(0, [0, 4]), (0, [1, 2, 3, 5, 6, 7])]
    assert job.representatives() == {0: (0, 2), 1: (0, 6), 8: (1, 2), 9: (1, 6)}
    assert job.representatives(by_batch=False) == {0: (0, 8), 8: (1, 8)}
    sharded = script(tmp_path, f"{LAYOUT} --use-distributed-optimizer").classes()
    assert [ranks[0] for _, ranks in sharded] == [0, 1, 4, 5, 8, 9, 12, 13]
    assert sorted(rank for _, ranks in sharded for rank in ranks) == list(range(16))


def test_the_driver_reads_on_all_ranks() -> None:
    job = Job.of(16, ["pretrain", *LAYOUT.split()])
    assert job.representatives() == {0: (0, 8), 8: (1, 8)}
    assert job.sender(3) == 3


def test_a_link_at_the_snapshot_is_not_followed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may be another account's, and lead to a file of the user."""
    monkeypatch.chdir(tmp_path)
    Path("link").symlink_to("precious")
    told: list[str] = []

    def run(device: str, start: object, environment: object, request: dict[str, str], limit: float) -> Any:
        told.append(json.loads(Path(request["specification"]).read_text(encoding="utf-8"))["snapshot"])
        return 1, ""

    hosts: Any = SimpleNamespace(run=run)
    job = Job.of(1, ["pretrain"])
    Ranks("cuda", {}, curve=True, snapshot=Path("link"), hosts=hosts)._run(job, 0, None)
    assert told == [str(tmp_path / "link")]


def test_who_sends_runs_before_who_receives_and_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run: list[int] = []

    def noted(self: Ranks, job: Job, number: int, memory: int | None) -> dict[str, Any]:
        run.append(number)
        return {}

    monkeypatch.setattr(Ranks, "_run", noted)
    ranks, job = Ranks("npu", {}), script(tmp_path, f"{LAYOUT} --mock-data")
    assert list(ranks.run(job, [9, 0])) == [9, 0]
    assert (sorted(run[:2]), run[2:]) == ([0, 8], [9])
    ranks.run(job, [1, 9])
    assert sorted(run[3:]) == [1, 9]
    run.clear()
    ranks.run(job.with_flags("--bf16"), [9])  # another job: other batches
    assert run == [8, 9]
    run.clear()
    Ranks("cuda", {}).run(job, [9])
    assert run == [9]
