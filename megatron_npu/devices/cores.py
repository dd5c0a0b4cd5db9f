"""Distribute the CPU cores of a machine over the ranks of a CPU run, and set each rank's number of threads.

Unless OMP_NUM_THREADS is set, torchrun starts several ranks with one thread each, so most cores are idle on a
machine with more cores than ranks. In addition, the kernel moves threads between cores, away from warm caches
and, on machines with several sockets, away from their memory.
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch

from megatron_npu.base import settings
from megatron_npu.devices import gloo
from megatron_npu.process import elastic_agent

_THREADS = "OMP_NUM_THREADS"
_PLACES = ("OMP_PROC_BIND", "OMP_PLACES", "GOMP_CPU_AFFINITY", "KMP_AFFINITY")
_BUSY = 0.5  # of the cores' time: a rank that is bound to a core cannot go where it is quiet
_TASKS = Path("/proc/self/task")
_TOPOLOGY = Path("/sys/devices/system/cpu")


@dataclass(frozen=True)
class Former:
    """The thread count and the CPU affinity that a process had before ``share`` changed them.

    Attributes:
        threads: torch's number of threads. If None, it was not changed.
        cpus: the processors on which the process may run. If None, the process was not bound.
    """

    threads: int | None = None
    cpus: frozenset[int] | None = None


@functools.cache
def share() -> Former:
    """Assign this rank its share of the machine's cores, once per process.

    Rank 0 logs the assignment.

    Nothing is changed with a single rank, with fewer cores than ranks, or with MEGATRON_NPU_SHARE_CORES=0. A
    number of threads or a binding that the user has set (with OpenMP's variables, or by starting the ranks on
    other cores than the launcher's) is kept. If other programs are using the machine, no rank is bound.

    Returns:
        The settings that ``give_back`` restores.
    """
    ranks, rank = int(os.environ.get("LOCAL_WORLD_SIZE", "1")), int(os.environ.get("LOCAL_RANK", "0"))
    cores = available()
    if ranks < 2 or len(cores) < ranks or not settings.SHARE_CORES.enabled():
        return Former()
    own = part(cores, rank, ranks)
    launcher = elastic_agent.find()
    said = _threads_said(launcher, len(own))
    threads_before, cpus = torch.get_num_threads(), frozenset(_processors(cores))
    if not said:
        torch.set_num_threads(len(own))
        gloo.copy_with_one_thread()  # which has been undone by that
    reason = _why_not_bound(cores, launcher)
    if not reason:
        _bind(_processors(own))
    if os.environ.get("RANK", "0") == "0":
        print(_line(ranks, cores, said, reason), flush=True)
    return Former(None if said else threads_before, None if reason else cpus)


def _processors(cores: Sequence[tuple[int, ...]]) -> list[int]:
    return [cpu for core in cores for cpu in core]


def give_back() -> None:
    """Undo ``share``: restore the process's number of threads and its CPU affinity."""
    if not share.cache_info().currsize:
        return
    former = share()
    share.cache_clear()
    if former.threads is not None:
        torch.set_num_threads(former.threads)
    if former.cpus is not None:
        _bind(sorted(former.cpus))


def available() -> list[tuple[int, ...]]:
    """Return the cores that this process is allowed to use, ordered by socket.

    Each core is a tuple of its hardware threads.
    """
    if not hasattr(os, "sched_getaffinity"):  # macOS
        return [(cpu,) for cpu in range(os.cpu_count() or 1)]
    cores: dict[tuple[int, ...], list[int]] = {}
    for cpu in sorted(os.sched_getaffinity(0)):
        cores.setdefault(_place(cpu), []).append(cpu)
    return [tuple(cores[place]) for place in sorted(cores)]


def _place(cpu: int) -> tuple[int, ...]:
    """Return the socket of a hardware thread, and the first hardware thread of the same core.

    If the topology is unknown, each hardware thread counts as a core. ``core_id`` is not used, because cores
    on several dies or clusters may have the same ``core_id``.
    """
    folder = _TOPOLOGY / f"cpu{cpu}" / "topology"
    try:
        socket = int((folder / "physical_package_id").read_text())
        return socket, int(re.split("[,-]", (folder / "thread_siblings_list").read_text())[0])
    except (OSError, ValueError):
        return (0, cpu)


def part(cores: Sequence[tuple[int, ...]], rank: int, ranks: int) -> Sequence[tuple[int, ...]]:
    """Return the cores that are assigned to one rank.

    A rank's cores are adjacent, and all ranks get the same number of cores.
    """
    each = len(cores) // ranks
    return cores[rank * each : (rank + 1) * each]


def threads(ranks: int) -> int:
    """Return the number of threads, at least one, for each of the ``ranks`` ranks on this machine."""
    return max(1, len(available()) // ranks)


def _threads_said(launcher: psutil.Process | None, own: int) -> str:
    """Return the number of threads that the user has set, or an empty string.

    torchrun sets the variable to 1 for its ranks, and ``train`` sets it to the number of cores per rank
    (``own``). For these values, the launcher's own environment shows whether the user has set the variable.
    """
    given = os.environ.get(_THREADS, "")
    if launcher is not None and given in ("1", str(own)):
        with contextlib.suppress(psutil.Error, OSError):
            return launcher.environ().get(_THREADS, "")
    return given


def _why_not_bound(cores: Sequence[tuple[int, ...]], launcher: psutil.Process | None) -> str:
    """Return the reason why this rank is not bound to its cores, or an empty string if it is bound."""
    if not _TASKS.is_dir():
        return "threads can be bound to cores only on Linux"
    named = [name for name in _PLACES if name in os.environ]
    if named:
        return f"{named[0]} already sets the binding"
    with contextlib.suppress(psutil.Error, OSError):
        if launcher is not None and set(launcher.cpu_affinity()) != os.sched_getaffinity(0):
            return "the launcher has already bound the threads"
    load = os.getloadavg()[0]
    if load > _BUSY * len(cores):
        return f"other programs use the machine (load {load:.1f})"
    return ""


def _bind(cpus: list[int]) -> None:
    """Restrict all current and future threads of this process to the given processors."""
    for task in _TASKS.iterdir():
        with contextlib.suppress(ProcessLookupError):  # it has ended in the meantime
            os.sched_setaffinity(int(task.name), cpus)


def _line(ranks: int, cores: Sequence[object], said: str, reason: str) -> str:
    each = said or str(len(cores) // ranks)
    why = f"{_THREADS}={said}" if said else f"{_THREADS} is not set (the 1 set by torchrun is ignored)"
    where = f"not bound to cores: {reason}" if reason else "each rank bound to its own cores"
    plural = "" if each == "1" else "s"
    return f"megatron_npu: {ranks} ranks on {len(cores)} cores: {each} thread{plural} each ({why}), {where}"
