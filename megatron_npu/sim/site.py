"""Keep the torch_npu wheel that matches the installed torch in a separate directory.

In a normal environment, an installed torch_npu breaks ``import torch`` if CANN is not installed (torch loads
it through an entry point), so only processes of the simulator have the wheel's directory on their path.
"""

from __future__ import annotations

import os
import platform
import re
import subprocess
import sys
from pathlib import Path

from megatron_npu.base import settings
from megatron_npu.base.errors import UsageError
from megatron_npu.base.installed_packages import spec_of
from megatron_npu.process import python_child
from megatron_npu.sim import cache

# torch_npu imports these at start without torch being able to do without them.
_PURE_PYTHON_NEEDS = {"yaml": "pyyaml", "setuptools": "setuptools"}
_CPU_BUILDS = "--index-url https://download.pytorch.org/whl/cpu"
_OF_CUDA = re.compile(r"^cuda\b.*= *'(.+)'", re.MULTILINE)  # in torch's version.py; None in a CPU build
# torch_npu 2.13 aborts beside libtorch_cuda, which has registered pinned_reserve_segment_size_mb before it.
_FIRST_THAT_ABORTS = (2, 13)


def package_directory(name: str) -> Path | None:
    """Return the folder of a package without importing it, or None if the package is not installed."""
    spec = spec_of(name)
    places = spec.submodule_search_locations if spec else None
    return Path(next(iter(places))) if places else None


def version_of(package: Path) -> str:
    """Return ``__version__`` from a package's version.py, including its local suffix (such as +cpu)."""
    found = re.search(r"__version__\s*(?::\s*str)?\s*=\s*'([^']+)'", (package / "version.py").read_text())
    if found is None:
        raise UsageError(
            f"{package / 'version.py'} does not define __version__, so the package is not correctly "
            "installed. Reinstall torch_npu."
        )
    return found[1]


def torch_directory() -> Path:
    """Return the directory of the installed torch.

    Raises:
        UsageError: torch is not installed.
    """
    directory = package_directory("torch")
    if directory is None:
        raise UsageError(
            f"torch is not installed in {sys.prefix}, but the simulator requires its CPU build",
            remedy=f"Install it first: pip install torch {_CPU_BUILDS}",
        )
    return directory


def prepare() -> Path:
    """Return a directory for ``sys.path`` that contains torch_npu, after preparing it if necessary.

    torch_npu is downloaded if necessary.

    Raises:
        UsageError: torch was built for CUDA; there is no wheel for this torch and Python; it cannot be
            downloaded; or the directory given in the settings contains none, or one for another torch.
    """
    version = version_of(torch_directory()).partition("+")[0]
    if tuple(map(int, version.split(".")[:2])) >= _FIRST_THAT_ABORTS:
        require_cpu_build("the simulator")
    given = settings.SIM_SITE.get()
    if given:
        site = Path(given).expanduser().absolute()
        _require_fit(site, version)
        return site
    tag = f"{sys.implementation.cache_tag}-{platform.machine()}"
    return cache.prepared(f"site-{version}-{tag}", lambda directory: _install(directory, version))


def require_cpu_build(what: str) -> None:
    """Check that the installed torch was not built for CUDA.

    Args:
        what: what cannot run beside such a torch, for the error message.

    Raises:
        UsageError: it was.
    """
    torch = torch_directory()
    version = version_of(torch)
    if cuda := _OF_CUDA.search((torch / "version.py").read_text(encoding="utf-8")):
        plain = version.partition("+")[0]
        raise UsageError(
            f"{what} requires the CPU build of torch, but torch {version} in {torch.parent} was built for "
            f"CUDA {cuda[1]}",
            remedy=f"In a separate environment: pip install torch=={plain} {_CPU_BUILDS}",
        )


def _require_fit(site: Path, torch_version: str) -> None:
    package = site / "torch_npu"
    if not (package / "version.py").is_file():
        raise UsageError(
            f"{settings.SIM_SITE.name} must be a directory that contains torch_npu, but got {site}. Unset "
            f"it to download the wheel, or run pip install --target {site} torch-npu."
        )
    # Wheels are built per torch release; a post release of torch_npu is for the same torch.
    found = version_of(package)
    if found.partition("+")[0].partition(".post")[0] != torch_version:
        raise UsageError(
            f"torch_npu and torch must have the same version, but torch_npu {found} is in {site} and torch "
            f"is {torch_version}. Unset {settings.SIM_SITE.name} or install torch-npu=={torch_version} there."
        )


def _install(directory: Path, version: str) -> None:
    needs = [package for module, package in _PURE_PYTHON_NEEDS.items() if package_directory(module) is None]
    cache.say(f"downloading torch-npu {version} (about 100 MB, once)")
    command = python_child.module("pip", ["install", "--no-deps", "--disable-pip-version-check"])
    command += ["--only-binary", ":all:", "--target", str(directory), f"torch-npu=={version}", *needs]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    result = subprocess.run(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    )
    if result.returncode:
        errors = [line.strip() for line in result.stdout.splitlines() if "ERROR" in line]
        errors = errors or result.stdout.splitlines()[-1:] or ["pip failed"]
        raise UsageError(
            f"there is no torch-npu=={version} for Python {platform.python_version()} ({errors[-1]}). The "
            "simulator requires a torch version with a published torch-npu wheel, and a reachable package "
            f"index. Install such a torch, or set {settings.SIM_SITE.name} to an unpacked wheel."
        )
