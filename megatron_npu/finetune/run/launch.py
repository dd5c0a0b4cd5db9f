"""Start the ranks of this machine with torch's elastic agent.

``MASTER_ADDR``, ``MASTER_PORT``, ``NNODES`` and ``NODE_RANK`` set the rendezvous of several machines. Each
rank runs the same command in a separate process.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
from argparse import Namespace
from collections.abc import Sequence
from typing import Any

from megatron_npu import devices
from megatron_npu.base.errors import UsageError
from megatron_npu.devices import cores
from megatron_npu.finetune.run.ranks import from_environment
from megatron_npu.pretrain.run import host_memory
from megatron_npu.process import python_child

_SECONDS = 900  # for the other machines to come
_BYTES_OF_A_RANK = 200 * 10**6  # what Python, torch and Transformers take before there is a model


def local_processes(args: Namespace) -> int:
    """Return the number of ranks for this machine: the requested number, or one rank per device.

    Raises:
        UsageError: more ranks are requested than there are devices, or than fit into memory on a CPU.
    """
    device = devices.current()
    asked: int | None = args.nproc_per_node
    if asked is None:
        return device.count()
    if device.name == "cpu":
        host_memory.require(asked * _BYTES_OF_A_RANK, f"--nproc-per-node {asked}")
    elif asked > device.count():
        raise UsageError(
            f"--nproc-per-node {asked} with {device.count()} devices ({device.title})",
            "one device per process",
            "Request fewer processes, or make more devices visible.",
        )
    return asked


def machines() -> int:
    """Return the number of machines.

    Raises:
        UsageError: there are several machines but no address of the first one, or NODE_RANK is out of range.
    """
    count = from_environment("NNODES", 1, least=1)
    from_environment("NODE_RANK", 0, most=count - 1)
    if count > 1 and not (os.environ.get("MASTER_ADDR") and os.environ.get("MASTER_PORT")):
        raise UsageError(
            f"NNODES={count} without MASTER_ADDR and MASTER_PORT",
            "all three, and NODE_RANK on each machine",
            "Export the address and port of the first machine.",
        )
    return count


def start(argv: Sequence[str], processes: int) -> int:
    """Run ``megatron-npu train`` on all ranks of this machine, and return the exit code.

    Each rank reports its own errors.

    Args:
        argv: the command line after ``train``.
        processes: number of ranks on this machine.

    Raises:
        UsageError: the ranks cannot connect at MASTER_ADDR and MASTER_PORT.
    """
    from torch.distributed import DistNetworkError
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    _silence_agent()
    os.environ.setdefault("OMP_NUM_THREADS", str(cores.threads(processes)))
    program = os.environ.get("PYTHON_EXEC", sys.executable)  # as torchrun
    os.environ["PYTHONPATH"] = python_child.search_path()
    config = LaunchConfig(
        min_nodes=machines(),
        max_nodes=machines(),
        nproc_per_node=processes,
        run_id="megatron_npu_train",
        max_restarts=0,
        logs_specs=_no_logs(),
        **_meeting(),
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
            f"MASTER_ADDR:MASTER_PORT {place}: {reason}",
            "an address of the first machine and a free port on it",
            "Export another MASTER_PORT.",
        ) from None
    return 0


def _silence_agent() -> None:
    """Silence the elastic agent's page of output for each failed rank; the rank has already logged one line.

    Also silence the C++ warning of the ranks about a model whose parameters have all been used, which is the
    normal case; TORCH_CPP_LOG_LEVEL=WARNING shows it.
    """
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    for name in list(logging.root.manager.loggerDict):
        if name.startswith("torch.distributed.elastic"):  # each has a level of its own
            logging.getLogger(name).setLevel(logging.CRITICAL)


def _no_logs() -> Any:
    """Return log settings with which ranks print to this process's output, without a log folder.

    By default the agent creates a folder for each run and leaves it behind, empty.
    """
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, LogsDest

    class NoLogs(DefaultLogsSpecs):
        """Log settings that do not use files."""

        def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
            """Disable the threads that would poll /dev/null for lines ten times a second."""
            found = super().reify(envs)
            found.tee_stdouts.clear()
            found.tee_stderrs.clear()
            return found

    return NoLogs(os.devnull)


def _meeting() -> dict[str, Any]:
    """Return the rendezvous settings from the environment, or for a free port on this machine."""
    address, port = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT")
    if not port:
        return {"rdzv_backend": "c10d", "rdzv_endpoint": "localhost:0", "local_addr": "localhost"}
    from_environment("MASTER_PORT", 0, most=65535)
    return {
        "rdzv_backend": "static",
        "rdzv_endpoint": f"{address or 'localhost'}:{port}",
        "rdzv_configs": {"rank": from_environment("NODE_RANK", 0), "timeout": _SECONDS},
    }


def _exit_code(failed: object) -> int:
    """Return the exit code of the first rank that failed; for a signal 128 + its number, as in a shell."""
    first = min(failed.failures.values(), key=lambda failure: failure.timestamp)  # type: ignore[attr-defined]
    code = first.exitcode
    if code == -signal.SIGKILL:
        print(
            f"megatron-npu train: rank {first.local_rank} was killed; the machine may have run out of memory",
            file=sys.stderr,
        )
    return code if code >= 0 else 128 - code
