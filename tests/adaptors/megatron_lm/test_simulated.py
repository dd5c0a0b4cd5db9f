"""The stock ``pretrain_gpt.py`` on simulated Ascend NPUs over HCCL: the curve of one process on the CPU."""

from __future__ import annotations

import json

import pytest

from tests.adaptors.megatron_lm.test_runs import TP2, deviation
from tests.support import bytecode, stock_lm, tiny, warm
from tests.support.simulated import run_simulated, unavailable

SBH, BSH = (f"--use-flash-attn --shape-order {order}" for order in ("SBH", "BSH"))
CAUSAL, WINDOW = "--pre-tockens 65536 --next-tockens 65536", "--pre-tockens 8 --next-tockens 0"
STEPS = 6


def steps(checkout, data, layout: str) -> list[str]:
    """Return script and flags of a short run."""
    return [
        str(checkout / "pretrain_gpt.py"),
        *stock_lm.flags(data),
        *f"--train-iters {STEPS} {layout}".split(),
    ]


@pytest.fixture(scope="module")
def on_cpu(checkout, data) -> dict[str, dict[int, float]]:
    """The curves of one process on the CPU, causal and with a sliding window."""
    curves = {}
    for window in (CAUSAL, WINDOW):
        script, *flags = steps(checkout, data, window)
        curves[window] = stock_lm.losses(stock_lm.succeeded(stock_lm.run(script, flags)))
    return curves


def check_buffers(groups: dict[str, dict[str, int]]) -> None:
    """Check that HCCL's buffers of all groups but the world's are the smallest, and large enough."""
    own = {name: group for name, group in groups.items() if name.startswith("undefined")}
    assert len(own) > 1, groups
    for group in own.values():
        assert group["buffer"] == 2 << 20 >= group["largest"], groups


@pytest.mark.parametrize(
    ("processes", "window", "layout", "limit"),
    [
        (2, CAUSAL, f"{TP2} --sequence-parallel {BSH}", 1e-5),
        (2, WINDOW, f"--use-distributed-optimizer --swap-optimizer --bf16 {SBH}", 1e-3),
    ],
    ids=["tp2-sp-BSH", "dp2-distributed-optimizer-swapped-bf16-window-SBH"],
)
def test_trains_like_the_cpu(checkout, data, on_cpu, processes, window, layout, limit, tmp_path):
    if unavailable():
        pytest.skip(unavailable())
    flags = f"{window} {layout} --tensorboard-dir {tmp_path / 'board'} --hccl-group-buffer-adaptive"
    command = tiny.command("run", *steps(checkout, data, flags), processes=processes)
    report = tmp_path / "report.json"
    variables = {**bytecode.elsewhere(), "MEGATRON_NPU_SIM_REPORT": str(report)}
    result = run_simulated(*command, modules=warm.STOCK, tree=checkout, **variables)
    assert result.returncode == 0, result.stdout[-5000:]
    assert "· simulated npu/hccl ·" in result.stdout
    iterations = [line for line in result.stdout.splitlines() if "elapsed time per iteration" in line]
    assert iterations
    # not at the end: what the other rank writes may come in between
    assert all("| simulated npu |" in line for line in iterations)
    # what TensorBoard calls the run
    assert [path.name for path in (tmp_path / "board").iterdir()] == ["simulated-npu"]
    check_buffers(json.loads(report.with_name("report.rank0.json").read_text())["groups"])
    assert deviation(stock_lm.losses(result.stdout), on_cpu[window]) < limit
