"""The store of a run on one machine, in which nothing is unpickled, and what is said of a rank that fails."""

from __future__ import annotations

import base64
import inspect
import os
import pickle
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch.distributed as dist
from torch import nn
from torch.distributed.elastic.rendezvous import RendezvousParameters, registry
from torch.distributed.launcher import api

from megatron_npu.base.errors import UsageError
from megatron_npu.finetune.model import sharding
from megatron_npu.finetune.run import launch
from tests.support.payload import Runs


def test_a_pickle_in_the_store_is_not_executed(monkeypatch, tmp_path) -> None:
    """The agent's rendezvous, with the command's settings; a pickle is where torch's ``c10d`` expects one."""
    mark, sizes = tmp_path / "executed", []
    for name in ("MASTER_ADDR", "MASTER_PORT", "NODE_RANK", "NNODES"):
        monkeypatch.delenv(name, raising=False)
    for name in ("OMP_NUM_THREADS", "PYTHONPATH"):  # set by the command
        monkeypatch.setenv(name, os.environ.get(name, "1"))
    monkeypatch.setattr(launch, "_silence_agent", lambda: None)

    def agent(config: api.LaunchConfig, program: str):
        handler = registry.get_rendezvous_handler(
            RendezvousParameters(
                config.rdzv_backend, config.rdzv_endpoint, config.run_id, 1, 1, **config.rdzv_configs
            )
        )
        if config.rdzv_backend == "c10d":
            store = handler._state_holder._backend._store
        else:
            host, _, port = config.rdzv_endpoint.rpartition(":")
            store = dist.TCPStore(host, int(port), None, False, timedelta(seconds=5), wait_for_workers=False)
        store.set(f"torch.rendezvous.{config.run_id}", base64.b64encode(pickle.dumps(Runs(mark))))
        sizes.append(handler.next_rendezvous().world_size)
        return lambda *arguments: None

    monkeypatch.setattr(api, "elastic_launch", agent)
    try:
        assert launch.start([], 2) == 0
    finally:
        assert not mark.exists()
    assert sizes == [1]


def test_a_log_level_with_which_torch_crashes_is_refused(monkeypatch) -> None:
    """Found by the campaign: torch 2.13 ends with SIGSEGV where DDP is built, also without this package."""
    if "forward_sync_buffers" not in inspect.signature(nn.parallel.DistributedDataParallel).parameters:
        pytest.skip("the case: an older torch, of which this is not known")
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_backend", lambda: "gloo")
    monkeypatch.setattr(dist, "get_debug_level", lambda: dist.DebugLevel.DETAIL)
    with pytest.raises(UsageError, match=r"DETAIL and gloo, .* crashes\. Set it to INFO, or unset it\."):
        sharding.data_parallel(nn.Linear(2, 2))


@pytest.mark.parametrize(
    ("code", "ended", "told"),
    [
        (3, 3, ""),
        (-15, 143, "rank 1 was ended by SIGTERM"),
        (-9, 137, "rank 1 was killed; the machine may have run out of memory"),
        (-11, 139, "rank 1 was ended by SIGSEGV; its stack trace is printed above"),
    ],
)
def test_a_rank_that_a_signal_ended_is_named(code, ended, told, capsys) -> None:
    """Found by the campaign: after a crash, ``train`` ended without a word."""
    first = SimpleNamespace(timestamp=1, exitcode=code, local_rank=1)
    failures = {0: SimpleNamespace(timestamp=2, exitcode=-15, local_rank=0), 1: first}
    assert launch._exit_code(SimpleNamespace(failures=failures)) == ended
    said = capsys.readouterr().err
    assert said.startswith(f"megatron-npu train: {told}") if told else said == ""
