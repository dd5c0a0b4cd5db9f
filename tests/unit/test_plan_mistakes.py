"""``megatron-npu plan`` finds a mistake before a rank trains, and reads only descriptions of checkpoints."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import checkpoint

from megatron_npu.commands import cli
from megatron_npu.planning import command
from megatron_npu.planning.hosts import Hosts
from megatron_npu.planning.job import Job
from megatron_npu.planning.rank import before_training, program_lines
from megatron_npu.planning.ranks import Ranks
from megatron_npu.planning.replay import Allocator, DeviceFullError
from megatron_npu.planning.report import Row

LARGE = 1 << 15  # numbers: 128 KiB
JOB = "--pipeline-model-parallel-size 4 --micro-batch-size 1".split()


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    content = {"large": torch.full((LARGE,), 7.0), "small": torch.full((3,), 7.0)}
    checkpoint.save(content, checkpoint_id=tmp_path, no_dist=True)
    return tmp_path


def loaded(path: Path, large: int = LARGE) -> dict[str, torch.Tensor]:
    content = {"large": torch.zeros(large), "small": torch.zeros(3)}
    with before_training.stopping():
        checkpoint.load(content, storage_reader=checkpoint.FileSystemReader(path), no_dist=True)
    return content


def test_what_is_large_in_a_checkpoint_is_not_read(saved: Path) -> None:
    content = loaded(saved)
    assert content["small"].tolist() == [7.0] * 3
    assert not content["large"].any()


def test_shards_that_do_not_fit_or_are_not_there(saved: Path) -> None:
    with pytest.raises(checkpoint.CheckpointException, match=r"[Ss]ize mismatch"):
        loaded(saved, LARGE + 1)
    (shard,) = saved.glob("*.distcp")
    shard.write_bytes(shard.read_bytes()[:LARGE])
    with pytest.raises(checkpoint.CheckpointException, match="according to the checkpoint's description"):
        loaded(saved)
    shard.unlink()
    with pytest.raises(checkpoint.CheckpointException, match="No such file"):
        loaded(saved)


def test_tensors_of_a_whole_file_stay_on_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.save({"weight": torch.ones(LARGE)}, tmp_path / "model.pt")
    asked: list[Any] = []
    monkeypatch.setattr(torch, "load", lambda file, **named: asked.append(named))
    with before_training.stopping():
        torch.load(tmp_path / "model.pt", weights_only=True)
    assert asked == [{"weights_only": True, "mmap": True}]


def test_a_rank_is_ready_where_a_module_computes() -> None:
    module = torch.nn.Linear(2, 2)
    with pytest.raises(before_training.ReadyError), before_training.stopping():
        module(torch.ones(2))
    assert module(torch.ones(2)).shape == (2,)


def test_the_command_line_of_the_job_is_whole_but_for_what_it_writes() -> None:
    words = "--load there --eval-iters 3 --save away --finetune --exit-interval 7 --log-interval 2".split()
    said = " ".join(Job.of(4, ["pretrain", *JOB, *words]).whole_words())
    assert "--load there --eval-iters 3 --finetune --exit-interval 7" in said
    assert "away" not in said
    assert "--load" not in Job.of(4, ["pretrain", *JOB, *words]).words()[0]


@pytest.mark.parametrize(
    ("words", "expected"), [([], [[0, 3]]), (["--load", "there"], [[0, 3, "check"], [0, 3], [1, 2]])]
)
def test_the_ends_come_first_and_a_mistake_ends_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], words: list[str], expected: Any
) -> None:
    begun = []

    def run(self: Ranks, job: Job, numbers: list[int], memory: int | None = None) -> dict:
        begun.append([*numbers, *["check"] * self.check])
        found = {"code": 0, "error": None, "ready": True, "log": ""}
        if not words:
            found |= {"code": 2, "log": "megatron-npu pretrain: error: --num-layers 3; expected 4\n"}
        sizes = dict.fromkeys(("weights", "gradients", "optimizer", "logits", "peak", "reserved"), 1)
        return dict.fromkeys(numbers, found | sizes | {"place": "", "groups": {}})

    monkeypatch.setattr(Ranks, "on", classmethod(lambda cls, device, per_node: cls(device, {}, per_node)))
    monkeypatch.setattr(Ranks, "run", run)
    code = cli.main(["plan", "--devices", "4", "--", "pretrain", *JOB, *words])
    assert begun == expected
    said = capsys.readouterr()
    assert code == (0 if words else 2)
    assert words or "error: --num-layers 3; expected 4" in said.err


def test_a_rank_that_no_device_holds_is_told_in_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    said = "NPU out of memory. Tried to allocate 32768.00 GiB (NPU 0; 4096.00 GiB total capacity; …)"
    found = {"error": said, "out_of_memory": True, "asked_by": "layers.py:7", "code": None}
    monkeypatch.setattr(Ranks, "on", classmethod(lambda cls, device, per_node=8: cls(device, {}, per_node)))
    monkeypatch.setattr(Ranks, "run", lambda self, job, numbers, memory=None: dict.fromkeys(numbers, found))
    assert command.main(["--devices", "2", "--", "pretrain", "--num-layers", "2"]) == 2
    assert capsys.readouterr().err == (
        "megatron-npu plan: rank 0 of 2 needs more memory than any device has: layers.py:7 requested "
        "32768.00 GiB, but a device was assumed to have at most 4096G. Shard the model over more devices, or "
        "reduce it.\n"
    )


def test_a_rank_of_cuda_has_no_more_memory_than_any_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fake tensors take no address space: without the limit, a plan would name any size as what is needed."""
    limits = []

    def run(self: Hosts, kind: str, start: object, environment: object, request: dict, longest: float) -> Any:
        limits.append(json.loads(Path(request["specification"]).read_text())["limit"])
        return 1, ""

    monkeypatch.setattr(Hosts, "run", run)
    ranks = Ranks("cuda", {})
    ranks.run(Job.of(4, ["pretrain", *JOB]), [0])
    ranks.run(Job.of(4, ["pretrain", *JOB]), [0], 5 << 30)
    assert limits == [4096 << 30, 5 << 30]
    with pytest.raises(DeviceFullError) as full:
        Allocator(limits[0]).allocate(32768 << 30)
    row = Row(0, 0, 1, {"error": str(full.value), "out_of_memory": True, "asked_by": "layers.py:7"})
    assert "layers.py:7 requested 32768.00 GiB, but a device" in command._last_words(row)


def calling(path: str, expression: str, inner: Any = None) -> Any:
    """Return a function that a file at ``path`` defines, and that returns an expression's value in line 2."""
    names = {"inner": inner}
    exec(compile(f"def call():\n    return {expression}", path, "exec"), names)
    return names["call"]


@pytest.mark.parametrize("wrapper", ["devices/redirect/factories.py", "patching/attribute_patch.py"])
def test_the_line_that_asks_is_the_programs_and_not_one_of_a_wrapper(wrapper: str) -> None:
    path = f"/somewhere/megatron_npu/{wrapper}"
    assert (
        calling("/program.py", "inner()", calling(path, "inner()", program_lines.asking_line))()
        == "/program.py:2"
    )
    told = calling("/program.py", "inner()", calling(path, "inner('aten.mm')", program_lines.calling_lines))()
    assert [frame["filename"] for frame in told[:2]] == ["", "/program.py"]
    with pytest.raises(ZeroDivisionError) as caught:
        calling("/program.py", "inner()", calling(path, "1 / 0"))()
    assert program_lines.failing_line(caught.value) == "/program.py:2"
