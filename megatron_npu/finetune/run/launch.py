"""Start the ranks of this machine with torch's elastic agent.

``MASTER_ADDR``, ``MASTER_PORT``, ``NNODES`` and ``NODE_RANK`` configure the rendezvous of several machines.
Each rank runs the same command in a separate process.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import sys
from collections.abc import Sequence
from typing import Any

from megatron_npu import devices
from megatron_npu.base.errors import UsageError
from megatron_npu.devices import cores
from megatron_npu.finetune.run.ranks import from_environment
from megatron_npu.pretrain.run import host_memory
from megatron_npu.process import meeting_place, python_child
from megatron_npu.watchdog import first_contact

_SECONDS = 900  # for the agents of the other machines, which have met before
_CRASHES = [-each for each in (signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGABRT)]
_BYTES_OF_A_RANK = 200 * 10**6  # what Python, torch and Transformers take before there is a model


def local_processes(asked: int | None) -> int:
    """Return the number of ranks to start on this machine: the requested number, or one per device.

    Raises:
        UsageError: more ranks are requested than there are devices, or more than fit into memory on a CPU.
    """
    device = devices.current()
    if asked is None:
        return device.count()
    if device.name == "cpu":
        host_memory.require(asked * _BYTES_OF_A_RANK, f"--nproc-per-node {asked}")
    elif asked > device.count():
        raise UsageError(
            f"--nproc-per-node must be at most the number of devices, {device.count()} ({device.title}), "
            f"but got {asked}. Request fewer processes, or make more devices visible."
        )
    return asked


def machines() -> int:
    """Return the number of machines in the run.

    Raises:
        UsageError: there are several machines but no address of the first one, or NODE_RANK is out of range.
    """
    count = from_environment("NNODES", 1, least=1)
    from_environment("NODE_RANK", 0, most=count - 1)
    if count > 1 and not (os.environ.get("MASTER_ADDR") and os.environ.get("MASTER_PORT")):
        raise UsageError(
            f"NNODES={count} requires MASTER_ADDR and MASTER_PORT, as well as NODE_RANK on each machine. "
            "Export the address and port of the first machine."
        )
    return count


def start(argv: Sequence[str], processes: int) -> int:
    """Run ``megatron-npu train`` on all ranks of this machine, and return the exit code.

    Each rank reports its own errors.

    Args:
        argv: the command line after ``train``.
        processes: number of ranks on this machine.

    Raises:
        UsageError: the machines do not meet at MASTER_ADDR and MASTER_PORT.
    """
    from torch.distributed import DistNetworkError
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    _silence_agent()
    os.environ.setdefault("OMP_NUM_THREADS", str(cores.threads(processes)))
    program = os.environ.get("PYTHON_EXEC", sys.executable)  # as torchrun
    store = _meet() if machines() > 1 else _alone()  # kept until the agent has joined its server
    os.environ["PYTHONPATH"] = python_child.search_path()
    config = LaunchConfig(
        min_nodes=machines(),
        max_nodes=machines(),
        nproc_per_node=processes,
        run_id="megatron_npu_train",
        max_restarts=0,
        logs_specs=_no_logs(),
        **_meeting(store),
    )
    try:
        elastic_launch(config, program)(*python_child.module_flags("megatron_npu"), "train", *argv)
    except ChildFailedError as failed:
        return _exit_code(failed)
    except SignalException as stopped:
        return 128 + int(stopped.sigval)
    except DistNetworkError as error:
        place = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
        reason = str(error).partition("\n")[0]
        raise UsageError(
            f"the ranks cannot connect at MASTER_ADDR:MASTER_PORT {place}, which must be an address of the "
            f"first machine and a free port on it: {reason}. Export another MASTER_PORT."
        ) from None
    finally:
        del store
    return 0


def _meet() -> Any:
    """Wait until all machines have connected to the store on the first machine, and return the store.

    Without this wait, the agent would wait for up to ``_SECONDS`` without logging anything.

    Raises:
        UsageError: the address is wrong, or a machine does not connect.
    """
    from torch.distributed import PrefixStore

    host, port = os.environ["MASTER_ADDR"], from_environment("MASTER_PORT", 0, most=65535)
    count, number = machines(), from_environment("NODE_RANK", 0)
    serves = number == 0
    who = f"machine {number} ({socket.gethostname()})"
    place = meeting_place.Place(who, host, port, serves, not serves)
    served = first_contact.serve(port) if serves else None
    store = meeting_place.connected(place, lambda: first_contact.client_of(host, port))
    here = PrefixStore("megatron_npu/machines", store)
    here.set(str(number), "")

    def missing() -> str:
        lacking = [str(each) for each in range(count) if not here.check([str(each)])]
        return f"machine{'s' * (len(lacking) > 1)} {', '.join(lacking)}" if lacking else ""

    if serves:
        meeting_place.joined(place, missing)
    return served or store


def _silence_agent() -> None:
    """Silence the messages of the elastic agent about each failed rank.

    The rank itself has already logged one line. The C++ warning that the ranks print about a model whose
    parameters have all been used is silenced too, because this is the normal case; set
    TORCH_CPP_LOG_LEVEL=WARNING to show it.
    """
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    for name in list(logging.root.manager.loggerDict):
        if name.startswith("torch.distributed.elastic"):  # each has a level of its own
            logging.getLogger(name).setLevel(logging.CRITICAL)


def _no_logs() -> Any:
    """Return log settings that make the ranks print to this process's output, without a log folder.

    By default, the agent creates a folder for each run and leaves the empty folder behind.
    """
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, LogsDest

    class NoLogs(DefaultLogsSpecs):
        """Log settings that write no files."""

        def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
            """Return the log destinations without the threads that would poll /dev/null ten times a
            second.
            """
            found = super().reify(envs)
            found.tee_stdouts.clear()
            found.tee_stderrs.clear()
            return found

    return NoLogs(os.devnull)


def _alone() -> Any:
    """Serve a run's store at a free port of this machine.

    Return None if MASTER_PORT is set.
    """
    return None if os.environ.get("MASTER_PORT") else first_contact.serve(0)


def _meeting(store: Any) -> dict[str, Any]:
    """Return the rendezvous settings, either from the environment or for the free port of the store.

    torch's rendezvous ``c10d`` unpickles what it finds in the store, which every user of the machine can
    write to; ``static`` reads nothing.
    """
    address, port = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT")
    if not port:
        address, port = "localhost", str(store.port)
    from_environment("MASTER_PORT", 0, most=65535)
    return {
        "rdzv_backend": "static",
        "rdzv_endpoint": f"{address or 'localhost'}:{port}",
        "rdzv_configs": {"rank": from_environment("NODE_RANK", 0), "timeout": _SECONDS},
    }


def _exit_code(failed: object) -> int:
    """Return the exit code of the rank that failed first.

    For a signal, it is 128 plus the signal's number.
    """
    first = min(failed.failures.values(), key=lambda failure: failure.timestamp)  # type: ignore[attr-defined]
    code = first.exitcode
    if code >= 0:
        return code
    what = f"rank {first.local_rank} was ended by {signal.Signals(-code).name}"
    if code == -signal.SIGKILL:
        what = f"rank {first.local_rank} was killed; the machine may have run out of memory"
    elif code in _CRASHES:
        what += (
            "; its stack trace is printed above. Variables such as TORCH_DISTRIBUTED_DEBUG may be the cause."
        )
    print(f"megatron-npu train: {what}", file=sys.stderr)
    return 128 - code
