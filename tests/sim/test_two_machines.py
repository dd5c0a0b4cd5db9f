"""Simulated NPUs of two machines: data go over TCP, losses are those of one machine, to the last digit."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import LONGEST, ROOT
from tests.support import ports, tiny, warm

pytest.importorskip("megatron.core")

LAYOUTS = {
    "data-parallel": ["--use-distributed-optimizer"],
    "tensor-parallel-within": ["--tensor-model-parallel-size", "2", "--sequence-parallel"],
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_losses_and_what_went_between_the_machines(layout, simulated, tmp_path):
    """Two ranks a machine: none of what the tensor-parallel ranks of one exchange goes to the other."""
    flags = [*tiny.flags_for(tiny.write_dataset(tmp_path / "numbers")), *LAYOUTS[layout]]
    words = ["-m", "megatron_npu", "pretrain", *flags, "--train-iters", "2", "--eval-iters", "0", "--save"]
    alone = [*tiny.torchrun(4), *words, str(tmp_path / "one")]
    together = simulated("python", *alone, modules=warm.DRIVER)
    assert together.returncode == 0, together.stdout[-4000:]
    meeting = ["--master-addr", "127.0.0.1", "--master-port", str(ports.free_port())]
    machines = [_machine(number, meeting, [*words, str(tmp_path / "two")], tmp_path) for number in range(2)]
    try:
        told = [machine.communicate(timeout=LONGEST)[0] for machine in machines]
    finally:
        for machine in machines:
            machine.kill()
    assert [machine.returncode for machine in machines] == [0, 0], "\n".join(told)
    assert tiny.losses(tmp_path / "two" / "metrics.jsonl") == tiny.losses(tmp_path / "one" / "metrics.jsonl")
    groups = json.loads((tmp_path / "sent.rank0.json").read_text())["groups"]
    sent = {way: sum(group[way]["bytes"] for group in groups.values()) for way in ("within", "between")}
    assert sent["within"] > 0
    assert sent["between"] > 0
    if layout == "tensor-parallel-within":
        tensor = max(
            (group for group in groups.values() if group["ranks"] == 2), key=lambda each: each["calls"]
        )
        assert tensor["between"]["calls"] == 0
        assert tensor["within"]["calls"] == tensor["calls"] > 50  # the group of each layer's sums


def _machine(number: int, meeting: list[str], words: list[str], folder: Path) -> subprocess.Popen[str]:
    """Start the launcher of a machine that has a name of its own."""
    launcher = ["-m", "torch.distributed.run", "--nnodes", "2", "--node-rank", str(number), *meeting]
    own = {"MEGATRON_NPU_SIM_HOST": f"machine{number}", "MEGATRON_NPU_SIM_REPORT": str(folder / "sent.json")}
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), **own}
    env.pop("MEGATRON_NPU_DEVICE", None)
    python = [sys.executable, *launcher, "--nproc-per-node", "2", *words]
    command, env = warm.simulated(python, env, warm.DRIVER)
    return subprocess.Popen(
        [sys.executable, "-m", "megatron_npu", "sim", "--", *command],
        env=env,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
