"""Checks that run in separate processes, because they may hang, crash or have side effects."""

from __future__ import annotations

import json
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

from megatron_npu import devices
from megatron_npu.base import settings
from megatron_npu.doctor import collectives
from megatron_npu.process import python_child
from megatron_npu.upstream import early_import

TIMEOUT = 300  # seconds for one check; on an idle machine a few are enough
# The rank of this process in a job must not leak into a check of two processes.
_RANK_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def operations() -> dict[str, Any]:
    """Compare every operation with its reference on the selected device."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        began = time.monotonic()
        # a fallback is to be reported, not to end the check
        variables = {settings.VERIFY.name: "all", settings.STRICT.name: "0"}
        _, error = _wait(_start("megatron_npu.doctor.operations", str(report), **variables), TIMEOUT)
        if error is not None:
            return {"error": error}
        return json.loads(report.read_text()) | {"seconds": round(time.monotonic() - began, 1)}


def communication() -> dict[str, Any]:
    """Run every kind of collective that Megatron uses in two processes.

    With one accelerator, a single process runs the checks, because NCCL and HCCL do not let two share a
    device.
    """
    device = devices.current()
    processes = 1 if device.name != "cpu" and device.count() == 1 else 2
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        store = str(Path(folder) / "store")
        size = str(processes)
        ranks = [
            _start("megatron_npu.doctor.collectives", store, str(rank), size, LOCAL_WORLD_SIZE=size)
            for rank in range(processes)
        ]
        found = [_wait(rank, TIMEOUT + collectives.TIMEOUT)[1] for rank in ranks]
    errors = [f"rank {rank}: {error}" for rank, error in enumerate(found) if error is not None]
    if errors:
        return {"error": "; ".join(errors)}
    right = {check.__name__: "right" for check in collectives.CHECKS}
    about = {"processes": processes, "backend": device.backend}
    return about | right | {"seconds": round(time.monotonic() - began, 1)}


def ledger(root: str) -> dict[str, Any]:
    """Import the patched modules of the Megatron in ``root``, and return the state of their patches."""
    began = time.monotonic()
    command = ("megatron_npu", "ledger", "--json", "--megatron", root)
    output, error = _wait(_start(*command, **{settings.VERIFY.name: ""}), TIMEOUT)
    try:
        content = json.loads(output)
    except ValueError:
        return {"error": error or "no answer"}
    patches = content["patches"]
    return {
        "summary": content["summary"],
        "failed": [f"{row['target']}: {row['reason']}" for row in patches if row["state"] == "failed"],
        "not_imported": sorted({row["reason"] for row in patches if _misses_a_package(row)}),
        "seconds": round(time.monotonic() - began, 1),
    }


def deepspeed() -> dict[str, Any]:
    """Import DeepSpeed as a run does; return its accelerator, or nothing if it is not installed."""
    if early_import.is_absent("deepspeed"):
        return {}
    output, error = _wait(_start("megatron_npu.doctor.deepspeed_check"), TIMEOUT)
    return {"error": error} if error is not None else json.loads(output.splitlines()[-1])


def _misses_a_package(row: dict[str, Any]) -> bool:
    """Return whether a module could not be imported because a package other than Megatron is missing."""
    return (
        row["state"] == "pending" and "No module named" in row["reason"] and "'megatron" not in row["reason"]
    )


def _start(module: str, *arguments: str, **variables: str) -> subprocess.Popen[str]:
    inherited = python_child.environment(**variables)
    return subprocess.Popen(
        python_child.module(module, arguments, options=["-W", "ignore"]),
        env={name: value for name, value in inherited.items() if name not in _RANK_VARIABLES},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def _wait(process: subprocess.Popen[str], seconds: float) -> tuple[str, str | None]:
    """Wait for the process; return its output, and the problem as one line, or None."""
    try:
        stdout, stderr = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        return "", f"no result after {seconds:.0f} seconds"
    if process.returncode == 0:
        return stdout, None
    lines = [line for line in stderr.splitlines() if line.strip()]
    return stdout, lines[-1] if lines else f"exit code {process.returncode}"
