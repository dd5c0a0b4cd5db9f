"""Compiles the sources beside it for this processor, once for a user and a compiler, and loads it."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import platform
import shutil
import subprocess
from pathlib import Path

from megatron_npu import settings
from megatron_npu.ops.dispatch import report_fallback

SOURCES = tuple(Path(__file__).with_name(name) for name in ("kernels.cpp", "products.cpp", "attention.cpp"))
_HEADERS = tuple(sorted(Path(__file__).parent.glob("*.h")))
# What is left out of IEEE's rules is errno and traps, no value. A product and a sum are rounded once.
_FLAGS = (
    *("-std=c++17", "-O3", "-march=native", "-fopenmp", "-ffp-contract=fast"),
    *("-fno-math-errno", "-fno-trapping-math", "-shared", "-fPIC"),
    *("-Wall", "-Wextra", "-Wno-psabi"),  # of the last: vectors are handed to no code but this
)
_ONLY_X86 = ("-mprefer-vector-width=512",)
_LONGEST = 300  # seconds of a compilation, which takes seven


@functools.cache
def library() -> ctypes.CDLL | None:
    """Return the kernels; None where they are switched off, or cannot be had, which is reported then.

    Raises:
        FallbackForbiddenError: they cannot be had, in strict mode.
    """
    if not settings.COMPILED.enabled():
        return None
    try:
        return ctypes.CDLL(str(_compiled()))
    except (OSError, RuntimeError, subprocess.SubprocessError) as error:
        report_fallback(
            "compiled kernels",
            str(error),
            does="are not used",
            remedy=f"Install g++ (apt install g++), or set {settings.COMPILED.name}=0",
        )
        return None


def folder() -> Path:
    """Return where compiled kernels are kept: in the user's cache; it need not exist."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "megatron_npu" / "kernels"


def _compiled() -> Path:
    """Return the library's path, compiled first if there is none for this source, compiler and processor.

    Raises:
        RuntimeError: there is no g++, it refuses the source, or torch's OpenMP is not g++'s.
        OSError: the cache cannot be written to, or what is there is not the user's own.
    """
    compiler, openmp = _compiler(), _openmp()
    flags = (*_FLAGS, *(_ONLY_X86 if platform.machine() == "x86_64" else ()))
    path = folder() / f"{_key(compiler, openmp, flags)}.so"
    if not path.exists():
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        _compile([str(compiler), *flags, *map(str, SOURCES), str(openmp), "-Wl,--as-needed"], path)
    status = path.stat()
    if status.st_uid != os.geteuid() or status.st_mode & 0o022:
        raise PermissionError(f"{path} is not this user's, or others may write to it")
    return path


def _compiler() -> Path:
    found = shutil.which("g++")
    if found is None:
        raise RuntimeError("there is no g++ on PATH")
    return Path(found).resolve()


def _openmp() -> Path:
    """Return the OpenMP library that torch has loaded: a second one would start threads of its own."""
    maps = Path("/proc/self/maps")
    lines = maps.read_text(encoding="utf-8").splitlines() if maps.is_file() else []
    loaded = {line.split(maxsplit=5)[5] for line in lines if "libgomp" in line}
    if len(loaded) != 1:
        raise RuntimeError(f"torch's threads are those of one libgomp, not of {sorted(loaded) or 'none'}")
    return Path(loaded.pop())


def _key(compiler: Path, openmp: Path, flags: tuple[str, ...]) -> str:
    """Return a digest of what decides about the result; a cache may be one of several machines."""
    digest = hashlib.sha256(b"".join(path.read_bytes() for path in (*SOURCES, *_HEADERS)))
    digest.update(repr((flags, str(openmp), _processor())).encode())
    status = compiler.stat()  # instead of --version, which would take longer than all the rest
    digest.update(f"{compiler} {status.st_size} {status.st_mtime_ns}".encode())
    return digest.hexdigest()[:16]


def _processor() -> list[str]:
    """Return the kind of the first processor and what it can."""
    info = Path("/proc/cpuinfo")
    first = info.read_text(encoding="utf-8").split("\n\n")[0] if info.is_file() else platform.processor()
    names = ("model name", "flags", "Features", "CPU part")
    return [line for line in first.splitlines() if line.startswith(names)]


def _compile(command: list[str], path: Path) -> None:
    """Compile under a temporary name; several ranks may do so at once, and the last one's stays."""
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
    try:
        result = subprocess.run(
            [*command, "-o", str(partial)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
            timeout=_LONGEST,
        )
        if result.returncode:
            errors = [line for line in result.stdout.splitlines() if "error" in line] or [
                result.stdout[-200:]
            ]
            raise RuntimeError(f"{command[0]} does not compile them: {errors[0].strip()}")
        partial.chmod(0o700)
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)
