"""Compile the simulated CANN for the installed torch and torch_npu, once per combination of versions.

There are two libraries, which are cached separately because the second takes most of the time:

* the runtime (``runtime-<key>/``): what torch_npu uses in place of CANN, plus one empty library per CANN
  name that only refers to it; it requires no torch headers;
* the computation (``compute-<key>/``): the kernel that runs aten operations on host memory.

Nothing in this module imports torch, because it runs before ``import torch``.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from megatron_npu.base.errors import UsageError
from megatron_npu.sim import cache, elf, site

SOURCES = Path(__file__).resolve().parent / "csrc"
RUNTIME_LIBRARY = "libmegatron_npu_sim_runtime.so"
COMPUTE_LIBRARY = "libmegatron_npu_sim_compute.so"

_RUNTIME_SOURCES = (
    "runtime.cpp device.cpp memory.cpp failure.cpp aclnn.cpp hccl_call.cpp hccl_reduce.cpp hccl_segment.cpp "
    "hccl_exchange.cpp hccl_communicator.cpp hccl_lifecycle.cpp hccl_collectives.cpp hccl_interface.cpp "
    "hccl_p2p.cpp hccl_traffic.cpp hccl_host.cpp hccl_socket.cpp hccl_meeting.cpp hccl_links.cpp"
).split()
_RUNTIME_HEADERS = (
    "runtime.h codes.h failure.h half.h hccl_abi.h hccl_call.h hccl_reduce.h hccl_segment.h hccl_exchange.h "
    "hccl_communicator.h hccl_collectives.h hccl_traffic.h hccl_host.h "
    "hccl_socket.h hccl_meeting.h hccl_links.h"
).split()
_COMPUTE_SOURCES = ("compute.cpp",)

# CANN libraries that torch_npu opens by name at run time; those it is linked to are read from the wheel.
_OPENED_BY_NAME = (
    "libascendcl.so libhccl.so libhcomm.so libopapi.so libnnopbase.so libacl_tdt_channel.so "
    "libacl_op_compiler.so libmsprofiler.so libascend_ml.so libaml_fwk_detect.so libmspti.so libascend_hal.so"
).split()

# Functions that do work which the simulator does not do: success would be a silently wrong result. They
# report ACL_ERROR_FAILURE or HCCL_E_NOT_SUPPORT, which torch_npu turns into a RuntimeError. All others
# return 0. Functions that torch_npu looks up by name at run time are never generated: it takes absence for an
# answer, and either does without or names the function.
_FAILING = {"aclopCompile": 500000, "aclopExec": 500000, "rtKernelLaunch": 500000, "Hccl": 5}


@functools.cache  # a process keeps what it has loaded, also when the sources change in the meantime
def runtime() -> Path:
    """Return the directory of the compiled runtime, building it if necessary.

    The runtime is built first if the sources, torch or the compiler have changed.

    Raises:
        UsageError: there is no C++ compiler, or the compiler does not accept the sources.
    """
    key = _key([*_RUNTIME_HEADERS, *_RUNTIME_SOURCES])
    return cache.prepared_libraries(f"runtime-{key}", _build_runtime)


@functools.cache
def compute() -> Path:
    """Return the path of the compiled computation library, building it if necessary; see ``runtime``."""
    key = _key(["runtime.h", "alias.h", "dry.h", *_COMPUTE_SOURCES])
    return cache.prepared_libraries(f"compute-{key}", _build_compute) / COMPUTE_LIBRARY


@functools.cache  # a library that is made again in the meantime is not loaded beside the one in use
def runtime_library() -> ctypes.CDLL:
    """Load the runtime library so that libraries loaded later can use its symbols."""
    return cache.load(runtime() / RUNTIME_LIBRARY, ctypes.RTLD_GLOBAL)


@functools.cache
def compute_library() -> ctypes.CDLL:
    """Load the library that contains the computations."""
    return cache.load(compute())


def cann_names(directory: Path) -> list[Path]:
    """Return the libraries in a runtime directory that have the names of CANN's libraries."""
    return sorted(path for path in directory.glob("*.so") if path.name != RUNTIME_LIBRARY)


def present(library: str) -> bool:
    """Return True if the dynamic loader finds a library with the given name."""
    try:
        ctypes.CDLL(library)
    except OSError:
        return False
    return True


def _compiler() -> str:
    for name in ("g++", "c++", "clang++"):
        path = shutil.which(name)
        if path:
            return path
    raise UsageError(
        "there is no C++ compiler on PATH; g++ or clang++ with support for C++17 is required (C++20 from "
        "torch 2.10). Install one (Debian, Ubuntu: apt install g++)."
    )


def _torch_npu() -> Path:
    directory = site.package_directory("torch_npu")
    if directory is None:
        raise UsageError(
            "torch_npu is not on the Python path, but the simulator must be built in a process "
            "that `megatron-npu sim` started. Start it with megatron-npu sim."
        )
    return directory


def _key(sources: Iterable[str]) -> str:
    """Return a digest of everything that affects the build: sources, this file, packages and compiler."""
    digest = hashlib.sha256(Path(__file__).read_bytes())
    for name in sources:
        digest.update((SOURCES / name).read_bytes())
    for package in (site.torch_directory(), _torch_npu()):
        digest.update((package / "version.py").read_bytes())
    compiler = Path(_compiler()).resolve()
    # Its size and time instead of --version: running it would cost more than all the rest of a start.
    digest.update(f"{compiler} {compiler.stat().st_size} {compiler.stat().st_mtime_ns}".encode())
    return digest.hexdigest()[:16]


def _compile(*arguments: str | Path) -> None:
    command = [_compiler(), "-shared", "-fPIC", *map(str, arguments)]
    result = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    if result.returncode:
        errors = [line for line in result.stdout.splitlines() if "error" in line] or [result.stdout[-200:]]
        raise UsageError(
            f"{command[0]} cannot compile the simulator: {errors[0].strip()}. g++ 9 or newer is required "
            "(11 or newer from torch 2.10). Install a newer compiler; the whole command was: "
            + " ".join(command)
        )


def _build_runtime(directory: Path) -> None:
    started = time.monotonic()
    cache.say("compiling the simulated runtime")
    linked, missing = _unresolved()
    defaults = directory / "defaults.cpp"
    own = directory / RUNTIME_LIBRARY
    flags: list[str | Path] = ["-std=c++17", "-O2", f"-Wl,-soname,{own.name}", "-o", own]
    flags += _runtime_objects(directory)
    _compile(*flags, "-lpthread")
    defaults.write_text(_default_functions(missing - elf.read(own).defined))
    _compile(*flags, defaults, "-lpthread")
    empty = directory / "empty.cpp"
    empty.write_text("")
    for name in sorted({*linked, *_OPENED_BY_NAME}):
        link = ["-Wl,--no-as-needed", "-Wl,-rpath,$ORIGIN", f"-L{directory}", f"-l:{own.name}"]
        _compile(f"-Wl,-soname,{name}", "-o", directory / name, empty, *link)
    cache.say(f"runtime ready after {time.monotonic() - started:.0f} s")


def _runtime_objects(directory: Path) -> list[Path]:
    """Compile the runtime's sources in parallel, and return the object files."""

    def compiled(name: str) -> Path:
        result = directory / f"{Path(name).stem}.o"
        _compile("-std=c++17", "-O2", "-c", "-o", result, SOURCES / name)
        return result

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return list(pool.map(compiled, _RUNTIME_SOURCES))


def _unresolved() -> tuple[set[str], set[str]]:
    """Return the libraries that torch_npu links to but that are missing, and the symbols that no library
    defines.
    """
    npu, torch = _torch_npu(), site.torch_directory()
    # libop_plugin_atb.so belongs to another Ascend package (ATB) and is opened only if that is there.
    opened = [path for path in (npu / "lib").glob("*.so") if "atb" not in path.name]
    ours = [elf.read(path) for path in [*opened, *npu.glob("_C*.so")]]
    theirs = list((torch / "lib").glob("*.so*"))
    own = {path.name for path in [*(npu / "lib").glob("*.so"), *theirs]}
    defined = set().union(
        *(library.defined for library in ours), *(elf.read(path).defined for path in theirs)
    )
    undefined = set().union(*(library.undefined for library in ours)) - defined
    needed = set().union(*(library.needed for library in ours)) - own
    return _absent(needed, undefined)


# Symbols are asked for first: loading a library could add some to the process.
_PROBE = """
import ctypes, json, sys
libraries, symbols = json.load(sys.stdin)
process = ctypes.CDLL(None)
symbols = [name for name in symbols if not hasattr(process, name)]
def absent(library):
    try:
        ctypes.CDLL(library)
    except OSError:
        return True
json.dump([[name for name in libraries if absent(name)], symbols], sys.stdout)
"""


def _absent(libraries: set[str], symbols: set[str]) -> tuple[set[str], set[str]]:
    """Return the libraries and symbols that are missing on this machine, determined in a fresh process.

    This process cannot determine them: if it has loaded another build of the simulator, it finds everything.
    """
    result = subprocess.run(
        [sys.executable, "-I", "-c", _PROBE],
        input=json.dumps([sorted(libraries), sorted(symbols)]),
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    absent_libraries, absent_symbols = json.loads(result.stdout)
    return set(absent_libraries), set(absent_symbols)


def _default_functions(names: Iterable[str]) -> str:
    """Return the source of C++ functions that record their calls and fail where they must not report
    success.
    """
    lines = ["namespace sim { void note_default(const char*); void note_refused(const char*); }"]
    for name in sorted(names):
        code = next((code for prefix, code in _FAILING.items() if name.startswith(prefix)), 0)
        note = "note_refused" if code else "note_default"
        body = f'sim::{note}("{name}"); return {code};'
        lines.append(f'extern "C" __attribute__((visibility("default"))) long {name}() {{ {body} }}')
    return "\n".join(lines) + "\n"


def _build_compute(directory: Path) -> None:
    started = time.monotonic()
    cache.say("compiling the computation (half a minute)")
    torch, npu = site.torch_directory(), _torch_npu()
    release = tuple(map(int, site.version_of(torch).split(".")[:2]))
    include = [torch / "include", torch / "include/torch/csrc/api/include"]
    include += [npu / "include", npu / "include/third_party/acl/inc", npu / "include/third_party/hccl/inc"]
    # New-ABI symbols carry __cxx11; a wheel built with the old ABI (before torch 2.6) has none.
    new_abi = any("__cxx11" in symbol for symbol in elf.read(torch / "lib/libc10.so").defined)
    _compile(
        "-std=c++20" if release >= (2, 10) else "-std=c++17",
        "-O1",
        "-w",  # torch's headers warn
        f"-D_GLIBCXX_USE_CXX11_ABI={int(new_abi)}",
        *(f"-I{path}" for path in include),
        *("-o", directory / COMPUTE_LIBRARY),
        *(SOURCES / name for name in _COMPUTE_SOURCES),
        *(f"-L{torch / 'lib'}", "-ltorch_cpu", "-lc10", f"-L{npu / 'lib'}", "-ltorch_npu"),
        f"-l:{RUNTIME_LIBRARY}",
        f"-L{runtime()}",
        "-Wl,--unresolved-symbols=ignore-all",
    )
    cache.say(f"computation ready after {time.monotonic() - started:.0f} s")


def prepare() -> None:
    """Build both libraries, unless they already exist. ``site.prepare()`` must already be on ``sys.path``."""
    os.environ.setdefault("LC_ALL", "C")  # compilers' messages are searched for "error"
    runtime()
    compute()
