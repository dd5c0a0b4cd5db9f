"""Compile this project's C++ libraries once per user, compiler and processor, and load them.

The first process that needs a library compiles it under a lock while the others wait. A truncated library, or
one that the loader rejects, is compiled again. Each reason for a missing library has its own remedy.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import logging
import os
import platform
import shutil
import signal
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

from megatron_npu.base import search_paths
from megatron_npu.base.errors import UsageError
from megatron_npu.process import user_cache

_LONGEST = 300  # seconds of a compilation, which takes seven
_OUT_OF_MEMORY = ("Killed", "out of memory", "Cannot allocate memory")
_ANOTHER = "Set another folder with XDG_CACHE_HOME"
_logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Recipe:
    """Description of how a C++ library is built.

    Attributes:
        folder: the folder in which the library is stored.
        sources: the files to compile.
        headers: the files that they include.
        flags: the compiler flags.
        links: the libraries and flags that must follow the sources.
        without: how to run without the library, for error messages.
    """

    folder: Path
    sources: tuple[Path, ...]
    headers: tuple[Path, ...]
    flags: tuple[str, ...]
    links: tuple[str, ...]
    without: str

    def remedy(self, first: str) -> str:
        """Return the advice for fixing an error during the build.

        After the given instruction, it states how to run without the library.
        """
        return f"{first}, or {self.without}"


def load(recipe: Recipe) -> ctypes.CDLL:
    """Load a library, compiling it first if there is no build for this source, compiler and processor.

    Raises:
        UsageError: there is no compiler, it fails or takes too long, the cache is not writable or not private
            to this user, or the library cannot be loaded.
    """
    compiler = _compiler(recipe)
    key, remedy = _key(recipe, compiler), recipe.remedy(_ANOTHER)
    name = f"{key}.so"
    with user_cache.opened(recipe.folder, remedy) as folder:
        user_cache.require_executable(recipe.folder, folder, recipe.remedy(_ANOTHER))
        library, _ = _loaded(recipe, folder, name)
        if library is not None:
            return library
        lock = recipe.folder / f"{key}.lock"
        with user_cache.locked(lock, remedy, lambda: _logger.info("waiting for %s", lock), _LONGEST + 60):
            library, _ = _loaded(recipe, folder, name)  # by another process, in the meantime
            if library is None:
                _build(recipe, compiler, folder, name)
                library, error = _loaded(recipe, folder, name)
    if library is None:
        raise UsageError(
            f"{recipe.folder / name} was just built by {compiler}, but it cannot be loaded: {error}",
            remedy=recipe.remedy("Use a g++ that compiles for the machine on which the program runs"),
        )
    return library


def _compiler(recipe: Recipe) -> Path:
    found = shutil.which("g++", path=search_paths.environment().get("PATH", os.defpath))
    if found is None:
        raise UsageError(
            "there is no g++ on PATH; a compiler that supports C++17 is required",
            remedy=recipe.remedy("Install g++ (apt install g++)"),
        )
    return Path(found).resolve()


def _key(recipe: Recipe, compiler: Path) -> str:
    """Return a digest of everything that affects the compiled library.

    Machines may share one cache.
    """
    digest = hashlib.sha256(b"".join(path.read_bytes() for path in (*recipe.sources, *recipe.headers)))
    digest.update(repr((recipe.flags, recipe.links, _processor())).encode())
    status = compiler.stat()  # instead of --version, which would take longer than all the rest
    digest.update(f"{compiler} {status.st_size} {status.st_mtime_ns}".encode())
    return digest.hexdigest()[:16]


@functools.cache
def _processor() -> tuple[str, ...]:
    """Return the model and the features of the first processor of the machine."""
    info = Path("/proc/cpuinfo")
    first = info.read_text(encoding="utf-8").split("\n\n")[0] if info.is_file() else platform.processor()
    names = ("model name", "flags", "Features", "CPU part")
    return tuple(line for line in first.splitlines() if line.startswith(names))


def _loaded(recipe: Recipe, folder: int, name: str) -> tuple[ctypes.CDLL | None, str]:
    """Load a compiled library.

    Return None and the reason if it is missing, truncated or built for another machine.
    """
    path = recipe.folder / name
    descriptor = user_cache.opened_file(folder, path, recipe.remedy(f"Remove {path}"))
    if descriptor is None:
        return None, "it does not exist"
    if not user_cache.is_whole(descriptor):
        os.close(descriptor)
        return None, "it is truncated"
    try:
        return user_cache.loaded(descriptor), ""
    except OSError as error:
        return None, str(error)


def _build(recipe: Recipe, compiler: Path, folder: int, name: str) -> None:
    """Compile to a temporary file, and rename it to the library's final name.

    Unused libraries are removed as well.
    """
    _logger.info("compiling %s", recipe.folder / name)
    try:
        stream, partial = tempfile.mkstemp(".partial", f"{name}.", recipe.folder)
        os.close(stream)
    except OSError as error:
        raise user_cache.unusable(recipe.folder, error, recipe.remedy(_ANOTHER)) from error
    try:
        _compile(recipe, [str(compiler), *recipe.flags, *map(str, recipe.sources), *recipe.links], partial)
        user_cache.seal(folder, os.path.basename(partial))
        os.replace(os.path.basename(partial), name, src_dir_fd=folder, dst_dir_fd=folder)
    except OSError as error:
        raise user_cache.unusable(recipe.folder, error, recipe.remedy(_ANOTHER)) from error
    finally:
        Path(partial).unlink(missing_ok=True)
    _remove_unused(folder)


def _compile(recipe: Recipe, command: list[str], target: str) -> None:
    process = subprocess.Popen(
        [*command, "-o", target],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**search_paths.environment(), "LC_ALL": "C"},  # messages are searched for "error"
        start_new_session=True,  # so that what g++ itself starts can be ended with it
    )
    try:
        output, _ = process.communicate(timeout=_LONGEST)
    except BaseException as error:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        if not isinstance(error, subprocess.TimeoutExpired):
            raise
        raise UsageError(
            f"{command[0]} did not finish within {_LONGEST} s, although the compilation usually takes a "
            "few seconds",
            remedy=recipe.remedy("Start again when the machine is less busy"),
        ) from None
    if process.returncode:
        raise _refused(recipe, command[0], output)


def _refused(recipe: Recipe, compiler: str, output: str) -> UsageError:
    errors = [line for line in output.splitlines() if "error" in line] or [output[-200:]]
    if any(word in output for word in _OUT_OF_MEMORY):
        remedy = "Free a gigabyte of memory on the machine"
    elif "No space left" in output:
        remedy = "Free space in the folder of TMPDIR"
    else:
        remedy = "Install a newer g++ (9 or newer)"
    given = f"{compiler} cannot compile the sources, which require C++17: {errors[0].strip()}"
    return UsageError(given, remedy=recipe.remedy(remedy))


def _remove_unused(folder: int) -> None:
    """Remove libraries, locks and partial files that nothing has used for a month."""
    with os.scandir(folder) as entries:
        unused = [entry.name for entry in entries if user_cache.is_unused(entry)]
    for name in unused:
        if name.endswith((".so", ".lock", ".partial")):
            with contextlib.suppress(OSError):
                os.unlink(name, dir_fd=folder)
