"""What fake CUDA tensors know of their values: the tokens of each expert, which decide about shapes."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

from megatron_npu.planning.fake_cuda import library
from tests.conftest import ROOT
from tests.support import processes

PROGRAM = """
from megatron_npu.planning.fake_cuda import library
library.load()
import json, sys
import torch
import torch.distributed as dist
from megatron_npu.planning.fake_cuda import machine, values
cuda = torch.device("cuda")
three = torch.tensor([3])
reduced = {name: three.clone() for name in ("SUM", "MAX", "AVG", "PRODUCT")}
chosen = torch.tensor([[1, 0, 1], [0, 0, 1], [1, 1, 0], [0, 0, 1]], dtype=torch.bool)
found = {}
with machine.installed(), machine.running(0, 4) as tensors:
    asked = []
    tensors.asked = asked.append
    placed = values.fake(chosen, cuda)
    counts = placed.sum(0).long()
    found["counts"] = counts.tolist(), counts.sum().item(), counts.cpu().numpy().tolist()
    found["capacity"] = torch.full((3,), 4, dtype=torch.long).reshape(3, 1).sum(dim=1).tolist()
    probabilities = torch.rand(4, 3, device=cuda, requires_grad=True)
    kept = [probabilities.masked_select(placed), probabilities[placed]]
    sum(each.sum() for each in kept).backward()
    found["kept"] = [list(each.shape) for each in [*kept, probabilities.grad]]
    found["rows"] = placed.nonzero()[:, 0].tolist()
    repeated = torch.rand(3, 8, device=cuda).repeat_interleave(counts, dim=0)
    found["repeated"] = list(repeated.shape)
    found["split"] = [len(each) for each in repeated.split(counts.tolist())]
    found["asked"] = list(asked)
    nothing = torch.zeros(1, device=cuda)  # the sums of losses and tokens of a stage without losses
    found["mean of nothing"] = (nothing / nothing).item()
    asked.clear()
    counts[1:].add_(1)  # through a view
    found["added"] = counts.tolist()
    counts[:1].copy_(torch.randint(0, 9, (1,), device=cuda))  # nobody knows these
    found["written"] = counts.tolist()
    found["asked after"] = len(asked)
    unknown = torch.randint(0, 9, (1,), device=cuda)
    output = values.fake(three, cuda)
    seen = output[:]
    torch.add(output, 2, out=output)
    found["output"] = values.of(output).tolist(), values.of(seen).tolist()
    torch.mul(unknown, 2, out=output)
    found["unknown output"] = values.of(output), values.of(seen)
    dist.init_process_group("nccl")
    found["reduced"] = {}
    for name in ("SUM", "MAX", "AVG", "PRODUCT"):
        tensor = values.fake(reduced[name], cuda)
        dist.all_reduce(tensor, op=getattr(dist.ReduceOp, name))
        known = values.of(tensor)
        found["reduced"][name] = known if known is None else known.tolist()
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def found() -> dict:
    if library.unavailable():
        pytest.skip(library.unavailable())
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = processes.run([sys.executable, "-c", PROGRAM], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


def test_an_output_that_is_given_holds_what_was_written_last(found: dict) -> None:
    assert found["output"] == [[5], [5]]
    assert found["unknown output"] == [None, None]


def test_a_reduction_over_four_ranks_with_equal_values(found: dict) -> None:
    assert found["reduced"] == {"SUM": [12], "MAX": [3], "AVG": [3], "PRODUCT": None}


def test_counts_follow_from_a_map_and_from_a_capacity(found: dict) -> None:
    assert found["counts"] == [[2, 1, 3], 6, [2, 1, 3]]
    assert found["capacity"] == [4, 4, 4]


def test_shapes_follow_from_counts(found: dict) -> None:
    assert found["kept"] == [[6], [6], [4, 3]]
    assert found["rows"] == [0, 0, 1, 2, 2, 3]
    assert found["repeated"] == [6, 8]
    assert found["split"] == [2, 1, 3]
    assert found["asked"] == []


def test_a_mean_over_nothing_is_not_known(found: dict) -> None:
    assert found["mean of nothing"] == 0


def test_what_is_written_is_known_until_it_is_unknown(found: dict) -> None:
    assert found["added"] == [2, 2, 4]
    assert found["written"] == [0, 0, 0]
    assert found["asked after"] == 3


# tokens 128 of 2 experts each; the rank's two of four experts get 1.5 times their even share of 128
SIZES = (
    "--num-layers 1 --hidden-size 64 --num-attention-heads 4 --seq-length 64 --max-position-embeddings 64 "
    "--micro-batch-size 2 --global-batch-size 4 --vocab-size 320 --lr 1e-4 --train-iters 2 --eval-iters 0 "
    "--mock-data --tokenizer-type NullTokenizer --bf16 --swiglu --disable-bias-linear --log-interval 1 "
    "--num-experts 4 --moe-router-topk 2 --expert-model-parallel-size 2 --num-workers 0"
)
RANK = """
import json, sys
from megatron_npu.planning.fake_cuda import library
library.load()
from torch.nn.modules import module as modules
from megatron_npu.planning.rank import cuda
def entered(module, given):
    if type(module).__name__ in ("SequentialMLP", "TEGroupedMLP", "GroupedMLP"):
        rows, counts = given[:2]
        print("experts", json.dumps([len(rows), [int(each) for each in counts]]), flush=True)
modules.register_module_forward_pre_hook(entered)
cuda.main(sys.argv[1])
"""


@pytest.mark.parametrize(
    "words",
    [
        "--moe-token-dispatcher-type alltoall --moe-grouped-gemm",
        "--moe-token-dispatcher-type allgather",
        "--moe-token-dispatcher-type alltoall --moe-expert-capacity-factor 1.0 "
        "--moe-pad-expert-input-to-capacity --moe-grouped-gemm",
    ],
    ids=["alltoall", "allgather", "padded"],
)
def test_experts_get_the_assumed_share(words: str, tmp_path: Path) -> None:
    pytest.importorskip("megatron.core")
    if library.unavailable():
        pytest.skip(library.unavailable())
    told = {"words": ["pretrain", *SIZES.split(), *words.split()], "alone": True, "imbalance": 1.5}
    told["words"].append("--no-check-for-nan-in-loss-and-grad")
    told["output"] = str(tmp_path / "report.json")
    (tmp_path / "rank.json").write_text(json.dumps(told))
    place = {"RANK": 1, "LOCAL_RANK": 1, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2, "MASTER_PORT": 1}
    env = {**os.environ, **{name: str(value) for name, value in place.items()}, "MASTER_ADDR": "localhost"}
    env |= {"MEGATRON_NPU_WATCHDOG": "0", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", RANK, str(tmp_path / "rank.json")]
    done = processes.run(command, env=env, capture_output=True, text=True, cwd=ROOT)
    report = json.loads((tmp_path / "report.json").read_text())
    assert (report["error"], report["code"]) == (None, 0), done.stderr[-3000:]
    lines = [line.removeprefix("experts ") for line in done.stdout.splitlines() if line[:8] == "experts "]
    passes = [json.loads(line) for line in lines]
    assert len(passes) == 2  # iterations of one micro batch
    share = 1 if "--moe-pad-expert-input-to-capacity" in words else 1.5
    count = int(2 * 64 * share)  # the tokens of both ranks for each of this rank's two experts
    for rows, counts in passes:
        assert rows == sum(counts)
        assert counts == [count, count]
