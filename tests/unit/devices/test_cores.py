"""The cores of a machine among ranks: parts, threads, and what the user has said."""

from __future__ import annotations

import os
import sys

import pytest

from megatron_npu.devices import cores
from tests.conftest import ROOT
from tests.support import processes

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="threads can be bound to cores only on Linux")
QUIET = """
import contextlib
import os
from pathlib import Path
os.getloadavg = lambda: (float(os.environ.get("LOAD", "0")), 0, 0)
os.sched_getaffinity(0)
from megatron_npu.devices import cores
import torch
torch.ones(100_000).mul_(2)  # threads that are there before
cores.available = lambda: [(cpu,) for cpu in sorted(os.sched_getaffinity(0))]
cores.share()
cores.share()
bound = set()
for task in Path("/proc/self/task").iterdir():
    with contextlib.suppress(ProcessLookupError):  # it has just ended
        bound.add(tuple(sorted(os.sched_getaffinity(int(task.name)))))
Path(os.environ["FOLDER"], os.environ["RANK"]).write_text(repr((torch.get_num_threads(), sorted(bound))))
"""
ALL = tuple(sorted(os.sched_getaffinity(0)))
HALF = len(ALL) // 2
needs_two = pytest.mark.skipif(len(ALL) < 2, reason="the machine has one core")


def ranks(folder, **changes: str) -> tuple[list[tuple[int, list[tuple[int, ...]]]], str]:
    """Start two ranks with torchrun; return (threads, their cores) of each, and what they print."""
    (folder / "rank.py").write_text(QUIET)
    ours = ("OMP_NUM_THREADS", "OMP_PROC_BIND")
    env = {name: value for name, value in os.environ.items() if name not in ours}
    env |= {"PYTHONPATH": str(ROOT), "FOLDER": str(folder), "MEGATRON_NPU_AUTOLOAD": "0", **changes}
    launcher = "-m torch.distributed.run --standalone --nproc-per-node 2".split()
    command = [sys.executable, *launcher, str(folder / "rank.py")]
    done = processes.run(command, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return [eval((folder / str(rank)).read_text()) for rank in range(2)], done.stdout


@needs_two
def test_each_rank_has_cores_of_its_own(tmp_path) -> None:
    found, told = ranks(tmp_path)
    assert found == [(HALF, [ALL[:HALF]]), (HALF, [ALL[HALF : 2 * HALF]])]
    assert told.count("megatron_npu: 2 ranks on ") == 1
    assert "the 1 set by torchrun is ignored" in told
    assert "each rank bound to its own cores" in told


@needs_two
def test_what_the_user_says_counts(tmp_path) -> None:
    """The number of threads in one variable, the place in another: no rank is bound then."""
    found, told = ranks(tmp_path, OMP_NUM_THREADS="1", OMP_PROC_BIND="false")
    assert [number for number, _ in found] == [1, 1]
    assert (
        "1 thread each (OMP_NUM_THREADS=1), not bound to cores: OMP_PROC_BIND already sets the binding"
        in told
    )


@needs_two
def test_on_a_machine_that_others_use_no_rank_is_bound(tmp_path) -> None:
    found, told = ranks(tmp_path, LOAD="99.5")
    assert found == [(HALF, [ALL])] * 2
    assert "not bound to cores: other programs use the machine (load 99.5)" in told


def test_parts_are_equal_and_do_not_overlap() -> None:
    machine = [(cpu, cpu + 6) for cpu in range(6)]  # with two hardware threads each
    assert [cores.part(machine, rank, 3) for rank in range(3)] == [machine[:2], machine[2:4], machine[4:]]
    assert cores.part(machine, 3, 4) == machine[3:4]


def test_hardware_threads_of_a_core_belong_together(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(cores, "_TOPOLOGY", tmp_path)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0, 1, 2, 3, 7})
    for cpu, (socket, siblings) in enumerate([(0, "0,2"), (1, "1,3"), (0, "0,2"), (1, "1,3")]):
        (tmp_path / f"cpu{cpu}" / "topology").mkdir(parents=True)
        (tmp_path / f"cpu{cpu}" / "topology" / "physical_package_id").write_text(f"{socket}\n")
        (tmp_path / f"cpu{cpu}" / "topology" / "thread_siblings_list").write_text(f"{siblings}\n")
    assert cores.available() == [(0, 2), (7,), (1, 3)]  # nothing is known of 7
    assert (cores.threads(1), cores.threads(2), cores.threads(9)) == (3, 1, 1)


@pytest.mark.parametrize(
    "variables",
    [{}, {"LOCAL_WORLD_SIZE": "1"}, {"LOCAL_WORLD_SIZE": "9999"}, {"MEGATRON_NPU_SHARE_CORES": "0"}],
)
def test_nothing_is_shared_where_there_is_nothing_to_share(monkeypatch, capsys, variables) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    if not variables:
        monkeypatch.delenv("LOCAL_WORLD_SIZE")
    cores.share.__wrapped__()
    assert capsys.readouterr().out == ""
