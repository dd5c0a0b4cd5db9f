"""Count what a computation costs in kernel launches, memory and communication.

The counts are available from a context manager and as a report.
"""

from __future__ import annotations

import atexit
import ctypes
import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from megatron_npu.base import files, settings
from megatron_npu.sim import build

# Counted beside the launches by compute.cpp: copies between host and device, and tensor.item().
_TRANSFERS = ("transfer", "aten::_local_scalar_dense")


@dataclass
class Work:
    """A number of calls and a number of bytes."""

    calls: int = 0
    bytes: int = 0


@dataclass
class Group:
    """The communicator of a process group.

    Attributes:
        ranks: the number of ranks.
        buffer: the bytes of device memory that HCCL uses for it (two of its buffers); 0 once it is destroyed.
        calls: collectives, sends, receives and batches of them.
        bytes: the bytes that this rank passed to them.
        largest: the most bytes that one call has read or written since the process started.
        within: messages that this rank sent to ranks on its machine, and their bytes.
        between: messages that this rank sent to other machines, and their bytes.
    """

    ranks: int = 0
    buffer: int = 0
    calls: int = 0
    bytes: int = 0
    largest: int = 0
    within: Work = field(default_factory=Work)
    between: Work = field(default_factory=Work)


@dataclass
class Counts:
    """The counters of this process, over all its simulated devices.

    A launch is one call of an operation at the dispatcher's lowest level, which hardware executes as one
    aclnn kernel, sometimes as a few. Only ratios of launches are meaningful.

    Attributes:
        launches: maps an operation, such as ``aten::mm``, to its calls and the bytes of newly allocated
            results.
        transfers: copies between host and device.
        swapped: reads and writes of tensors in host memory by operations
            (``torch_npu.empty_with_swapped_memory``), counted as one call for each such tensor.
        registered: the bytes of host memory that the devices use at the end; torch's allocator does not count
            them.
        communication: maps a collective, such as ``AllReduce``, to its calls and the bytes that this rank
            sent.
        groups: maps a process group, by its description such as ``TENSOR_MODEL_PARALLEL_GROUP``, to the cost
            of its communicator, if it has one; ``pair`` stands for those that torch_npu creates for two
            ranks, for sends and receives outside a batch.
        allocated: the bytes that torch's allocator handed out, including freed ones.
        peak: the largest number of bytes in use at once, minus those in use at the start.
        without_body: CANN functions that were called but that the simulator does not implement.
    """

    launches: dict[str, Work] = field(default_factory=dict)
    transfers: Work = field(default_factory=Work)
    swapped: Work = field(default_factory=Work)
    registered: int = 0
    communication: dict[str, Work] = field(default_factory=dict)
    groups: dict[str, Group] = field(default_factory=dict)
    allocated: int = 0
    peak: int = 0
    without_body: dict[str, int] = field(default_factory=dict)

    @property
    def total_launches(self) -> int:
        """The number of kernel launches of all operations together."""
        return sum(work.calls for work in self.launches.values())

    @property
    def total_communication(self) -> Work:
        """The communication of all collectives together."""
        works = self.communication.values()
        return Work(sum(work.calls for work in works), sum(work.bytes for work in works))

    @property
    def between(self) -> Work:
        """The number and the bytes of messages to other machines, over all communicators."""
        works = [group.between for group in self.groups.values()]
        return Work(sum(work.calls for work in works), sum(work.bytes for work in works))

    @property
    def buffers(self) -> int:
        """The bytes of device memory that HCCL uses for all communicators, which are not included in
        torch's statistics.
        """
        return sum(group.buffer for group in self.groups.values())


@contextmanager
def counting() -> Iterator[Counts]:
    """Count launches, memory and communication inside the ``with`` block.

    The counts are complete when the block ends.

    The peak is measured with torch's own statistics, which are reset at the start: if ``counting()`` is
    nested, the outer one measures only the peak since the inner one started.
    """
    import torch  # not above: importing torch installs the simulator, which imports this module

    counts = Counts()
    torch.npu.synchronize()
    before, used = _read(), _statistic("allocated_bytes.all.current")
    allocated = _statistic("allocated_bytes.all.allocated")
    for device in range(torch.npu.device_count()):
        torch.npu.reset_peak_memory_stats(device)
    try:
        yield counts
    finally:
        torch.npu.synchronize()
        after = _read()
        counts.launches = _difference(after.launches, before.launches)
        for name in ("transfers", "swapped"):
            work = _difference({"": getattr(after, name)}, {"": getattr(before, name)}).get("", Work())
            setattr(counts, name, work)
        counts.registered = after.registered
        counts.communication = _difference(after.communication, before.communication)
        counts.groups = {
            name: _since(group, before.groups.get(name, Group())) for name, group in after.groups.items()
        }
        counts.without_body = {
            name: calls - before.without_body.get(name, 0)
            for name, calls in after.without_body.items()
            if calls > before.without_body.get(name, 0)
        }
        counts.allocated = _statistic("allocated_bytes.all.allocated") - allocated
        counts.peak = _statistic("allocated_bytes.all.peak") - used


def write_report_at_exit() -> None:
    """Write the counters when this process ends, if the settings request a report."""
    path = settings.SIM_REPORT.get()
    if path:
        atexit.register(_write_report, Path(path).absolute())


def _write_report(path: Path) -> None:
    """Write the counters since the start of the process, unless the process has used no NPU."""
    counts = _read()
    if not counts.launches and not counts.communication:
        return
    counts.allocated = _statistic("allocated_bytes.all.allocated")
    counts.peak = _statistic("allocated_bytes.all.peak")
    rank = os.environ.get("RANK")
    if rank is not None:
        path = path.with_name(f"{path.stem}.rank{rank}{path.suffix}")
    content = {"total_launches": counts.total_launches, **asdict(counts)}
    files.write(path, json.dumps(content, indent=1))


def _read() -> Counts:
    """Return the counters since the start of the process, with all memory statistics set to zero."""
    runtime = build.runtime_library()
    compute = build.compute_library()
    launches = _works(compute.sim_launches)
    transfers = [launches.pop(name, Work()) for name in _TRANSFERS]
    swapped = launches.pop("swapped", Work())
    runtime.sim_registered.restype = ctypes.c_size_t
    return Counts(
        swapped=swapped,
        registered=runtime.sim_registered(),
        transfers=Work(sum(work.calls for work in transfers), sum(work.bytes for work in transfers)),
        launches=launches,
        communication=_works(runtime.sim_communication),
        groups=_groups(runtime.sim_communicators),
        without_body={name: int(calls) for name, calls in _rows(runtime.sim_defaults_called)},
    )


def _rows(function: Callable) -> list[list[str]]:
    """Return the lines that a C++ function writes to a buffer, each split into words."""
    function.restype = ctypes.c_size_t
    function.argtypes = [ctypes.c_char_p, ctypes.c_size_t]
    capacity = function(None, 0) + 4096  # another thread may add lines in the meantime
    buffer = ctypes.create_string_buffer(capacity)
    function(buffer, capacity)
    return [line.split() for line in buffer.value.decode().splitlines()]


def _works(function: Callable) -> dict[str, Work]:
    # of a dry run, names have blanks: "dry computed aten::sort"
    return {" ".join(name): Work(int(calls), int(size)) for *name, calls, size in _rows(function)}


def _groups(function: Callable) -> dict[str, Group]:
    descriptions = _descriptions()
    found: dict[str, Group] = {}
    for communicator, ranks, mebibytes, *rest in _rows(function):
        name, number = descriptions.get(communicator, "pair"), 1
        while (label := name if number == 1 else f"{name} {number}") in found:  # groups of equal names
            number += 1
        calls, size, largest, *sent = map(int, rest)
        works = Work(*sent[:2]), Work(*sent[2:])
        found[label] = Group(int(ranks), 2 * int(mebibytes) << 20, calls, size, largest, *works)
    return found


def _descriptions() -> dict[str, str]:
    """Return the description of each process group, keyed by the name of its communicator in torch_npu."""
    from torch import distributed

    if not distributed.is_initialized():
        return {}
    groups = distributed.distributed_c10d._world.pg_map
    return {f"group_name_{group.group_name}": group.group_desc for group in groups}


def _since(after: Group, before: Group) -> Group:
    return replace(
        after,
        calls=after.calls - before.calls,
        bytes=after.bytes - before.bytes,
        within=_less(after.within, before.within),
        between=_less(after.between, before.between),
    )


def _less(after: Work, before: Work) -> Work:
    return Work(after.calls - before.calls, after.bytes - before.bytes)


def _difference(after: dict[str, Work], before: dict[str, Work]) -> dict[str, Work]:
    found = {}
    for name, work in after.items():
        old = before.get(name, Work())
        if work.calls > old.calls:
            found[name] = _less(work, old)
    return found


def _statistic(name: str) -> int:
    """Return a memory statistic of torch as a sum over the devices.

    The statistic is 0 if no device has been used.
    """
    import torch

    if not torch.npu.is_initialized():
        return 0
    return sum(torch.npu.memory_stats(i).get(name, 0) for i in range(torch.npu.device_count()))
