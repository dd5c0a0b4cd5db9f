"""A run over two machines: one torchrun on each, which here are two on one, that meet at an address."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.conftest import LONGEST
from tests.support import ports, tiny, warm

pytest.importorskip("megatron.core")


def test_two_machines_train_as_two_processes_of_one(tmp_path):
    dataset = tiny.write_dataset(tmp_path / "numbers")
    # in the default form a sharded optimizer has padding in which anything may be
    sharded = ["--use-distributed-optimizer", "--dist-ckpt-optim-fully-reshardable"]
    flags = [*tiny.flags_for(dataset), *sharded, "--eval-interval", "3"]
    one, two = tmp_path / "one", tmp_path / "two"
    together = tiny.run("pretrain", *flags, "--save", str(one), processes=2)
    assert together.returncode == 0, together.stderr
    meeting = ["--master-addr", "127.0.0.1", "--master-port", str(ports.free_port())]
    machines = [_machine(number, meeting, [*flags, "--save", str(two)]) for number in range(2)]
    try:
        told = [machine.communicate(timeout=LONGEST)[0] for machine in machines]
    finally:
        for machine in machines:
            machine.kill()
    assert [machine.returncode for machine in machines] == [0, 0], "\n".join(told)
    assert "iteration        6/       6" in told[0]
    assert "iteration" not in told[1]  # the first machine speaks
    assert tiny.losses(two / "metrics.jsonl") == tiny.losses(one / "metrics.jsonl")
    assert tiny.rows(two / "metrics.jsonl", "start")[0]["world_size"] == 2
    assert tiny.differences(two / "iter_0000006", one / "iter_0000006") == []


def _machine(number: int, meeting: list[str], flags: list[str]) -> subprocess.Popen[str]:
    launcher = ["-m", "torch.distributed.run", "--nnodes", "2", "--node-rank", str(number), *meeting]
    command = [sys.executable, *launcher, "--nproc-per-node", "1", "-m", "megatron_npu", "pretrain", *flags]
    command, env = warm.ready(command, tiny.environment(), warm.DRIVER)
    return subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
