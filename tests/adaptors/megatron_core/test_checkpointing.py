"""Checkpoints: on this torch, by a persistent worker, with another expert parallelism."""

from __future__ import annotations

import sys
import time
from argparse import Namespace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_npu.adaptors.megatron_core.checkpoints import checksums as core_checksums
from megatron_npu.adaptors.megatron_core.checkpoints import persistent_worker
from megatron_npu.adaptors.megatron_core.checkpoints.checkpointing import with_other_experts
from megatron_npu.adaptors.shared import checksums as of_scripts
from megatron_npu.base.errors import UsageError
from megatron_npu.checkpoint_files import checksums
from tests.conftest import ROOT
from tests.support import on_version, tiny, warm
from tests.support.comparison import here

pytestmark = pytest.mark.usefixtures("single_process")


@pytest.fixture
def checkpoint(single_process, tmp_path):
    """A checkpoint of two tensors, of which one lies in files of its own."""
    from megatron.core.dist_checkpointing import ShardedTensor, save
    from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy

    tensors = {
        "kept": ShardedTensor.from_rank_offsets("kept", torch.arange(6.0).reshape(2, 3)),
        "gone": ShardedTensor.from_rank_offsets("optimizer.gone", torch.ones(4)),
    }
    save(tensors, str(tmp_path), TorchDistSaveShardedStrategy("torch_dist", 1, separation_hint="optimizer"))
    return tmp_path


def test_tensors_of_a_prefix_are_removed(checkpoint):
    from megatron.core.dist_checkpointing import ShardedTensor, load, remove_sharded_tensors
    from torch.distributed.checkpoint import FileSystemReader

    before = set(FileSystemReader(checkpoint).read_metadata().state_dict_metadata)
    remove_sharded_tensors(checkpoint, key_prefix="optimizer")
    after = set(FileSystemReader(checkpoint).read_metadata().state_dict_metadata)
    assert before - after == {"optimizer.gone"}
    assert not list(checkpoint.glob("optimizer*"))
    wanted = {"kept": ShardedTensor.from_rank_offsets("kept", torch.empty(2, 3))}
    assert torch.equal(load(wanted, str(checkpoint))["kept"], torch.arange(6.0).reshape(2, 3))


@pytest.mark.parametrize("version", ["0.17.1", "0.18.2"])
def test_tensors_of_a_prefix_are_removed_where_upstream_looks_in_another_class(version: str) -> None:
    name = f"{__file__}::{test_tensors_of_a_prefix_are_removed.__name__}"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", name]
    environment = tiny.environment() | on_version.environment(version)
    done = warm.run(command, env=environment, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-2000:]
    assert "1 passed" in done.stdout


def test_an_asynchronous_save_is_summed_up_and_named_before_anybody_hears_of_it(tmp_path: Path) -> None:
    """In the order in which upstream finishes it; the one before goes as ``--save-retain-interval`` says."""
    from megatron.core.dist_checkpointing.strategies.async_utils import AsyncRequest

    places = [tmp_path / f"iter_000000{number}" for number in (2, 4)]
    for place in places:
        place.mkdir()
    tracker = tmp_path / of_scripts.TRACKER
    tracker.write_text("2")
    heard = []

    def tell() -> None:
        heard.append((tracker.read_text(), checksums.damaged(places[1]), of_scripts.named(str(tracker))))

    with core_checksums._beginning(str(tmp_path), places[1], verifies=True, retain=4):
        name = of_scripts.tracker_to_write(str, tracker)
        written = partial(Path(name).write_text, "4")
        request = AsyncRequest(None, (), [partial((places[1] / "weights").write_bytes, b"4"), written, tell])
        core_checksums.finish_by_name(lambda scheduled: None, request)
    request.execute_sync()
    assert heard == [("4", [], str(tracker))]
    assert (places[1] / checksums.NAME).is_file()
    deadline = time.monotonic() + 10
    while places[0].exists() and time.monotonic() < deadline:  # a thread removes it
        time.sleep(0.01)
    assert not places[0].exists()


def _staged(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """Bring tensors to the host as ``FileSystemWriterAsync.preload_tensors`` does."""
    return [tensor.to("cpu", non_blocking=True) for tensor in tensors]


def _write_when_told(rank: int, tensors: list[torch.Tensor], folder: Path) -> None:
    """Write the tensors, but not before training has gone on."""
    while not (folder / "go").exists():
        time.sleep(0.01)
    torch.save(tensors, folder / "written")


def semaphores(caller: object) -> list[Any]:
    """Return those of the queues between a training and its persistent writer."""
    return [each for queue in vars(caller).values() for each in persistent_worker._semaphores(queue)]


def test_a_persistent_writer_gets_the_weights_of_its_iteration(tmp_path: Path) -> None:
    """Stock hands over the training's own memory; on a cpu the checkpoint gets what training does later."""
    from megatron.core.dist_checkpointing.strategies.async_utils import AsyncRequest, PersistentAsyncCaller

    weight = torch.zeros(1000, device=here())
    request = AsyncRequest(
        _write_when_told, (0, [weight], tmp_path), [], preload_fn=partial(_staged, [weight])
    )
    caller = PersistentAsyncCaller()
    try:
        caller.schedule_async_call(request)
        weight.add_(1)  # the next iteration
        (tmp_path / "go").touch()
        assert caller.is_current_async_call_done(blocking=True)
        names = [each._semlock.name for each in semaphores(caller)]
        assert len(names) == 19
        assert not [name for name in names if Path(f"/dev/shm/sem.{name[1:]}").exists()]  # none to be left
    finally:
        caller.close()
    assert torch.load(tmp_path / "written")[0].eq(0).all()


def load(saved: Namespace, **now: object) -> Namespace:
    """Load a checkpoint with these arguments of the run; return what became of them."""
    values = {"finetune": False, "no_load_optim": False, "no_load_rng": False, **now}
    args = Namespace(**{**vars(run(1, 1)), **values})
    with_other_experts(lambda *_: ({"args": saved}, "name", False, None), "folder", args, True)
    return args


def run(experts: int, processes: int) -> Namespace:
    return Namespace(
        expert_model_parallel_size=experts,
        world_size=processes,
        tensor_model_parallel_size=1,
        pipeline_model_parallel_size=1,
    )


@pytest.mark.parametrize(("saved", "now", "left"), [((2, 2), (2, 2), False), ((2, 2), (2, 4), True)])
def test_random_states_of_other_ranks_are_left(saved, now, left):
    assert load(run(*saved), **vars(run(*now))).no_load_rng is left


@pytest.mark.parametrize(("saved", "now"), [((1, 1), (2, 2)), ((2, 2), (1, 1))])
def test_the_optimizer_of_spread_experts_is_refused(saved, now):
    with pytest.raises(UsageError, match="load only the weights"):
        load(run(*saved), **vars(run(*now)))
    assert load(run(*saved), **vars(run(*now)), no_load_optim=True).no_load_rng
    assert not load(run(*saved), **vars(run(*now)), finetune=True).no_load_rng
