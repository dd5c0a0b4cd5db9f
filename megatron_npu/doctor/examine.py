"""What the doctor looks at; each function returns plain data and changes nothing."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import tempfile
from collections import Counter
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from megatron_npu import devices, host, inspection, settings
from megatron_npu.doctor import collectives
from megatron_npu.errors import UsageError

PACKAGES = (
    "megatron-npu torch torch-npu megatron-core apex transformer-engine flash-attn triton numpy".split()
)
# Beginnings of the environment variables that decide how a run behaves.
PREFIXES = ("MEGATRON", "HCCL_", "NCCL_", "GLOO_", "ASCEND_", "CUDA_", "TORCH_", "MASTER_", "OMP_", "RANK")
SECONDS = 120  # that a test in a process of its own may take


def versions() -> dict[str, str | None]:
    """Return the versions of Python, the packages, CANN, CUDA and NCCL; None where one is absent."""
    import torch

    found: dict[str, str | None] = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = None
    found["torch"] = torch.__version__  # says which build it is: +cpu, +cu128
    found["cuda of torch"] = torch.version.cuda
    found["cann"] = _cann()
    return found


def _cann() -> str | None:
    """Read the version from the toolkit that ASCEND_TOOLKIT_HOME or ASCEND_HOME_PATH names."""
    for variable in ("ASCEND_TOOLKIT_HOME", "ASCEND_HOME_PATH"):
        root = Path(os.environ.get(variable, "/nowhere"))
        for path in [root / "version.cfg", *sorted(root.glob("*-linux/ascend_toolkit_install.info"))]:
            if path.is_file():
                lines = [line.strip() for line in path.read_text(errors="replace").splitlines()]
                return next((line for line in lines if "version" in line.lower()), path.name)
    return None


def megatron() -> dict[str, Any]:
    """Return which Megatron would be imported, from where, what it hides, and how its patches stand."""
    try:
        found = host.find()
    except UsageError as error:
        return {"error": str(error)}
    result: dict[str, Any] = {
        "host": found.name,
        "version": found.version,
        "root": str(found.root),
        "shadowed": [f"{other} in {path}" for path, other in found.shadowed],
    }
    try:
        found.require_supported()
        result["patches"] = dict(Counter(verdict.status for verdict in inspection.verdicts(found)))
        result["failing"] = [v.target for v in inspection.verdicts(found) if v.fails]
    except UsageError as error:
        result["error"] = str(error)
    return result


def device_list() -> dict[str, Any]:
    """Return for each kind of device how many there are, or why there is none; and which one is selected."""
    kinds = (devices.NpuDevice(), devices.CudaDevice(), devices.CpuDevice())
    reasons = {device.name: device.absence() for device in kinds}
    result: dict[str, Any] = {
        device.name: reasons[device.name] or f"{device.count()} with {device.backend}" for device in kinds
    }
    try:
        selected = devices.select(settings.DEVICE.get())
    except UsageError as error:
        return result | {"error": str(error)}
    memory = selected.memory()
    result["selected"] = selected.name
    result["memory_mib"] = {"allocated": memory.allocated >> 20, "peak": memory.peak >> 20}
    return result


def environment() -> dict[str, str]:
    """Return the environment variables that decide how a run behaves."""
    return {name: value for name, value in sorted(os.environ.items()) if name.startswith(PREFIXES)}


def operations() -> dict[str, Any]:
    """Compare every operation with its reference on the selected device."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        ended = _run("operations", str(report), **{settings.VERIFY.name: "all", settings.STRICT.name: "0"})
        if ended is not None:
            return {"error": ended}
        return json.loads(report.read_text())


def communication() -> dict[str, Any]:
    """Let two processes reduce and exchange a tensor."""
    with tempfile.TemporaryDirectory() as folder:
        store = str(Path(folder) / "store")
        ranks = [_start("collectives", store, str(rank), LOCAL_WORLD_SIZE="2") for rank in range(2)]
        ends = [_end(rank) for rank in ranks]
    errors = [f"rank {rank}: {end}" for rank, end in enumerate(ends) if end is not None]
    return {"error": "; ".join(errors)} if errors else {"all_reduce": "right", "send and receive": "right"}


def _start(module: str, *arguments: str, **variables: str) -> subprocess.Popen[str]:
    # a rank's own place in a job must not leak into a test of two processes
    inherited = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    return subprocess.Popen(
        [sys.executable, "-W", "ignore", "-m", f"megatron_npu.doctor.{module}", *arguments],
        env=inherited | variables,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )


def _end(process: subprocess.Popen[str]) -> str | None:
    """Wait for the process; return what went wrong, in one line, or None."""
    try:
        _, stderr = process.communicate(timeout=SECONDS + collectives.TIMEOUT)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        return f"no end after {SECONDS + collectives.TIMEOUT} seconds"
    if process.returncode == 0:
        return None
    lines = [line for line in stderr.splitlines() if line.strip()]
    return lines[-1] if lines else f"exit code {process.returncode}"


def _run(module: str, *arguments: str, **variables: str) -> str | None:
    return _end(_start(module, *arguments, **variables))
