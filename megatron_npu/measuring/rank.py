"""Run one rank of a row: ``python -m megatron_npu.measuring.rank FOLDER``, with torchrun's environment
variables.

The process reads ``job.json`` in the folder and writes its measurements, or the reason why it ended, to
``rankN.json``. The process ends when its standard input closes, that is, when the process that started it
ends.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from megatron_npu.base import files
from megatron_npu.base.errors import UsageError
from megatron_npu.measuring.job import Job

JOB, STEPS = "job.json", "steps"
_SHORT = (
    "can't allocate memory",
    "Cannot allocate memory",
    "bad_alloc",
    "not enough memory",
    "out of memory",
    "can't start new thread",  # Python's word: there is no memory for its stack
)
OOM, REFUSED, FAILED = "oom", "refused", "failed"


def result_file(folder: Path, rank: int) -> Path:
    """Return the path of the file with a rank's result."""
    return folder / f"rank{rank}.json"


def main(folder: Path) -> int:
    """Train on this rank, measure it, and return the exit code."""
    threading.Thread(target=_end_with_the_parent, daemon=True).start()
    rank = int(os.environ["RANK"])
    job = Job.from_json((folder / JOB).read_text(encoding="utf-8"))

    def end(ended: str, why: str) -> None:
        _write(folder, rank, {"ended": ended, "reason": why})

    def exceeded(why: str) -> None:
        end(OOM, why)
        os._exit(1)

    try:
        result = _measure(job, folder / STEPS if rank == 0 else None, exceeded)
    except BaseException as error:
        _lift_limit()
        traceback.print_exc()
        end(_kind(error), reason(error))
        return 1
    _write(folder, rank, result)
    return 0


def _write(folder: Path, rank: int, result: dict[str, Any]) -> None:
    files.write(result_file(folder, rank), json.dumps(result) + "\n")


def _measure(job: Job, steps: Path | None, exceeded: Callable[[str], None]) -> dict[str, Any]:
    from megatron_npu import devices
    from megatron_npu.measuring.meter import Meter

    module, function = job.workload.split(":")
    workload: Callable[[Job, Meter], int] = getattr(
        importlib.import_module(f"megatron_npu.measuring.workloads.{module}"), function
    )
    device = devices.current()
    device.prepare()
    meter = Meter(job, steps, exceeded)
    parameters = workload(job, meter)
    return {
        "seconds": meter.seconds,
        "processor": meter.processor,
        "peak": meter.peak(),
        "parameters": parameters,
        "device": _model(device),
    }


def _model(device: Any) -> str:
    """Return the name of the device hardware."""
    from megatron_npu.doctor import hardware

    if device.is_host:
        return hardware.processor()
    import torch

    return torch.get_device_module(device.name).get_device_name()


def _kind(error: BaseException) -> str:
    import torch

    if isinstance(error, (MemoryError, torch.OutOfMemoryError)) or short_of_memory(str(error)):
        return OOM
    return REFUSED if isinstance(error, UsageError) else FAILED


def short_of_memory(text: str) -> bool:
    """Return True if an error message says that the host's memory is exhausted.

    torch raises a RuntimeError in this case.
    """
    return any(sign in text for sign in _SHORT)


def reason(error: BaseException) -> str:
    """Return a description of an error on one line."""
    text = str(error).strip().splitlines()
    first = next((line for line in text if line.strip()), "")
    return first if isinstance(error, UsageError) else f"{type(error).__name__}: {first}".rstrip(": ")


def _lift_limit() -> None:
    from megatron_npu.measuring import meter

    meter.lift_limit()


def _end_with_the_parent() -> None:
    os.read(0, 1)  # not sys.stdin: a process that is forked in the meantime would wait for its lock
    os._exit(1)


if __name__ == "__main__":
    code = main(Path(sys.argv[1]))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # what others of the group may still wait for ends no rank
