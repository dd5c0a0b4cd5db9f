"""``megatron-npu plan``: which ranks stand for a job, what is tried, and the replay of CUDA's allocator."""

from __future__ import annotations

import json
import pickle
from pathlib import Path

import pytest
import torch
from torch.cuda import _memory_viz

from megatron_npu.base.errors import UsageError
from megatron_npu.commands import cli
from megatron_npu.planning import layouts, page, remedies, timeline
from megatron_npu.planning.calibration import Calibration
from megatron_npu.planning.hardware import HARDWARE
from megatron_npu.planning.job import Job
from megatron_npu.planning.layouts import Layout
from megatron_npu.planning.rank import measurements, process_groups
from megatron_npu.planning.ranks import Ranks
from megatron_npu.planning.replay import Allocator, DeviceFullError
from megatron_npu.planning.report import Plan, Row
from megatron_npu.planning.search import DryRun, Search
from megatron_npu.planning.shape import Shape
from megatron_npu.watchdog import first_contact

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
    [([], "no command"), (["serve", "x.py"], "serve"), (["nowhere.py"], "script nowhere.py does not exist")],
    ids=["nothing", "serve", "no-script"],
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
    groups["DATA_PARALLEL_GROUP"] = {"ranks": 1, "buffer": 0, "calls": 3, "bytes": 9}  # sends nothing
    rows = [Row(0, 0, 4, found, fits=True), Row(4, 1, 4, found | {"groups": groups}, fits=False)]
    plan = Plan(job(LAYOUT), "npu", 6 * MIB, 8, rows)
    lines = plan.lines()
    assert len(lines) <= 40
    assert "does not fit: rank 4 needs 7.0 MiB of 6.0 MiB" in lines
    assert any("tensor_model_parallel_group" in line and "within a machine" in line for line in lines)
    assert not any("data_parallel_group" in line for line in lines)
    assert sum(line.endswith("  forward") for line in lines) == 2  # where the peak of each kind is
    assert any("on rank 4: 1 x 2 x 512.0 KiB (HCCL_BUFFSIZE" in line for line in lines)
    on_cuda = Plan(job(LAYOUT), "cuda", 6 * MIB, 8, rows).lines()
    assert any("NCCL's communicators (1 with traffic on rank 4; NCCL_BUFFSIZE" in line for line in on_cuda)
    told = json.loads(json.dumps(plan.to_json()))
    assert told["fits"] is False
    assert [row["reserved"] for row in told["ranks"]] == [6 * MIB, 6 * MIB]


def test_a_long_report_leaves_out_the_kinds_that_need_least() -> None:
    found = {"weights": MIB, "gradients": MIB, "optimizer": MIB, "logits": 0, "peak": 5 * MIB, "updates": 2}
    found |= {"place": "forward", "code": 0, "error": None, "asked": {f"x.py:{line}": 1 for line in range(9)}}
    group = {"ranks": 2, "buffer": MIB, "calls": 3, "bytes": 9}
    found["groups"] = {f"GROUP {number}": group for number in range(30)}
    rows = [Row(rank, 0, 1, found | {"reserved": rank * MIB}, fits=True) for rank in range(64)]
    lines = Plan(job(f"{LAYOUT} --global-batch-size 4096", 64), "npu", 90 << 30, 8, rows).lines()
    assert len(lines) == 40
    shown = [line for line in lines if line.endswith("  forward")]
    assert shown[-1].split()[0] == "63"
    assert f"  and {64 - len(shown)} kinds of ranks that need less (listed with --json FILE)" in lines


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


@pytest.mark.parametrize("family", ["megatron_core", "megatron_lm"])
def test_a_tree_of_old_ends_by_its_number_of_iterations(family: str) -> None:
    flags = tuple("--train-iters 500 --lr-warmup-iters 50 --micro-batch-size 2".split())
    words, _ = Job(1, ("run", "pretrain_gpt.py"), flags, family).words()
    said = " ".join(words)
    if family == "megatron_core":
        assert "--exit-interval 2" in said
        assert "--no-check-for-nan-in-loss-and-grad" in said
    else:  # it has no such flags, or saves where they end it
        assert "--exit-interval" not in said
        assert "--no-check" not in said
        assert said.endswith("--lr-decay-iters 500 --train-iters 2")


def test_samples_of_a_tree_of_old_are_shortened() -> None:
    flags = tuple("--train-samples 4000 --global-batch-size 8 --micro-batch-size 4".split())
    words, _ = Job(1, ("run", "pretrain_gpt.py"), flags, "megatron_lm").words()
    assert " ".join(words).endswith("--lr-decay-samples 4000 --train-samples 16")


def test_every_rank_is_in_one_class() -> None:
    classes = job(f"{LAYOUT} --use-distributed-optimizer", 16).classes()
    assert sorted(rank for _, ranks in classes for rank in ranks) == list(range(16))
    assert [ranks[0] for _, ranks in classes] == [0, 6, 8, 14]


@pytest.mark.parametrize(
    ("flags", "firsts"),
    [
        ("--context-parallel-size 2", [0, 6, 8, 14]),  # of data and context parallel ranks together
        ("--expert-model-parallel-size 2", [0, 4, 6, 8, 12, 14]),  # experts: the last four ranks of a stage
        ("--expert-model-parallel-size 4", [0, 6, 8, 14]),  # each expert on one rank only
    ],
)
def test_the_last_shard_is_a_class(flags: str, firsts: list[int]) -> None:
    classes = job(f"{LAYOUT} --use-distributed-optimizer {flags}", 16).classes()
    assert [ranks[0] for _, ranks in classes] == firsts


def test_a_curve_knows_what_lives_on_by_its_longest_block() -> None:
    def event(action: str, addr: int, size: int) -> dict:
        return {"action": action, "addr": addr, "size": size}

    events = [
        event("segment_alloc", 1, 999),
        event("alloc", 1, 10),  # temporary, where a weight lies later
        event("free_requested", 1, 10),
        event("alloc", 1, 7),
        event("alloc", 2, 5),
        event("free_requested", 2, 5),
        event("free_completed", 2, 5),
    ]
    curve = timeline.curve(events, {"weights": [1], "gradients": [], "optimizer": [3]})
    assert curve == [[0, 0, 0, 10], [0, 0, 0, 0], [7, 0, 0, 0], [7, 0, 0, 5], [7, 0, 0, 0]]


def test_a_snapshot_of_the_replay_is_one_that_torch_draws(tmp_path: Path) -> None:
    allocator = Allocator()
    allocator.events = []
    kept = allocator.allocate(3 * MIB)
    allocator.free(allocator.allocate(100))
    snapshot = {"segments": allocator.segments(), "device_traces": [allocator.events]}
    report: dict = {}
    timeline.keep(snapshot, {"weights": [kept.address]}, report, str(tmp_path / "snapshot.pickle"))
    assert report["curve"][-1] == [3 * MIB, 0, 0, 0]
    read = pickle.loads((tmp_path / "snapshot.pickle").read_bytes())
    assert [segment["segment_type"] for segment in read["segments"]] == ["large", "small"]
    assert sum(segment["allocated_size"] for segment in read["segments"]) == allocator.allocated
    drawn = _memory_viz.trace(read)
    assert "b = a[0:3.0MiB]" in drawn
    assert "del d # 512.0B" in drawn
    assert "total_allocated: 3.0MiB" in _memory_viz.segsum(read)


def test_a_page_escapes_and_shows_each_kind() -> None:
    found = {"weights": MIB, "gradients": 0, "optimizer": 0, "logits": 0, "peak": 2 * MIB, "updates": 2}
    found |= {"reserved": 2 * MIB, "place": "<forward>", "code": 0, "groups": {}}
    found["curve"] = [[0, 0, 0, MIB], [MIB, 0, 0, MIB]]
    plan = Plan(job(LAYOUT), "npu", 3 * MIB, 8, [Row(0, 0, 8, found, fits=True)])
    text = page.page(plan)
    assert "<script" not in text
    assert "&lt;forward&gt;" in text
    assert text.count("<polygon") == 4
    assert "stroke-dasharray" in text  # the memory of a device


MODEL = (
    "--num-layers 8 --hidden-size 1024 --num-attention-heads 16 --seq-length 2048 --vocab-size 32000 "
    "--global-batch-size 16 --micro-batch-size 2 --tensor-model-parallel-size 8"
)


def test_layouts_divide_and_replace_the_one_that_is_given() -> None:
    given = job(MODEL)
    shape = Shape.of(given)
    found = list(layouts.all_of(given, shape, per_node=8))
    assert len(set(found)) == len(found) > 100
    for layout in found:
        assert layout.tensor * layout.pipeline * layout.context * layout.data == 8
        assert layout.micro_batch * layout.micro_batches * layout.data == 16
        assert 8 % (layout.pipeline * layout.chunks) == 0
    (one,) = {
        each
        for each in found
        if each.tensor == each.pipeline == each.context == each.micro_batch == 1
        and each.recomputed == "full"
        and each.shared
    }
    changed = one.job(given, shape)
    assert changed.tensor == 1
    assert "--tensor-model-parallel-size" not in changed.flags
    assert changed.has("--use-distributed-optimizer")


def search(memory: int, words: str = MODEL) -> Search:
    return Search(job(words), memory, 8, "ascend-910b", 3)


def test_only_what_may_fit_is_run_and_the_fastest_that_fits_is_said() -> None:
    many, count = search(64 << 30).candidates()
    few, again = search(2 << 30).candidates()
    assert count == again > len(many) > len(few) > 0
    assert all(each.memory() <= 1.15 * (2 << 30) for each in few)
    times = [each.time().total for each in many]
    assert times == sorted(times)
    sizes = iter([DryRun(None, "no"), DryRun(3 << 30), DryRun(1 << 30)])
    found, lines = search(2 << 30).run(lambda _: next(sizes))
    assert found[0].ran.needed == 1 << 30
    assert lines[-1] == f"fastest that fits: {' '.join(found[0].estimate.layout.flags(Shape.of(job(MODEL))))}"
    assert any("estimate" in line for line in lines)
    assert len(lines) <= 40


def test_the_estimate_of_a_large_job_is_no_faster_than_its_arithmetic() -> None:
    words = MODEL.replace("--tensor-model-parallel-size 8", "--untie-embeddings-and-output-weights")
    estimate = search(64 << 30, words).candidates()[0][0]
    shape = estimate.shape
    weights = shape.layers * (shape.attention + shape.mlp)
    flops = 6 * weights * 16 * 2048 / 8
    assert estimate.time().total > flops / HARDWARE["ascend-910b"].flops


def test_a_search_without_sizes_says_which() -> None:
    with pytest.raises(UsageError, match="--num-layers, --hidden-size"):
        Shape.of(job("--num-attention-heads 4 --seq-length 8 --global-batch-size 2"))


def ranks_of(monkeypatch: pytest.MonkeyPatch, reserved: int) -> list[tuple[Job, Ranks]]:
    """Let each rank report so many bytes at once; return the jobs whose ranks have run, and how."""
    asked = []

    def run(self: Ranks, job: Job, numbers: list[int], memory: int | None = None) -> dict:
        asked.append((job, self))
        found = {"weights": MIB, "gradients": 0, "optimizer": 0, "logits": 0, "peak": reserved, "groups": {}}
        found |= {
            "reserved": reserved,
            "place": "forward",
            "code": 0,
            "updates": 2,
            "curve": [[MIB, 0, 0, 0]],
        }
        return dict.fromkeys(numbers, found)

    monkeypatch.setattr(Ranks, "on", classmethod(lambda cls, device, per_node=8: cls(device, {}, per_node)))
    monkeypatch.setattr(Ranks, "run", run)
    return asked


def test_a_search_ends_with_flags_to_paste_or_with_2(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = ranks_of(monkeypatch, 2 << 30)
    words = ["--search", "--search-runs", "2", "--", "pretrain", *MODEL.split()]
    assert cli.main(["plan", "--devices", "8", "--memory", "4G", *words]) == 0
    assert len(asked) == 2
    said = capsys.readouterr().out
    assert "fastest that fits: " in said
    assert "ascend-910b" in said
    assert cli.main(["plan", "--devices", "8", "--memory", "2000M", "--hardware", "h100", *words]) == 2
    said = capsys.readouterr().out
    assert "none of these layouts fits; " in said.splitlines()[-1]
    assert "more may fit by estimate (raise --search-runs)" in said.splitlines()[-1]
    assert "h100" in said
    assert cli.main(["plan", "--devices", "8", "--memory", "2000M", *words[:2], "999", *words[3:]]) == 2
    assert capsys.readouterr().out.rstrip().endswith("no layout fits")


def test_a_search_learns_from_its_dry_runs_what_the_closed_forms_do_not_count() -> None:
    """Without that, all dry runs are spent on the fastest layouts, each too large by the same buffers."""
    most, above = 4 << 30, 3 << 30
    kept = {each.layout: each for each in search(most).candidates()[0]}
    needed = {layout: int(each.memory()) + above for layout, each in kept.items()}
    assert any(size <= most for size in needed.values())
    ran: list[Layout] = []

    def dry_run(planned: Job) -> DryRun:
        layout = next(each for each in kept if each.job(job(MODEL), Shape.of(job(MODEL))) == planned)
        ran.append(layout)
        return DryRun(needed[layout])

    found, lines = search(most).run(dry_run)
    assert needed[ran[0]] > most, "the fastest does not fit"
    assert found[0].ran.needed is not None
    assert found[0].ran.needed <= most
    assert lines[-1].startswith("fastest that fits: ")


def test_a_page_and_a_timeline_are_written(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked = ranks_of(monkeypatch, MIB)
    pages = [word for name in ("html", "timeline") for word in (f"--{name}", str(tmp_path / name))]
    assert cli.main(["plan", "--devices", "8", *pages, "--", "pretrain", *LAYOUT.split()]) == 0
    assert "<svg" in (tmp_path / "html").read_text()
    assert [(ranks.curve, ranks.snapshot) for _, ranks in asked] == [
        (True, None),
        (True, tmp_path / "timeline"),
    ]


def test_a_rank_has_the_number_on_its_machine_that_it_would_have() -> None:
    environment = Ranks("npu", {}, per_node=4)._environment_of(job(LAYOUT, 16), 6, None)
    assert (environment["LOCAL_RANK"], environment["LOCAL_WORLD_SIZE"]) == ("2", "4")
    assert environment["MEGATRON_NPU_SIM_DEVICES"] == "4"


@pytest.mark.parametrize(("data", "first"), [("--mock-data", [4]), ("--data-path text", [0, 4])])
def test_rank_0_writes_the_indices_before_others_read_them(
    monkeypatch: pytest.MonkeyPatch, data: str, first: list[int]
) -> None:
    begun: list[int] = []
    monkeypatch.setattr(Ranks, "_run", lambda self, job, number, memory: begun.append(number) or {})
    assert Ranks("npu", {}).run(job(f"{LAYOUT} {data}"), [4]) == {4: {}}
    assert begun == first


def table_of(device: str, seconds: float) -> dict:
    """A table as ``bench`` writes it, whose rows took so many times their estimates."""
    model = {"layers": 4, "hidden": 512, "heads": 8, "seq_length": 128, "vocabulary": 1024}
    rows = [{"tensor parallel": "1", "pipeline parallel": "1", "samples_per_second": 16 / seconds}]
    rows.append({"tensor parallel": "8", "pipeline parallel": "8", "outcome": "NA"})
    sizes = {"devices": 2, "micro_batch_size": 2, "global_batch_size": 16}
    return {"device": device, "hardware": "a board", "model": model, "rows": rows, **sizes}


def test_a_table_of_bench_calibrates_the_estimates(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    ranks_of(monkeypatch, 1 << 30)
    path = tmp_path / "bench.json"
    path.write_text(json.dumps(table_of("npu", 1.0)))
    once = Calibration.of(path, "npu", HARDWARE["ascend-910b"], 8)
    path.write_text(json.dumps(table_of("npu", 3.0)))
    again = Calibration.of(path, "npu", HARDWARE["ascend-910b"], 8)
    assert again.factor == pytest.approx(3 * once.factor)
    words = ["--search", "--search-runs", "1", "--bench", str(path), "--", "pretrain", *MODEL.split()]
    assert cli.main(["plan", "--devices", "8", *words]) == 0
    assert f"times {again.factor:.3g}, the median of 1 measured rows of bench.json, a board" in (
        capsys.readouterr().out
    )
    path.write_text(json.dumps(table_of("simulated npu", 1.0)))
    assert cli.main(["plan", "--devices", "8", *words]) == 2
    assert "measured on simulated npu" in capsys.readouterr().err


def test_a_training_of_transformers_ends_after_two_iterations_and_evaluates_nothing() -> None:
    words = "--task causal_lm --epochs 3 --lr-warmup-iters 5 --global-batch-size 64 --nproc-per-node 4"
    words += " --save there"
    planned = Job.of(4, ["train", *words.split(), "--fsdp-memory-optimization"])
    said, count = planned.words()
    assert said[0] == "train"
    assert count == planned.micro_batches == 2
    kept = " ".join(said)
    assert "--train-iters 3 --exit-interval 2" in kept
    for left_out in ("--epochs", "--lr-warmup-iters", "--nproc-per-node", "there"):
        assert left_out not in kept
    assert planned.representatives() == {0: (0, 3), 3: (0, 1)}  # the last has the smallest shard
    whole = " ".join(planned.whole_words())
    assert "--epochs 3" in whole
    assert "--nproc-per-node" not in whole


def test_the_flags_that_make_a_training_of_transformers_fit() -> None:
    planned = Job.of(4, "train --task causal_lm --micro-batch-size 4".split())
    assert [" ".join(flags) for flags, _ in remedies.candidates(planned)] == [
        "--zero-1-memory-optimization",
        "--fsdp-memory-optimization",
        "--fsdp-memory-optimization --micro-batch-size 1",
        "--fsdp-memory-optimization --micro-batch-size 1 --checkpoint-activations",
    ]
    with pytest.raises(UsageError, match="--search does not support train"):
        Shape.of(planned)


def test_a_sharded_tensor_has_the_memory_of_its_shard() -> None:
    class Sharded(torch.Tensor):
        """Without memory, as a DTensor."""

        __torch_dispatch__ = torch._C._disabled_torch_function_impl

    local = torch.ones(4)
    sharded = torch.Tensor._make_wrapper_subclass(Sharded, (8,), dtype=torch.float32)
    sharded._local_tensor = local
    storages = measurements._Storages("cpu")
    storages.add(sharded)
    assert storages.bytes() == 16
    assert [tensor.data_ptr() for tensor in storages.tensors] == [local.data_ptr()]


def test_a_rank_does_not_wait_for_machines_that_are_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    place = {"RANK": "0", "WORLD_SIZE": "16", "LOCAL_WORLD_SIZE": "8", "MASTER_ADDR": "localhost"}
    for name, value in place.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(
        first_contact, "_store", lambda: pytest.fail("the rank connects to the other machines")
    )
    with process_groups.absent(lambda _: "fake"), first_contact.made():
        pass
