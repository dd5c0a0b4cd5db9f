"""What Megatron asks of gloo: collectives whatever the shapes, and processes that end with their groups."""

from __future__ import annotations

import itertools
import os
import re
import sys
import time
import types
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from megatron_npu import devices
from megatron_npu.base.errors import UsageError
from megatron_npu.devices import gloo
from megatron_npu.devices.redirect import Redirection
from tests.support import processes, warm


@pytest.fixture
def group(tmp_path):
    redirection = Redirection(devices.CpuDevice())
    redirection.on()
    dist.init_process_group("nccl", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()
    redirection.off()


@pytest.mark.parametrize("asynchronous", [False, True])
def test_shards_are_gathered_into_a_flat_buffer(group, asynchronous):
    shard, whole = torch.arange(8.0).view(2, 4), torch.empty(8)
    work = dist.all_gather_into_tensor(whole, shard, async_op=asynchronous)
    if work is not None:
        work.wait()
    assert whole.equal(torch.arange(8.0))


def test_a_flat_buffer_is_reduced_into_shards(group):
    shard = torch.empty(2, 4)
    dist.reduce_scatter_tensor(shard, torch.arange(8.0))
    assert shard.equal(torch.arange(8.0).view(2, 4))


def test_keywords_are_passed_on(group):
    whole = torch.empty(3)
    dist.all_gather_into_tensor(output_tensor=whole, input_tensor=torch.ones(3))
    assert whole.equal(torch.ones(3))


def test_columns_of_a_matrix_are_scattered_as_they_are(group):
    columns = torch.arange(6.0).view(2, 3)[:, 1:]
    mine = torch.empty(2, 2)
    dist.scatter(mine, [columns], src=0)
    assert mine.equal(columns)
    dist.scatter(tensor=mine, scatter_list=[columns + 1])
    assert mine.equal(columns + 1)
    assert dist.scatter(mine, [columns], async_op=True).wait()
    assert mine.equal(columns)


@pytest.mark.parametrize("name", ["all_reduce", "broadcast", "scatter"])
def test_a_tensor_with_gaps_is_refused_where_it_would_be_written_wrongly(group, name):
    more = {"all_reduce": {}, "broadcast": {"src": 0}, "scatter": {"scatter_list": [torch.ones(2, 2)]}}[name]
    with pytest.raises(ValueError, match=rf"{name} .* strides \[3, 1\]; Tensors must be contiguous"):
        getattr(dist, name)(torch.zeros(2, 3)[:, 1:], **more)
    dense = torch.ones(2, 3).t()  # in another order, without gaps: as with NCCL
    getattr(dist, name)(dense, **(more if name != "scatter" else {"scatter_list": [torch.ones(3, 2)]}))
    assert dense.equal(torch.ones(3, 2))


# The switch interval keeps gloo's thread from the interpreter's lock until the main thread gives it away.
ENDS_AT_ONCE = """
import sys
import torch
import torch.distributed as dist
from megatron_npu import devices
from megatron_npu.base.errors import UsageError
from megatron_npu.devices.redirect import Redirection

Redirection(devices.CpuDevice()).on()
dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
sys.setswitchinterval(10)
for _ in range(20):
    dist.all_reduce(torch.ones(100), async_op=True)
print("done")
"""


def test_a_process_that_keeps_its_groups_ends_well():
    """Without the wait nine of ten such processes are aborted."""
    for _ in range(3):
        result = processes.run(
            [sys.executable, "-c", ENDS_AT_ONCE], capture_output=True, text=True, check=False
        )
        assert (result.returncode, result.stdout) == (0, "done\n"), result.stderr


# A thread of gloo lets go of the backward pass's context with the lock that the reducer's end holds.
TRAINS_OFTEN = """
import faulthandler
import torch
import torch.distributed as dist
from megatron_npu import devices
from megatron_npu.base.errors import UsageError
from megatron_npu.devices.redirect import Redirection

torch.set_num_threads(1)
Redirection(devices.CpuDevice()).on()

def train():
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 8))
    model(torch.ones(2, 8)).sum().backward()
    dist.destroy_process_group()

for _ in range(150):
    faulthandler.dump_traceback_later(60, exit=True)
    train()
"""


def test_a_model_that_goes_after_its_group_does_not_hang():
    """Without the cure one of some fifteen such models does."""
    result = warm.run([sys.executable, "-c", TRAINS_OFTEN], env=os.environ, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


# OpenMP gives every thread that computes in parallel threads of its own; they never end.
GATHERS = """
import os
import re
import sys
import torch
import torch.distributed as dist
from megatron_npu import devices
from megatron_npu.base.errors import UsageError
from megatron_npu.devices import gloo
from megatron_npu.devices.redirect import Redirection

if sys.argv[1] == "uncured":
    gloo.copy_with_one_thread = lambda: None
torch.set_num_threads(2)
if sys.argv[2] == "train":
    from megatron_npu.finetune.rapidformer import engine

    engine.join(rank=0, world_size=1, timeout_minutes=1)
else:
    Redirection(devices.CpuDevice()).on()
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
large = torch.ones(1_000_000)
large.mul_(2)  # the main thread's pool
before = len(os.listdir("/proc/self/task"))
for _ in range(20):
    dist.all_gather([torch.empty_like(large)], large)
print(len(os.listdir("/proc/self/task")) - before, torch.get_num_threads())
"""


@pytest.mark.skipif(not gloo._THREADS.is_dir(), reason="needs Linux's /proc/self/task, to count threads")
@pytest.mark.parametrize("command", ["pretrain", "train"])
@pytest.mark.parametrize(("which", "grows"), [("cured", False), ("uncured", True)])
def test_gathering_starts_no_second_pool_of_threads(which, grows, command):
    """With one, every step after the first checkpoint takes twice as long on two cores (torch 2.13)."""
    command = [sys.executable, "-c", GATHERS, which, command]
    result = warm.run(command, env=os.environ, capture_output=True, text=True, check=True)
    more, own = map(int, result.stdout.split())
    assert (more > 0, own) == (grows, 2)


def write_thread(folder, number, name, state, sleeps):
    (folder / str(number)).mkdir(exist_ok=True)
    count = "" if sleeps is None else f"voluntary_ctxt_switches:\t{sleeps}\n"
    (folder / str(number) / "status").write_text(f"Name:\t{name}\nState:\t{state}\n{count}")


@pytest.fixture
def threads(tmp_path, monkeypatch):
    monkeypatch.setattr(gloo, "_THREADS", tmp_path)
    return tmp_path


def test_threads_at_rest_are_not_waited_for(threads):
    write_thread(threads, 1, "python", "R (running)", 5)
    assert gloo.wait_for_workers(timeout=0)  # none of gloo's
    write_thread(threads, 2, "pt_gloo_runloop", "S (sleeping)", 5)
    assert gloo.wait_for_workers(timeout=0)


def test_a_kernel_need_not_count(threads):
    write_thread(threads, 2, "pt_gloo_runloop", "S (sleeping)", None)
    assert gloo.wait_for_workers(timeout=0)
    write_thread(threads, 2, "pt_gloo_runloop", "R (running)", None)
    assert not gloo.wait_for_workers(timeout=0)


def test_a_thread_that_has_not_run_yet_is_waited_for(threads):
    write_thread(threads, os.getpid(), "python", "R (running)", 0)
    assert gloo.wait_for_workers(timeout=0)  # the main thread is this one
    write_thread(threads, 2, "python", "R (running)", 0)
    assert not gloo.wait_for_workers(timeout=0)


@pytest.mark.parametrize("name", ["pt_gloo_runloop", "pt_autograd_0"])
def test_a_thread_at_work_is_waited_for_and_named(name, threads, caplog):
    write_thread(threads, 2, name, "R (running)", 5)
    assert not gloo.wait_for_workers(timeout=0.05)
    assert "still running after 0.05 s" in caplog.text


def test_a_thread_that_wakes_between_two_looks_is_at_work(threads, monkeypatch):
    """It waits for the interpreter's lock."""
    sleeps = itertools.count()

    def sleep(seconds):
        write_thread(threads, 2, "pt_gloo_runloop", "S (sleeping)", next(sleeps))

    monkeypatch.setattr(gloo, "time", types.SimpleNamespace(sleep=sleep, monotonic=time.monotonic))
    sleep(0)
    assert not gloo.wait_for_workers(timeout=0)


@pytest.mark.parametrize(
    "text", ["Unable to find interface for: [127.0.0.1]", "Unable to find address for: x"]
)
def test_an_interface_that_is_not_there_is_named(text: str) -> None:
    told = rf"gloo cannot find .*{re.escape(text)}\. Set GLOO_SOCKET_IFNAME"
    with pytest.raises(UsageError, match=told), gloo.naming_interfaces():
        raise RuntimeError(f"[enforce fail at device.cc:212] ifa != nullptr. {text}")
    with pytest.raises(RuntimeError, match="another"), gloo.naming_interfaces():
        raise RuntimeError("another")


def test_gloo_itself_says_so(monkeypatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "evil0")
    told = r"gloo cannot find a network interface .*evil0"
    with pytest.raises(UsageError, match=told), gloo.naming_interfaces():
        dist.ProcessGroupGloo(dist.HashStore(), 0, 1, timedelta(seconds=5))
