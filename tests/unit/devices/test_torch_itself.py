"""torch's own tools work with the redirection as without: what they ask gets torch's own answer."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import checkpoint as dist_checkpoint
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity
from torch.utils import collect_env
from torch.utils.benchmark import Timer
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

from megatron_npu import devices
from megatron_npu.devices.redirect import Redirection
from tests.support import processes

COMPILED = """
import megatron.core
import torch

layer, batch = torch.nn.Linear(8, 8), torch.ones(2, 8)
expected = layer(batch)
compiled = torch.compile(layer)(batch)
compiled.sum().backward()
torch.testing.assert_close(compiled, expected)
try:
    torch.cuda.init()
except (AssertionError, RuntimeError) as error:  # torch without CUDA, torch without a driver
    print("compiled;", torch.cuda.current_device(), "refused" if str(error) else error)
"""


@pytest.mark.skipif(shutil.which("g++") is None, reason="no g++ for torch.compile")
def test_torch_compile_after_the_import_of_megatron(tmp_path: Path) -> None:
    """In a process of its own: inductor asks for the device once, and keeps the answer."""
    settings = {"MEGATRON_NPU_DEVICE": "cpu", "TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
    settings["TORCHINDUCTOR_CPP_CACHE_PRECOMPILE_HEADERS"] = "0"  # takes longer than two graphs
    done = processes.run(
        [sys.executable, "-c", COMPILED],
        env=os.environ | settings,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout == "compiled; 0 refused\n", done.stderr


def _linear() -> torch.nn.Module:
    torch.manual_seed(1)
    return torch.nn.Linear(4, 4)


def _loss(model: Any) -> torch.Tensor:
    loss = model(torch.ones(2, 4)).square().sum()
    loss.backward()
    return loss.detach()


def profiled(_: Path) -> Any:
    every = [ProfilerActivity.CPU, ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=every, profile_memory=True, with_stack=True) as profile:
        _loss(_linear())
    return "aten::linear" in profile.key_averages().table()


def timed(_: Path) -> Any:
    return Timer("x + 1", globals={"x": torch.ones(3)}).timeit(2).number_per_run


def recomputed(_: Path) -> Any:
    layers = torch.nn.Sequential(_linear(), torch.nn.Dropout())
    batches = [torch.ones(2, 4, requires_grad=True) for _ in range(2)]
    for batch, reentrant in zip(batches, (True, False), strict=True):
        torch.manual_seed(2)
        checkpoint(layers, batch, use_reentrant=reentrant).sum().backward()
    return [batch.grad for batch in batches]


def mixed(_: Path) -> Any:
    model, scaler = _linear(), torch.amp.GradScaler("cpu")
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(torch.ones(2, 4)).sum()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    return loss.detach(), scaler.get_scale(), model.weight.detach()


def seeded_inside(_: Path) -> Any:
    torch.manual_seed(3)
    with torch.random.fork_rng():
        torch.rand(3)
    return torch.rand(2)


def loaded(_: Path) -> Any:
    return list(DataLoader(torch.arange(8.0), 2, pin_memory=True, num_workers=1))


def averaged(_: Path) -> Any:
    return _loss(DistributedDataParallel(_linear()))


def sharded(_: Path) -> Any:
    return _loss(fully_shard(_linear())), _loss(
        FullyShardedDataParallel(_linear(), device_id=torch.device("cpu"))
    )


def optimizer_sharded(_: Path) -> Any:
    model = _linear()
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=0.1)
    _loss(model)
    optimizer.step()
    return model.weight.detach()


def saved_and_loaded(folder: Path) -> Any:
    first, second = _linear().state_dict(), torch.nn.Linear(4, 4).state_dict()
    dist_checkpoint.async_save(first, checkpoint_id=folder / "checkpoint").result()
    dist_checkpoint.load(second, checkpoint_id=folder / "checkpoint")
    return second["weight"]


def objects_sent(_: Path) -> Any:
    everything: list[Any] = [None]
    dist.all_gather_object(everything, {"rank": 0})
    dist.barrier()
    return everything


def what_is_there(_: Path) -> Any:
    accelerator = torch.accelerator.current_accelerator()
    return accelerator, torch.accelerator.device_count(), collect_env.get_env_info().is_cuda_available


@pytest.fixture
def group(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


TOOLS = [profiled, timed, recomputed, mixed, seeded_inside, loaded, averaged, sharded, optimizer_sharded]
TOOLS += [saved_and_loaded, objects_sent, what_is_there]


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("use", TOOLS, ids=lambda use: use.__name__)
def test_torch_s_own_tools_see_no_difference(use: Any, tmp_path: Path) -> None:
    stock = use(tmp_path / "stock")
    redirection = Redirection(devices.CpuDevice())
    redirection.on()
    try:
        redirected = use(tmp_path / "redirected")
    finally:
        redirection.off()
    assert _plain(redirected) == _plain(stock)


def _plain(value: Any) -> Any:
    """Return the value with lists of numbers in place of its tensors."""
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    return value.tolist() if isinstance(value, torch.Tensor) else value
