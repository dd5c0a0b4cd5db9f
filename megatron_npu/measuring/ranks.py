"""Start, monitor and end the processes that measure one row, and return their ``Outcome``."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from signal import SIGABRT, SIGKILL
from typing import Any

import psutil

from megatron_npu.devices import cores
from megatron_npu.measuring import rank
from megatron_npu.measuring.job import Job
from megatron_npu.pretrain.run import host_memory
from megatron_npu.process import python_child

MEASURED, OOM, NA, FAILED = "measured", "OOM", "NA", "failed"
_POLL = 0.1  # seconds between two looks at the ranks
_GRACE = 3.0  # seconds for the other ranks to say how they ended
_TAIL = 4000  # characters of a rank's own output


@dataclass(frozen=True)
class Outcome:
    """The result of running a row.

    Attributes:
        kind: ``measured``, ``OOM``, ``NA`` or ``failed``.
        reason: the reason, except for ``measured``.
        throughputs: samples per second for each repetition.
        processor: CPU seconds per sample for each repetition, over all ranks.
        peaks: the peak bytes of each rank.
        parameters: the number of parameters of the whole model.
        device: the name of the hardware.
        log: the last output of the ranks, for a failed row.
    """

    kind: str
    reason: str = ""
    throughputs: list[float] = field(default_factory=list)
    peaks: list[int] = field(default_factory=list)
    parameters: int = 0
    device: str = ""
    log: str = ""
    processor: list[float] = field(default_factory=list)


def run(job: Job, follow: Callable[[int], None]) -> Outcome:
    """Train a row in separate processes, and wait until all of them have ended.

    Args:
        job: the row's job.
        follow: called repeatedly with the number of completed steps.
    """
    with tempfile.TemporaryDirectory(prefix="megatron-npu-bench-") as name:
        folder = Path(name)
        (folder / rank.JOB).write_text(job.to_json(), encoding="utf-8")
        with _started(job, folder) as processes:
            guard = _wait(processes, folder / rank.STEPS, follow)
            codes = [process.poll() for process in processes]
        return _outcome(job, folder, codes, guard)


@contextlib.contextmanager
def _started(job: Job, folder: Path) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Run the ranks of a row inside the ``with`` block.

    This process serves their store, so that the port is free.
    """
    import torch.distributed as dist

    store = dist.TCPStore(
        "127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(minutes=5)
    )
    processes: list[subprocess.Popen[bytes]] = []
    try:
        for number in range(job.ranks):
            processes.append(_start(job, folder, number, store.port))
        yield processes
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
        for process in processes:
            process.wait()
            assert process.stdin is not None
            process.stdin.close()


def _start(job: Job, folder: Path, number: int, port: int) -> subprocess.Popen[bytes]:
    place = {
        "RANK": number,
        "LOCAL_RANK": number,
        "WORLD_SIZE": job.ranks,
        "LOCAL_WORLD_SIZE": job.ranks,
        "GROUP_RANK": 0,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
        # torch's env:// then takes the store that is there, as under torchrun
        "TORCHELASTIC_USE_AGENT_STORE": True,
        "TORCHELASTIC_RESTART_COUNT": 0,
    }
    environment = {"OMP_NUM_THREADS": str(cores.threads(job.ranks)), **os.environ}
    environment |= {name: str(value) for name, value in place.items()}
    environment["PYTHONPATH"] = python_child.search_path()
    program = os.environ.get("PYTHON_EXEC", sys.executable)  # as torchrun
    with open(folder / f"rank{number}.log", "wb") as log:
        return subprocess.Popen(
            [program, *python_child.module_flags(rank.__name__), str(folder)],
            env=environment,
            stdin=subprocess.PIPE,  # its end tells the rank that this process is gone
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # Ctrl-C is ours to handle
        )


def _wait(processes: list[subprocess.Popen[bytes]], steps: Path, follow: Callable[[int], None]) -> str | None:
    """Wait until all ranks have ended or one has failed.

    Return the reason for stopping them early, or None.
    """
    reserve = max(512 << 20, psutil.virtual_memory().total // 20)
    deadline = None
    while any(process.poll() is None for process in processes):
        time.sleep(_POLL)
        follow(steps.stat().st_size if steps.exists() else 0)
        if host_memory.available() < reserve:
            return (
                f"the rank was stopped because less than {reserve >> 20} MB of the machine's memory was "
                "left, which is reserved for other programs"
            )
        if any(process.poll() for process in processes):
            deadline = deadline or time.monotonic() + _GRACE
            if time.monotonic() > deadline:
                return None
    follow(steps.stat().st_size if steps.exists() else 0)
    return None


def _outcome(job: Job, folder: Path, codes: list[int | None], guard: str | None) -> Outcome:
    if guard is not None:
        return Outcome(OOM, guard)
    results = [_result(folder, number) for number in range(job.ranks)]
    measured = [result for result in results if result and "ended" not in result]
    return _measured(job, measured) if len(measured) == job.ranks else _failure(folder, results, codes)


def _measured(job: Job, results: list[dict[str, Any]]) -> Outcome:
    """Compute the values of a row from the values of its ranks, and return them.

    The slowest rank determines the time of a repetition.
    """
    laps = zip(*(result["seconds"] for result in results), strict=True)
    samples = job.global_batch_size * job.steps
    return Outcome(
        MEASURED,
        throughputs=[samples / max(seconds) for seconds in laps],
        peaks=[result["peak"] for result in results],
        parameters=results[0]["parameters"],
        device=results[0]["device"],
        processor=[sum(used) / samples for used in zip(*(r["processor"] for r in results), strict=True)],
    )


def _short_of_memory(code: int | None, log: str) -> str:
    """Describe how a lack of memory ended a rank that has no result. Return "" for other causes."""
    if code == -SIGKILL:
        return "the rank was killed by the system (SIGKILL), which usually means that memory ran out"
    return log.strip().splitlines()[-1] if code == -SIGABRT and rank.short_of_memory(log) else ""


def _failure(folder: Path, results: list[dict[str, Any] | None], codes: list[int | None]) -> Outcome:
    """Return the most informative reason why a row has no values."""
    ended = [result for result in results if result and "ended" in result]
    if (said := _said(ended)) is not None:
        return said
    logs = [_tail(folder / f"rank{number}.log") for number in range(len(results))]
    for result, code, log in zip(results, codes, logs, strict=True):
        if result is None and (short := _short_of_memory(code, log)):
            return Outcome(OOM, short)
    log = next((log for log, code in zip(logs, codes, strict=True) if code), logs[0])
    reason = ended[0]["reason"] if ended else f"a rank ended with exit code {next(filter(None, codes), None)}"
    return Outcome(FAILED, reason, log=log)


def _said(ended: list[dict[str, Any]]) -> Outcome | None:
    """Return the outcome that the ranks have reported: out of memory, or a rejected job.

    Return None for other outcomes.
    """
    for kind, told in ((rank.OOM, OOM), (rank.REFUSED, NA)):
        reason = next((result["reason"] for result in ended if result["ended"] == kind), None)
        if reason is not None:
            return Outcome(told, reason)
    return None


def _result(folder: Path, number: int) -> dict[str, Any] | None:
    path = rank.result_file(folder, number)
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None


def _tail(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace")[-_TAIL:]
