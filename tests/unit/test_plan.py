"""``megatron-npu plan``: which ranks stand for a job, what is tried, and the replay of CUDA's allocator."""

from __future__ import annotations

import json

import pytest

from megatron_npu.base.errors import UsageError
from megatron_npu.commands import cli
from megatron_npu.planning import remedies
from megatron_npu.planning.job import Job
from megatron_npu.planning.replay import Allocator, DeviceFullError
from megatron_npu.planning.report import Plan, Row

MIB = 1 << 20
LAYOUT = "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --micro-batch-size 1"


def job(words: str, devices: int = 8) -> Job:
    return Job.of(devices, ["pretrain", *words.split()])


def test_a_rank_for_each_stage() -> None:
    assert job(LAYOUT).representatives() == {0: (0, 4), 4: (1, 4)}


def test_the_last_share_of_the_optimizer_is_a_kind_of_its_own() -> None:
    found = job(f"{LAYOUT} --use-distributed-optimizer").representatives()
    assert found == {0: (0, 2), 2: (0, 2), 4: (1, 2), 6: (1, 2)}
    assert sum(count for _, count in found.values()) == 8


def test_every_rank_is_of_one_stage_whatever_the_order() -> None:
    stages = job(f"{LAYOUT} --use-tp-pp-dp-mapping").stages()
    assert stages == {0: [0, 1, 4, 5], 1: [2, 3, 6, 7]}


def test_micro_batches_beyond_a_full_pipeline_are_left_out() -> None:
    words, count = job(f"{LAYOUT} --global-batch-size 64 --save there --save-interval 5").words()
    assert count == 4
    assert words[words.index("--global-batch-size") + 1] == "8"
    assert "--save" not in words
    assert "there" not in words
    few, count = job(f"{LAYOUT} --global-batch-size 4").words()
    assert count == 2
    assert few[few.index("--global-batch-size") + 1] == "4"


@pytest.mark.parametrize(
    ("command", "given"),
    [([], "no command"), (["train", "x.py"], "train"), (["nowhere.py"], "no script nowhere.py")],
    ids=["nothing", "train", "no-script"],
)
def test_what_cannot_be_planned_is_refused(command: list[str], given: str) -> None:
    with pytest.raises(UsageError, match=given):
        Job.of(8, command)


def test_devices_that_no_layout_fills(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plan", "--devices", "6", "--", "pretrain", *LAYOUT.split()]) == 2
    assert "a multiple of 4" in capsys.readouterr().err


def test_the_cheapest_flags_come_first() -> None:
    sizes = {"--use-distributed-optimizer": 30, "--sequence-parallel": 20, "--recompute-granularity": 5}

    def needed(changed: Job) -> int:
        return min([40, *(size for flag, size in sizes.items() if changed.has(flag))])

    found, tried = remedies.found(job(LAYOUT), needed, 25)
    assert found == (["--use-distributed-optimizer", "--sequence-parallel"], 20)
    assert tried == ["--use-distributed-optimizer", "--use-distributed-optimizer --sequence-parallel"]
    assert remedies.found(job(LAYOUT), lambda _: None, 25)[0] is None


def test_a_report_says_the_rank_that_does_not_fit() -> None:
    found = {"weights": MIB, "gradients": MIB, "optimizer": MIB, "logits": 0, "peak": 5 * MIB, "updates": 2}
    found |= {"reserved": 6 * MIB, "place": "forward", "code": 0, "error": None}
    groups = {"TENSOR_MODEL_PARALLEL_GROUP": {"ranks": 2, "buffer": MIB, "calls": 3, "bytes": 9}}
    rows = [Row(0, 0, 4, found, fits=True), Row(4, 1, 4, found | {"groups": groups}, fits=False)]
    plan = Plan(job(LAYOUT), "npu", 6 * MIB, 8, rows)
    lines = plan.lines()
    assert len(lines) <= 40
    assert "does not fit: rank 4 needs 7.0 MiB of 6.0 MiB" in lines
    assert any("tensor_model_parallel_group" in line and "within a machine" in line for line in lines)
    told = json.loads(json.dumps(plan.to_json()))
    assert told["fits"] is False
    assert [row["reserved"] for row in told["ranks"]] == [6 * MIB, 6 * MIB]


def test_sizes_are_rounded_and_segments_taken_as_the_allocator_does() -> None:
    allocator = Allocator()
    small = allocator.allocate(1)
    assert (allocator.allocated, allocator.reserved) == (512, 2 * MIB)
    allocator.allocate(3 * MIB)
    assert allocator.reserved == 22 * MIB  # of 20 MiB, for what is below 10
    large = allocator.allocate(10 * MIB + 1)
    assert large.size == 10 * MIB + 512  # split off a segment that is there: 17 MiB are left of it
    assert allocator.reserved == 22 * MIB
    allocator.allocate(11 * MIB + 1)
    assert allocator.reserved == 34 * MIB
    allocator.free(small)
    allocator.empty_cache()
    assert allocator.reserved == 32 * MIB


def test_less_than_a_mebibyte_is_not_split_off() -> None:
    allocator = Allocator()
    block = allocator.allocate(12 * MIB - 4096)
    assert block.size == allocator.allocated == 12 * MIB


def test_free_neighbours_become_one_block_again() -> None:
    allocator = Allocator()
    blocks = [allocator.allocate(4 * MIB) for _ in range(5)]
    assert allocator.reserved == 20 * MIB
    for at in (1, 3, 2):
        allocator.free(blocks[at])
    again = allocator.allocate(12 * MIB)
    assert (again.address, again.size) == (blocks[1].address, 12 * MIB)
    assert allocator.reserved == 20 * MIB
    assert allocator.peak == 20 * MIB


def test_a_full_device_gives_back_what_nobody_uses_first() -> None:
    allocator = Allocator(limit=40 * MIB)
    first = allocator.allocate(30 * MIB)
    allocator.free(first)
    allocator.allocate(36 * MIB)
    assert allocator.reserved == 36 * MIB
    with pytest.raises(DeviceFullError, match="exceed"):
        allocator.allocate(16 * MIB)
