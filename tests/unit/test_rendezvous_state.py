"""The state of torch's dynamic rendezvous lies in a store that every account can write: only it is built."""

from __future__ import annotations

import base64
import pickle
import sys
import threading
from datetime import datetime, timedelta, timezone
from pathlib import Path

import pytest
import torch.distributed as dist
from torch.distributed.elastic.rendezvous import dynamic_rendezvous
from torch.distributed.elastic.rendezvous.api import RendezvousStateError

from megatron_npu.safe_files import rendezvous_state
from tests.support import ports, processes, tiny
from tests.support.payload import Runs


class _Builds:
    """Sets the state of something that this value has not created."""

    def __reduce__(self):
        return datetime, (1, 1, 1), {"x": 1}


def test_a_state_of_torch_comes_back() -> None:
    state = dynamic_rendezvous._RendezvousState()
    node = dynamic_rendezvous._NodeDesc("machine", 7, 0)
    state.participants[node] = 0
    state.wait_list.add(node)
    state.last_heartbeats[node] = datetime.now(timezone.utc)
    state.deadline = datetime.now(timezone.utc) + timedelta(seconds=3)
    for protocol in range(4, pickle.HIGHEST_PROTOCOL + 1):  # the defaults of Python's versions
        assert vars(rendezvous_state.loads(pickle.dumps(state, protocol))) == vars(state)


@pytest.mark.parametrize("name", ["a payload", "another type", "no pickle", "another's state", "a function"])
def test_anything_else_is_refused(name: str, tmp_path: Path) -> None:
    values = {
        "a payload": pickle.dumps(Runs(tmp_path / "mark")),
        "another type": pickle.dumps({"round": 1}),
        "no pickle": b"\x80\x05garbage",
        "another's state": pickle.dumps(_Builds()),
        "a function": f"c{rendezvous_state.MODULE}\nget_method_name\n(tR.".encode(),
    }
    with pytest.raises(RendezvousStateError, match="another program has written it"):
        rendezvous_state.loads(values[name])
    assert not (tmp_path / "mark").exists()


def test_torchrun_executes_nothing_that_lies_in_its_store(tmp_path: Path) -> None:
    """A store that another account has opened at the port that the user gives to torchrun."""
    port, mark = ports.free_port(), tmp_path / "mark"
    store = dist.TCPStore("127.0.0.1", port, None, True, timedelta(seconds=60), wait_for_workers=False)
    store.set("torch.rendezvous.job", base64.b64encode(pickle.dumps(Runs(mark))))
    words = f"--rdzv-backend c10d --rdzv-endpoint 127.0.0.1:{port} --rdzv-id job --nproc-per-node 1"
    argv = [sys.executable, "-m", "torch.distributed.run", *words.split(), "-m", "megatron_npu", "--version"]
    env = {name: value for name, value in tiny.environment().items() if name != "MEGATRON_NPU_AUTOLOAD"}
    done = processes.run(argv, env=env, cwd=tmp_path, capture_output=True, text=True)
    assert not mark.exists()
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    told = [line for line in done.stderr.splitlines() if line.startswith("megatron_npu: error: ")]
    assert len(told) == 1
    assert " refers to posix.mkdir" in told[0]


def test_two_agents_meet_through_the_guarded_reader(tmp_path: Path) -> None:
    port = ports.free_port()
    words = f"--nnodes 2 --rdzv-backend c10d --rdzv-endpoint 127.0.0.1:{port} --rdzv-id job"
    program = tmp_path / "rank.py"
    program.write_text("import os\nprint('rank', os.environ['RANK'], flush=True)\n")
    argv = [sys.executable, "-m", "torch.distributed.run", *words.split(), str(program)]
    told: list[str] = []

    def start() -> None:
        done = processes.run(argv, env=tiny.environment(), cwd=tmp_path, capture_output=True, text=True)
        told.append(done.stdout if done.returncode == 0 else done.stderr)

    agents = [threading.Thread(target=start) for _ in range(2)]
    for agent in agents:
        agent.start()
    for agent in agents:
        agent.join()
    assert sorted(line for text in told for line in text.splitlines()) == ["rank 0", "rank 1"]
