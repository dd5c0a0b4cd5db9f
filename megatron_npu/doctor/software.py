"""Read installed versions without side effects, even if packages are broken."""

from __future__ import annotations

import importlib
import os
import platform
import re
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, entry_points, version
from pathlib import Path

import megatron_npu
from megatron_npu.base import settings
from megatron_npu.base.installed_packages import is_installed
from megatron_npu.process import extension_locks, python_child

# As pip calls them. PyPI's "apex" is not NVIDIA's; see ``advice``.
PACKAGES = (
    *("torch-npu", "megatron-core", "apex", "transformer-engine", "flash-attn", "triton", "deepspeed"),
    "numpy",
)
AUTOLOAD_OF_TORCH = "TORCH_DEVICE_BACKEND_AUTOLOAD"
_NVIDIA_DRIVER = Path("/proc/driver/nvidia/version")
_ASCEND_DRIVER = Path("/usr/local/Ascend/driver/version.info")
_TIMEOUT = 120  # seconds, for importing torch in a process of its own


def torch_import_error() -> str | None:
    """Import torch, and return a one-line reason if this fails, or None.

    torch imports every installed device package at its end, and their exceptions look like torch's own. A
    second attempt without these packages shows which of them causes the failure.
    """
    if not is_installed("torch"):
        return (
            "torch is not installed, and this package does not install it (see "
            "docs/reference/versions.md#which-torch)"
        )
    try:
        importlib.import_module("torch")
    except Exception as error:  # a broken driver or package raises whatever it likes
        cause: BaseException = error
        while cause.__cause__ is not None:  # torch wraps what a device package raised
            cause = cause.__cause__
        reason = f"import torch fails with {type(cause).__name__}: {str(cause).partition(chr(10))[0]}"
        packages = ", ".join(entry.name for entry in entry_points(group="torch.backends"))
        if _imports_without_backends():
            return (
                f"{reason}. With {AUTOLOAD_OF_TORCH}=0 the import works, so the fault is in a device "
                f"package that torch loads ({packages}): reinstall or remove it."
            )
        return f"{reason}. The torch installation itself is broken: reinstall it."
    return None


def _imports_without_backends() -> bool:
    command = python_child.code("import torch")
    environment = python_child.environment(**{AUTOLOAD_OF_TORCH: "0"})
    try:
        done = subprocess.run(command, env=environment, capture_output=True, timeout=_TIMEOUT, check=False)
    except subprocess.TimeoutExpired:
        return False
    return done.returncode == 0


def versions() -> dict[str, str | None]:
    """Return the versions of Python, this package, torch and optional packages.

    Missing packages have None.
    """
    found: dict[str, str | None] = {
        "python": platform.python_version(),
        "megatron-npu": f"{megatron_npu.__version__} in {Path(megatron_npu.__file__).resolve().parents[1]}",
        "torch": _package("torch"),
    }
    found |= {package: _package(package) for package in PACKAGES}
    found |= {"cann": _cann(), "ascend driver": _ascend_driver(), "nvidia driver": _nvidia_driver()}
    return found | _of_torch()


def _package(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def extensions() -> dict[str, list[str]]:
    """Return the extensions that torch has compiled for this user, and locks of interrupted compilations."""
    place = extension_locks.folder()
    return {
        "compiled": sorted(path.stem for path in place.glob("*/*/*.so")),
        "stale_locks": [str(lock) for lock in extension_locks.stale()],
    }


def _of_torch() -> dict[str, str | None]:
    """Return the versions that only torch itself can report, or an empty dict if torch cannot be imported."""
    torch = sys.modules.get("torch")
    if torch is None:
        return {}
    import torch.distributed as dist

    nccl = dist.is_available() and dist.is_nccl_available()
    hccl = dist.is_available() and dist.is_backend_available("hccl")
    gloo = dist.is_available() and dist.is_gloo_available()
    return {
        "torch": torch.__version__,  # with the build: +cpu, +cu128
        "cuda of torch": torch.version.cuda,
        "nccl": ".".join(map(str, torch.cuda.nccl.version())) if nccl else None,
        "hccl": _toolkit_file("hccl/version.info") or ("with torch-npu" if hccl else None),
        "gloo": "with torch" if gloo else None,
    }


def _cann() -> str | None:
    """Return the version of the CANN toolkit to which ASCEND_TOOLKIT_HOME or ASCEND_HOME_PATH points."""
    if settings.SIM.enabled():
        return f"simulated, {settings.SIM_SOC.get()}"
    return _toolkit_file("version.cfg") or _toolkit_file("*-linux/ascend_toolkit_install.info")


def _toolkit_file(pattern: str) -> str | None:
    """Return the line that contains the version from a file of the CANN toolkit."""
    for variable in ("ASCEND_TOOLKIT_HOME", "ASCEND_HOME_PATH"):
        root = os.environ.get(variable)
        for path in sorted(Path(root).glob(pattern)) if root else []:
            return _line_with_version(path) or path.name
    return None


def _ascend_driver() -> str | None:
    return _line_with_version(_ASCEND_DRIVER)


def _nvidia_driver() -> str | None:
    """Return the driver version from the kernel module's line, ``NVRM version: … Kernel Module 535.104.05
    …``.
    """
    line = _line_with_version(_NVIDIA_DRIVER) or ""
    number = re.search(r"\d+\.\d+(\.\d+)?", line)
    return number[0] if number else None


def _line_with_version(path: Path) -> str | None:
    try:
        lines = [line.strip() for line in path.read_text(encoding="utf-8", errors="replace").splitlines()]
    except OSError:
        return None
    return next((line for line in lines if "version" in line.lower()), None)


def patched_by() -> str:
    """Return which mechanism patches Megatron in a process that runs a stock script."""
    names = [entry.name for entry in entry_points(group="torch.backends")]
    if "megatron_npu" not in names:
        return "megatron-npu run, or import megatron_npu (not installed with pip: torch does not load it)"
    if os.environ.get(AUTOLOAD_OF_TORCH) == "0":
        return f"megatron-npu run, or import megatron_npu ({AUTOLOAD_OF_TORCH}=0)"
    if not settings.AUTOLOAD.enabled():
        return f"megatron-npu run, or import megatron_npu ({settings.AUTOLOAD.name}=0)"
    return "import torch"
