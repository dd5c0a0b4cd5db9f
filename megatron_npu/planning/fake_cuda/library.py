"""Compile ``hooks.cpp`` and load it into this process, before torch is imported."""

from __future__ import annotations

import ctypes
import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

from megatron_npu.base.errors import UsageError
from megatron_npu.sim import cache, site

SOURCE = Path(__file__).with_name("hooks.cpp")


def unavailable() -> str | None:
    """Return the reason why the library cannot be built on this machine, or None if it can be built."""
    if sys.platform != "linux":
        return f"the fake CUDA does not support {sys.platform}"
    try:
        site.require_cpu_build("the fake CUDA")  # its hooks and libtorch_cuda's have one name
    except UsageError as error:
        return str(error)
    return None if shutil.which("g++") else "there is no g++ on PATH"


def load() -> None:
    """Load the library, which makes torch detect a CUDA device.

    Call this before torch is imported, because torch caches the result.

    Raises:
        RuntimeError: torch is already imported.
    """
    if "torch" in sys.modules:
        raise RuntimeError("the fake CUDA library must be loaded before torch")
    # what torch.compile makes for CUDA needs Triton and a driver: its functions run as they are written
    os.environ["TORCHDYNAMO_DISABLE"] = "1"
    torch = site.torch_directory() / "lib"
    ctypes.CDLL(str(torch / "libtorch_cpu.so"), ctypes.RTLD_GLOBAL)
    cache.load(built())


def built() -> Path:
    """Return the path of the library, building it if necessary.

    The library is compiled first if the source or torch has changed.

    Raises:
        UsageError: the compiler fails, or another user can write to the cache.
    """
    version = site.version_of(site.torch_directory())
    key = hashlib.sha256(SOURCE.read_bytes() + version.encode()).hexdigest()[:16]
    return cache.prepared_libraries(f"fake-cuda-{key}", _build) / "hooks.so"


def _build(folder: Path) -> None:
    torch = site.torch_directory()
    done = subprocess.run(
        [
            *("g++", "-std=c++20", "-shared", "-fPIC", "-w", f"-I{torch / 'include'}", str(SOURCE)),
            *("-o", str(folder / "hooks.so"), f"-L{torch / 'lib'}", "-ltorch_cpu", "-lc10"),
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        errors = [line for line in done.stderr.splitlines() if "error" in line] or [done.stderr[-200:]]
        raise UsageError(
            f"g++ cannot compile the fake CUDA library: {errors[0].strip()}. g++ 11 or newer is required. "
            "Install a newer compiler, or free some space if the disk is full."
        )
