"""Implement ``megatron-npu doctor --cluster``, which checks all machines of a job with the job's launcher.

The ranks connect as in a run (an address of 127.0.1.1 or a firewall results in a one-line error) and exchange
their findings, which rank 0 prints. With ``--out``, rank 0 writes lists of the machines that passed and
failed.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import re
import socket
import time
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron_npu import __version__, devices, watchdog
from megatron_npu.base import digits, files
from megatron_npu.base.errors import UsageError
from megatron_npu.checkpoint_files import shared_folder
from megatron_npu.doctor import collectives
from megatron_npu.watchdog import network

_TIMEOUT = timedelta(seconds=120)
_SKEW = 1.0  # seconds between clocks that are too many: logs and make-like caches compare times
_BYTES = 1 << 24  # of a message by which bandwidth is measured
_TIMES = 10
_PAIRS = 16  # machines up to which every pair is measured; of more, neighbours
_BASE_PORT, _PORTS = 60000, 16  # HCCL's default, and how many it takes from there on
_RANGES = ("HCCL_HOST_SOCKET_PORT_RANGE", "HCCL_NPU_SOCKET_PORT_RANGE")
_ALIKE = ("megatron_npu", "torch", "torch_npu", "python")

Facts = dict[str, Any]


def main(folder: str | None, out: str | None) -> int:
    """Run one rank of the inspection, and return the exit code.

    The code is 1 if a machine failed.

    Args:
        folder: a folder that all machines should share. If None, this is not checked.
        out: the folder to which rank 0 writes ``passed.txt``, ``failed.txt`` and ``cluster.json``. If None,
            these files are not written.

    Raises:
        UsageError: no launcher started several processes, or the processes cannot reach each other.
    """
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    if ranks == 1:
        raise UsageError(
            "--cluster requires one process per device on every machine, but it was started in only one "
            "process",
            remedy="Start it like the job: torchrun … -m megatron_npu doctor --cluster, or srun.",
        )
    device = devices.current()
    device.set_current(int(os.environ.get("LOCAL_RANK", "0")))
    watchdog.require_open_files(ranks)
    with watchdog.meeting():
        dist.init_process_group(device.backend, timeout=_TIMEOUT)
    try:
        return _inspect(folder, out)
    finally:
        dist.destroy_process_group()


def _inspect(folder: str | None, out: str | None) -> int:
    every = _gathered(_own())
    faults = _gathered(_wrong_here(every) + _wrong_on_device())
    if folder is not None:
        faults = [a + b for a, b in zip(faults, _gathered(_not_shared(folder)), strict=True)]
    pairs = _pairs(every)
    if dist.get_rank() == 0:
        report = _report(every, faults, pairs)
        print(_text(report), flush=True)
        if out is not None:
            _write(Path(out), report)
    return int(any(faults))


def _gathered(own: Any) -> list[Any]:
    parts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(parts, own)
    return parts


# -- what each rank finds


def _own() -> Facts:
    dist.barrier()
    clock = time.time()
    device = devices.current()
    return {
        "host": socket.gethostname(),
        "clock": clock,
        "versions": {
            "megatron_npu": __version__,
            "torch": torch.__version__,
            "torch_npu": _version("torch_npu"),
            "python": platform.python_version(),
        },
        "address": network.own_address(),
        "interfaces": network.interfaces(),
        "device": device.title,
        "first": os.environ.get("LOCAL_RANK", "0") == "0",
    }


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _wrong_here(every: Sequence[Facts]) -> list[str]:
    """Return how this machine differs from rank 0's machine, and any problems with the ports of this
    machine.
    """
    own, first = every[dist.get_rank()], every[0]
    if not own["first"]:
        return []
    faults = [
        f"{name} {own['versions'][name]}, but {first['versions'][name]} on {first['host']}"
        for name in _ALIKE
        if own["versions"][name] != first["versions"][name]
    ]
    if abs(skew := own["clock"] - first["clock"]) > _SKEW:
        faults.append(f"its clock differs from that of {first['host']} by {skew:+.1f} s")
    return faults + wrong_ports(own["address"], devices.current().name == "npu")


def wrong_ports(address: str, uses_hccl: bool) -> list[str]:
    """Return problems with the ports of this machine that HCCL uses.

    Port ranges in variables are always checked.

    Args:
        address: the machine's address, to which test sockets are bound.
        uses_hccl: whether the ports must be free.
    """
    faults = []
    for name in _RANGES:
        text = os.environ.get(name, "")
        if text and text != "auto" and not all(map(_is_range, text.split(","))):
            faults.append(
                f"{name} must be auto, or port ranges such as 61000-61050,62000-62010, but is {text}"
            )
    base = os.environ.get("HCCL_IF_BASE_PORT", str(_BASE_PORT))
    first = digits.number(base)
    if first is None or not 1024 <= first <= 65536 - _PORTS:
        return [*faults, f"HCCL_IF_BASE_PORT must be a port from 1024 to {65536 - _PORTS}, but is {base}"]
    taken = [port for port in range(first, first + _PORTS) if uses_hccl and not _is_free(address, port)]
    if taken:
        faults.append(
            f"HCCL's ports {', '.join(map(str, taken))} are already in use (HCCL_IF_BASE_PORT is {base})"
        )
    return faults


def _is_range(text: str) -> bool:
    found = re.fullmatch(r"\s*(\d+)(?:-(\d+))?\s*", text)
    return found is not None and 1 <= int(found[1]) <= int(found[2] or found[1]) <= 65535


def _is_free(address: str, port: int) -> bool:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as trial:
        try:
            trial.bind((address, port))
        except OSError:
            return False
    return True


def _wrong_on_device() -> list[str]:
    """Compare a matmul with the host's result, compute a sum over all ranks, and return any problems."""
    device, rank, ranks = devices.current(), dist.get_rank(), dist.get_world_size()
    matrix = torch.arange(64.0).reshape(8, 8)
    faults = []
    try:
        if not torch.equal(
            (matrix.to(device.torch_device()) @ matrix.to(device.torch_device())).cpu(), matrix @ matrix
        ):
            faults.append("a matmul gave a wrong result")
    except RuntimeError as error:
        faults.append(f"a matmul failed: {str(error).partition(chr(10))[0]}")
    try:
        collectives.all_reduce(
            torch.full((collectives.SIZE,), rank + 1.0, device=device.torch_device()), rank, ranks
        )
    except AssertionError as error:
        faults.append(str(error))
    return [f"device {os.environ.get('LOCAL_RANK', '0')} ({device.title}): {fault}" for fault in faults]


def _not_shared(folder: str) -> list[str]:
    """Return an error if this machine does not see files that rank 0 writes to the shared folder."""
    seen, rank = shared_folder.views(Path(folder)), dist.get_rank()
    if not seen:
        alone = dist.get_world_size() == 1
        return [] if alone or rank else [f"no file can be created in --folder {folder}"]
    own, first = seen[rank][0], os.environ.get("LOCAL_RANK", "0") == "0"
    if own or not first:
        return []
    return [f"files that {seen[0][1]} (rank 0) writes to --folder {folder} are not visible here"]


# -- what pairs of machines find


def _pairs(every: Sequence[Facts]) -> dict[str, tuple[float, float]]:
    """Measure pairs of machines one after another: latency in microseconds and bandwidth in GB/s."""
    firsts = [rank for rank, facts in enumerate(every) if facts["first"]]
    if len(firsts) <= _PAIRS:
        pairs = [(a, b) for number, a in enumerate(firsts) for b in firsts[number + 1 :]]
    else:
        pairs = list(zip(firsts, [*firsts[1:], firsts[0]], strict=True))
    measured = {}
    for a, b in pairs:
        if dist.get_rank() in (a, b):
            measured[f"{every[a]['host']} - {every[b]['host']}"] = _measured(a, b)
        dist.barrier()
    return {name: value for part in _gathered(measured) for name, value in part.items()}


def _measured(a: int, b: int) -> tuple[float, float]:
    small = torch.zeros(2, device=devices.current().torch_device())
    large = torch.zeros(_BYTES // 4, device=devices.current().torch_device())
    _ping(small, a, b)
    latency = min(_ping(small, a, b) for _ in range(_TIMES)) / 2
    return latency * 1e6, 2 * _BYTES / min(_ping(large, a, b) for _ in range(3)) / 1e9


def _ping(tensor: torch.Tensor, a: int, b: int) -> float:
    """Send a tensor to the other rank and back, and return the elapsed time in seconds."""
    devices.current().synchronize()
    began = time.perf_counter()
    for source, target in ((a, b), (b, a)):
        if dist.get_rank() == source:
            dist.send(tensor, target)
        else:
            dist.recv(tensor, source)
    devices.current().synchronize()
    return time.perf_counter() - began


# -- what rank 0 tells


def _report(every: Sequence[Facts], faults: Sequence[list[str]], pairs: dict[str, Any]) -> Facts:
    machines: dict[str, Facts] = {}
    for facts, wrong in zip(every, faults, strict=True):
        machine = machines.setdefault(
            facts["host"],
            {**facts, "clock": round(facts["clock"] - every[0]["clock"], 3), "ranks": 0, "faults": []},
        )
        machine["ranks"] += 1
        machine["faults"] += wrong
    for machine in machines.values():
        machine.pop("first")
    return {"machines": machines, "pairs": pairs}


def _text(report: Facts) -> str:
    lines = []
    for host, machine in report["machines"].items():
        state = "failed" if machine["faults"] else "passed"
        lines.append(
            f"{host}  {state}  {machine['ranks']} ranks, {machine['device']}, {machine['address']}, "
            f"clock {machine['clock']:+.3f} s"
        )
        lines += [f"  {fault}" for fault in machine["faults"]]
    for pair, (latency, bandwidth) in report["pairs"].items():
        lines.append(f"{pair}  {latency:.0f} us, {bandwidth:.2f} GB/s")
    return "\n".join(lines)


def _write(out: Path, report: Facts) -> None:
    out.mkdir(parents=True, exist_ok=True)
    for name, wanted in (("passed.txt", False), ("failed.txt", True)):
        hosts = [host for host, machine in report["machines"].items() if bool(machine["faults"]) is wanted]
        files.write(out / name, "".join(f"{host}\n" for host in hosts))
    files.write(out / "cluster.json", json.dumps(report, indent=1) + "\n")
