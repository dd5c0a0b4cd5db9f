"""The warm parents of one run of the suite, which all of its processes (and xdist's workers) share.

They are kept in one folder, which the first process makes and names in the environment: one subfolder for
each parent, by what it has imported in which environment. All end with the process that made the folder.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import functools
import hashlib
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

HERE = Path(__file__).resolve().parent
_MEMORY = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") >> 30  # [GiB] of this machine
MOST = min(
    max(12, _MEMORY), 32
)  # parents alive; each holds up to 400 MB, and takes 1.5 to 6 s to start again
IDLE = 60  # seconds for which nobody has asked a parent before another may take its place
_HOME = "TEST_WARM_HOME"
_FOR_EVER = "base"  # the file of a parent that has forked others: it is not ended to make room

_started: list[subprocess.Popen[str]] = []  # by this process, which has to wait for them


@functools.cache
def home() -> Path:
    """Return the folder of the parents; whoever asks first makes it, and ends them with itself."""
    named = os.environ.get(_HOME)
    if named is not None and Path(named, "owner").is_file():
        return Path(named)
    made = Path(tempfile.mkdtemp(prefix="warm-"))
    (made / "owner").write_text(str(os.getpid()))
    os.environ[_HOME] = str(made)
    atexit.register(_end_all, made, os.getpid())
    return made


def program(
    imports: Sequence[str],
    read: Mapping[str, str],
    env: Mapping[str, str],
    launcher: Sequence[str] = (),
    base: str = "",
) -> str:
    """Return what takes the arguments of ``python`` and is forked by a parent with these imports.

    Args:
        imports: the modules, in their order.
        read: the variables by which parents with the same imports differ.
        env: the environment of the parent, if it has to be started: ``read``, and what is the same for all.
        launcher: stands before the parent's command line.
        base: what this has returned for another parent, which has to fork this one if it has to be started.
    """
    key = repr((list(launcher), list(imports), sorted(read.items())))
    folder = home() / hashlib.sha256(key.encode()).hexdigest()[:16]
    with _locked(folder):
        if not _answers(folder):
            _make_room()
            if base:
                (Path(base).parent / _FOR_EVER).touch()
            _start(folder, imports, env, [*launcher, base or sys.executable])
        now = time.time_ns()  # finer than the clock that stamps files
        os.utime(folder, ns=(now, now))
    return str(folder / "python")


def numbers() -> list[int]:
    """Return the process ids of the parents that are alive; these are the parents of all forks."""
    return [int((folder / "number").read_text()) for folder in _folders() if _answers(folder)]


def _folders() -> list[Path]:
    """Return the folders of parents that have started, the least recently used one first."""
    found = []
    for path in home().glob("*/number"):
        with contextlib.suppress(FileNotFoundError):  # another process has ended it
            found.append((path.parent.stat().st_mtime, path.parent))
    return [folder for _, folder in sorted(found)]


@contextlib.contextmanager
def _locked(folder: Path, *, wait: bool = True) -> Iterator[None]:
    """Hold the lock of a folder; if another process holds it, wait for it or raise BlockingIOError."""
    with folder.with_suffix(".lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield


def _answers(folder: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as parent:
        try:
            parent.connect(str(folder / "socket"))
        except (FileNotFoundError, ConnectionRefusedError):
            return False
    return True


def _is_idle(folder: Path) -> bool:
    return time.time() - folder.stat().st_mtime >= IDLE


def _make_room() -> None:
    """End an idle parent if the maximum number of parents is reached."""
    folders = [folder for folder in _folders() if not (folder / _FOR_EVER).exists()]
    for folder in folders[: max(0, len(folders) + 1 - MOST)]:
        # another process asks for it, or has ended it
        with contextlib.suppress(BlockingIOError, FileNotFoundError), _locked(folder, wait=False):
            if _is_idle(folder):
                end(folder)


def end(folder: Path) -> bool:
    """End a parent unless a fork is running for a client; return True if it has ended."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(int((folder / "number").read_text()), signal.SIGTERM)
    for _ in range(50):
        for process in _started:
            process.poll()  # the kernel forgets it
        if not _answers(folder):
            shutil.rmtree(folder)
            return True
        time.sleep(0.02)
    return False


def _start(folder: Path, imports: Sequence[str], env: Mapping[str, str], python: Sequence[str]) -> None:
    shutil.rmtree(folder, ignore_errors=True)  # of one that was killed
    folder.mkdir(mode=0o700)
    address, file, log = folder / "socket", folder / "python", folder / "log"
    owner = (folder.parent / "owner").read_text()
    with log.open("w") as errors:
        process = subprocess.Popen(
            [*python, str(HERE / "server.py"), str(address), owner, *imports],
            env=dict(env),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=errors,
            start_new_session=True,  # Ctrl-C is for its clients
            text=True,
        )
    _started.append(process)
    assert process.stdout is not None
    word, _, number = process.stdout.readline().partition(" ")
    if word != "ready":
        raise RuntimeError(f"no warm parent with {', '.join(imports)}:\n{log.read_text()}")
    # a kernel takes one argument behind #!, so a shell gives them
    client = [sys.executable, "-I", "-S", str(HERE / "client.py"), str(address), str(file)]
    file.write_text(f'#!/bin/sh\nexec {shlex.join(client)} "$@"\n')
    file.chmod(0o700)
    (folder / "number").write_text(number)


def _end_all(folder: Path, owner: int) -> None:
    """Kill all parents; forks for clients that are alive continue to run."""
    if os.getpid() != owner:  # the end of a fork
        return
    for path in folder.glob("*/number"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            os.kill(int(path.read_text()), signal.SIGKILL)
    shutil.rmtree(folder, ignore_errors=True)
