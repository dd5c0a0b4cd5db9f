"""The simulator's dry mode: what is left out has the dtype, sizes and memory of what would be computed."""

from __future__ import annotations

import json
import re

import pytest

from tests.support import warm

# of a transformer's forward pass, loss, clipping and optimizer; tests/sim/dry_worker.py knows all of torch's
OPERATIONS = """
    nn.functional.layer_norm native_layer_norm nn.functional.rms_norm nn.functional.linear matmul mm bmm
    addmm baddbmm
    nn.functional.gelu nn.functional.silu nn.functional.softmax log_softmax nn.functional.dropout
    nn.functional.embedding gather scatter_add index_select index_add cumsum topk sort argmax max amax
    sum mean
    logsumexp exp log rsqrt sigmoid tanh cat stack split chunk masked_fill tril triu add mul div sub pow norm
    nn.functional.cross_entropy nn.functional.pad transpose permute clamp maximum eq isfinite all any
""".split()


def test_operations_that_are_left_out_give_what_computed_ones_give(simulated) -> None:
    done = simulated("python", "-m", "tests.sim.dry_worker", *OPERATIONS, modules=warm.DRIVER)
    assert done.returncode == 0, done.stdout[-4000:]
    assert ", 0 differ" in done.stdout


def test_a_rank_alone_takes_the_memory_of_a_whole_run(simulated, tmp_path) -> None:
    pytest.importorskip("megatron.core")
    path = tmp_path / "grid.json"
    words = "python -m tests.sim.dry_grid --here --layout gpt --output".split()
    done = simulated(*words, str(path), modules=warm.DRIVER)
    assert done.returncode == 0, done.stdout[-4000:]
    (row,) = json.loads(path.read_text())["gpt"]["ranks"]
    assert row["full"]["peak"] == row["dry"]["peak"] > 1 << 20


TRAINING = (
    "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --max-position-embeddings 32 "
    "--micro-batch-size 2 --global-batch-size 4 --train-iters 3 --log-interval 1 --eval-iters 0 --lr 1e-3 "
    "--bf16 --num-workers 0 --mock-data --tokenizer-type NullTokenizer --vocab-size 1000 --no-plot"
)


def test_a_dry_run_that_computes_everything_has_the_losses_of_the_simulator(simulated) -> None:
    pytest.importorskip("megatron.core")

    def numbers(**environment: str) -> list[tuple[str, str]]:
        words = ["python", "-m", "megatron_npu", "pretrain", *TRAINING.split()]
        done = simulated(*words, modules=warm.DRIVER, **environment)
        assert done.returncode == 0, done.stdout[-4000:]
        return re.findall(r"lm loss: (\S+) .*?grad norm: (\S+)", done.stdout)

    usual = numbers()
    assert len({loss for loss, _ in usual}) == 3, usual
    assert numbers(MEGATRON_NPU_SIM_DRY="1000G") == usual


# `b` is larger than the limit: nobody computes its sum, which is asked for in line 4 of this program
PROGRAM = """
import os, torch, torch_npu, resource; from megatron_npu.planning.rank import measurements, npu
torch.npu.set_device(0); noted = measurements.Measurements(); kept = npu._tell_of_asked(noted)
b = torch.randn(1 << 30, device="npu"); c = (b * 2).sum().item()
small = torch.ones(8, device="npu").sum().item()
print("RESULT", c, small, dict(noted.asked), torch.npu.memory_allocated() >> 30, flush=True)
used = torch.ones(1 << 14, device="npu"); del used  # its memory is the next result's
print("PLACE", torch.empty(8192, 8192, device="npu").argmax(-1).max().item(), flush=True)
assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss < 3 << 20, "the memory was touched"
try:
    torch.mm(torch.empty(4096, 4096, device="npu"), torch.empty(4095, 4096, device="npu"))
except RuntimeError as error:
    print("MISTAKE", error, flush=True)
os._exit(0)
"""


def test_what_nobody_knows_is_told_and_a_mistake_is_one(simulated, tmp_path) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    done = simulated("python", str(program), MEGATRON_NPU_SIM_DRY="1M")
    assert "RESULT 1.0 8.0" in done.stdout, done.stdout[-4000:]
    assert "program.py:4 (aten::_local_scalar_dense)': 1" in done.stdout
    assert "PLACE 0" in done.stdout
    assert "MISTAKE mat1 and mat2 shapes cannot be multiplied" in done.stdout
