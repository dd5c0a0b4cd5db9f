"""Run checks in separate processes, because the checks may hang, crash or have side effects."""

from __future__ import annotations

import json
import subprocess
import tempfile
import time
from collections.abc import Generator, Mapping
from pathlib import Path
from typing import Any

from megatron_npu import devices
from megatron_npu.base import settings
from megatron_npu.doctor import collectives
from megatron_npu.process import python_child
from megatron_npu.upstream import early_import

TIMEOUT = 300  # seconds for one check; on an idle machine a few are enough
# A check yields the process that it has started, is sent its output and error, and returns its part.
Check = Generator[subprocess.Popen[str], tuple[str, str | None], dict[str, Any]]
# The rank of this process in a job must not leak into a check of two processes.
_RANK_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def before_communication(root: str | None) -> dict[str, dict[str, Any]]:
    """Run the checks that need only one process each, all at the same time.

    Most of their time is spent importing torch.

    Args:
        root: the folder of the Megatron whose patches are applied, or None to leave out that check.

    Returns:
        The part of the report of each check.
    """
    checks = {} if root is None else {"ledger": _ledger(root)}
    return _together(checks | {"operations": _operations(), "deepspeed": _deepspeed()})


def operations() -> dict[str, Any]:
    """Compare every operation with its reference on the selected device."""
    return _together({"operations": _operations()})["operations"]


def _operations() -> Check:
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        began = time.monotonic()
        # a fallback is to be reported, not to end the check
        variables = {settings.VERIFY.name: "all", settings.STRICT.name: "0"}
        _, error = yield _start("megatron_npu.doctor.operations", str(report), **variables)
        if error is not None:
            return {"error": error}
        return json.loads(report.read_text()) | {"seconds": round(time.monotonic() - began, 1)}


def communication() -> dict[str, Any]:
    """Run every kind of collective that Megatron uses in two processes.

    With one accelerator, a single process runs the checks, because NCCL and HCCL do not allow two processes
    to share a device.
    """
    device = devices.current()
    processes = 1 if not device.is_host and device.count() == 1 else 2
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        store = str(Path(folder) / "store")
        size = str(processes)
        ranks = [
            _start("megatron_npu.doctor.collectives", store, str(rank), size, LOCAL_WORLD_SIZE=size)
            for rank in range(processes)
        ]
        try:
            found = [_wait(rank, TIMEOUT + collectives.TIMEOUT)[1] for rank in ranks]
        finally:
            for rank in ranks:
                rank.kill()  # without effect on one that has ended
                rank.wait()
    errors = [f"rank {rank}: {error}" for rank, error in enumerate(found) if error is not None]
    if errors:
        return {"error": "; ".join(errors)}
    right = {check.__name__: "right" for check in collectives.CHECKS}
    about = {"processes": processes, "backend": device.backend}
    return about | right | {"seconds": round(time.monotonic() - began, 1)}


def ledger(root: str) -> dict[str, Any]:
    """Import the patched modules of the Megatron in ``root``, and return the states of the patches."""
    return _together({"ledger": _ledger(root)})["ledger"]


def _ledger(root: str) -> Check:
    began = time.monotonic()
    command = ("megatron_npu", "ledger", "--json", "--megatron", root)
    output, error = yield _start(*command, **{settings.VERIFY.name: ""})
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
    """Import DeepSpeed as a run does, and return its accelerator.

    The result is empty if DeepSpeed is not installed.
    """
    return _together({"deepspeed": _deepspeed()})["deepspeed"]


def _deepspeed() -> Check:
    if early_import.is_absent("deepspeed"):
        return {}
    output, error = yield _start("megatron_npu.doctor.deepspeed_check")
    return {"error": error} if error is not None else json.loads(output.splitlines()[-1])


def _together(checks: Mapping[str, Check]) -> dict[str, dict[str, Any]]:
    """Start all checks, wait for each of them, and return their parts of the report by name."""
    found: dict[str, dict[str, Any]] = {}
    processes: dict[str, subprocess.Popen[str]] = {}
    try:
        for name, check in checks.items():
            try:
                processes[name] = next(check)
            except StopIteration as end:  # nothing to start
                found[name] = end.value
        for name, process in processes.items():
            try:
                checks[name].send(_wait(process, TIMEOUT))
            except StopIteration as end:
                found[name] = end.value
    finally:
        for process in processes.values():
            process.kill()  # without effect on one that has ended
            process.wait()
    return {name: found[name] for name in checks}


def _misses_a_package(row: dict[str, Any]) -> bool:
    """Return True if a module cannot be imported because a package other than Megatron is missing."""
    return (
        row["state"] == "pending" and "No module named" in row["reason"] and "'megatron" not in row["reason"]
    )


def _start(module: str, *arguments: str, **variables: str) -> subprocess.Popen[str]:
    inherited = python_child.environment(**variables)
    return subprocess.Popen(
        python_child.ending_module(module, arguments, options=["-W", "ignore"]),
        env={name: value for name, value in inherited.items() if name not in _RANK_VARIABLES},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def _wait(process: subprocess.Popen[str], seconds: float) -> tuple[str, str | None]:
    """Wait until a process ends, and return its output, and its problem as one line or None."""
    try:
        stdout, stderr = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        return "", f"no result after {seconds:.0f} seconds"
    except KeyboardInterrupt:  # also of SIGTERM
        process.kill()
        process.wait()
        raise
    if process.returncode == 0:
        return stdout, None
    lines = [line for line in stderr.splitlines() if line.strip()]
    return stdout, lines[-1] if lines else f"exit code {process.returncode}"
