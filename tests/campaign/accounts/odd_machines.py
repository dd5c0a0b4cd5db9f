"""Machines and processes that lack something: mounts, a network, a working directory, signals, variables."""

from __future__ import annotations

import ctypes
import functools
import os
import resource
import signal
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

from tests.campaign.accounts import rooms, surroundings
from tests.campaign.accounts.rooms import Room
from tests.campaign.accounts.samples import Samples
from tests.campaign.accounts.trials import DONE, EITHER, REFUSED, Later, Try, Verdict, made

_PLACE = "odd machines"
_NEW_MOUNTS, _NEW_HOST, _NEW_NETWORK = 0x0002_0000, 0x0400_0000, 0x4000_0000
_ALL = ("pretrain", "generate", "preprocess", "train on 2", "plan")
Prepare = Callable[[], object]


def tries(room: Room) -> Iterator[Try | Later]:
    """Yield commands on odd machines, then as odd processes, then with odd variables."""
    for each in _tries(room):
        surroundings.remove_results(room)
        yield each


def commands(samples: Samples) -> dict[str, list[str]]:
    """Return the commands, which use several processes where they can."""
    found = surroundings.commands(samples)
    several = ["--num-workers", "2", "--async-save", "--train-iters", "2", "--dashboard", "0"]
    return {
        **found,
        "pretrain": [*found["pretrain"], *several],
        "train on 2": [*found["train"], "--nproc-per-node", "2"],
    }


def _tries(room: Room) -> Iterator[Try | Later]:
    found = commands(Samples(room))
    for name, (prepare, chosen) in _machines(room).items():
        for command in chosen:
            words = found[command]
            yield Try(_PLACE, f"{command}: {name}", words, EITHER, prepare=prepare, limit=300)
    long = room.temporary / ("t" * 100) / ("u" * 100)
    long.mkdir(parents=True, exist_ok=True)
    room.give(long.parent, room.user)
    for command in ("pretrain", "preprocess", "train on 2", "plan"):
        variables: dict[str, str | None] = {"TMPDIR": str(long)}
        what = f"{command}: a folder for temporary files with a name of 200 characters"
        yield Try(_PLACE, what, found[command], EITHER, variables=variables, limit=300)
    for name, (command, changed, expected) in _VARIABLES.items():
        yield Try(_PLACE, f"{command}: {name}", found[command], expected, variables=changed, limit=300)
    yield from _modes(room, found)


def _machines(room: Room) -> dict[str, tuple[Prepare, tuple[str, ...]]]:
    data = ("pretrain", "preprocess")
    return {
        "/proc is hidden": (_mounted("-t", "tmpfs", "-o", "mode=755", "tmpfs", "/proc"), _ALL),
        "/proc shows own processes alone": (_mounted("-t", "proc", "-o", "hidepid=2", "proc", "/proc"), data),
        "/sys is hidden": (
            _mounted("-t", "tmpfs", "-o", "mode=755", "tmpfs", "/sys"),
            ("pretrain",),
        ),
        "/dev/shm belongs to root": (_mounted("-t", "tmpfs", "-o", "mode=755", "tmpfs", "/dev/shm"), _ALL),
        "/dev/shm of 8 KiB": (
            _mounted("-t", "tmpfs", "-o", "mode=1777,size=8k", "tmpfs", "/dev/shm"),
            ("pretrain", "preprocess", "train on 2"),
        ),
        "the home is read-only": (_read_only(room.home), ("pretrain", "train with graphs", "sim")),
        "a cache without the right to execute": (
            _mounted(
                *("-t", "tmpfs", "-o", f"noexec,mode=700,uid={room.user},gid={room.user}"),
                *("tmpfs", str(room.home)),
            ),
            ("pretrain", "train with graphs", "plan"),
        ),
        "no folder for temporary files": (_read_only(room.temporary, Path("/tmp"), Path("/var/tmp")), _ALL),
        "no network, not even the loopback": (lambda: _unshared(_NEW_NETWORK), _ALL),
        "a host name without an address": (_nameless, ("pretrain", "train on 2")),
        "the working directory is removed": (lambda: _removed(room), (*_ALL, "lambada", "train with graphs")),
        "the working directory is closed": (lambda: _closed(room), (*_ALL, "convert")),
        "SIGCHLD is ignored": (_ignored(signal.SIGCHLD), (*_ALL, "sim", "train with graphs")),
        "SIGINT, SIGHUP and SIGTERM are ignored": (
            _ignored(signal.SIGINT, signal.SIGHUP, signal.SIGTERM),
            ("pretrain", "train on 2", "plan"),
        ),
        "all signals are blocked": (
            lambda: signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals()),
            ("pretrain", "preprocess", "train on 2", "plan"),
        ),
        "a stack without a limit": (
            _limit(resource.RLIMIT_STACK, resource.RLIM_INFINITY),
            ("pretrain", "train on 2"),
        ),
        "no locked memory, no message queues": (
            lambda: [_limit(each, 0)() for each in (resource.RLIMIT_MEMLOCK, resource.RLIMIT_MSGQUEUE)],
            ("pretrain",),
        ),
        "no queued signals": (_limit(resource.RLIMIT_SIGPENDING, 0), ("pretrain", "plan")),
        "data of 1 GiB": (_limit(resource.RLIMIT_DATA, 1 << 30), ("pretrain", "train on 2")),
    }


def _unshared(what: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(what):
        raise OSError(ctypes.get_errno(), "unshare")


def _mounted(*words: str) -> Prepare:
    def prepare() -> None:
        _unshared(_NEW_MOUNTS)
        rooms.mount(*words)

    return prepare


def _read_only(*paths: Path) -> Prepare:
    def prepare() -> None:
        _unshared(_NEW_MOUNTS)
        for path in paths:
            rooms.mount("--bind", str(path), str(path))
            rooms.mount("-o", "remount,bind,ro", str(path))
        os.chdir(paths[0])

    return prepare


def _nameless() -> None:
    _unshared(_NEW_HOST)
    name = b"no-such-host-anywhere"
    ctypes.CDLL(None).sethostname(name, len(name))


def _removed(room: Room) -> None:
    folder = room.folder / "gone"
    folder.mkdir()
    os.chdir(folder)
    folder.rmdir()


def _closed(room: Room) -> None:
    folder = room.folder / "closed"
    folder.mkdir(exist_ok=True)
    folder.chmod(0)
    os.chdir(folder)


def _ignored(*numbers: int) -> Prepare:
    return lambda: [signal.signal(number, signal.SIG_IGN) for number in numbers]


def _limit(what: int, most: int) -> Prepare:
    return lambda: resource.setrlimit(what, (most, most))


_VARIABLES: dict[str, tuple[str, dict[str, str | None], str]] = {
    "PYTHONWARNINGS=error": ("pretrain", {"PYTHONWARNINGS": "error"}, EITHER),
    "PYTHONWARNINGS=error, generate": ("generate", {"PYTHONWARNINGS": "error"}, EITHER),
    "PYTHONOPTIMIZE=2": ("pretrain", {"PYTHONOPTIMIZE": "2"}, EITHER),
    "PYTHONOPTIMIZE=2, train": ("train on 2", {"PYTHONOPTIMIZE": "2"}, EITHER),
    "PYTHONOPTIMIZE=2, plan": ("plan", {"PYTHONOPTIMIZE": "2"}, EITHER),
    "PYTHONDEVMODE=1": ("generate", {"PYTHONDEVMODE": "1"}, EITHER),
    # not PYTHONINSPECT: Python itself shows the exit of any program as a traceback, and then a prompt
    "PYTHONINTMAXSTRDIGITS=0": ("checkpoint", {"PYTHONINTMAXSTRDIGITS": "0"}, EITHER),
    "PYTHONUNBUFFERED=1": ("train on 2", {"PYTHONUNBUFFERED": "1"}, EITHER),
    "PYTHONNOUSERSITE and PYTHONSAFEPATH": (
        "pretrain",
        {"PYTHONSAFEPATH": "1", "PYTHONNOUSERSITE": "1"},
        EITHER,
    ),
    "C++ stacks": ("pretrain", {"TORCH_SHOW_CPP_STACKTRACES": "1"}, EITHER),
    "TORCH_DISTRIBUTED_DEBUG=DETAIL": ("train on 2", {"TORCH_DISTRIBUTED_DEBUG": "DETAIL"}, EITHER),
    "TORCH_LOGS=evil": ("generate", {"TORCH_LOGS": "evil"}, EITHER),
    "GLOO_SOCKET_IFNAME=evil0": ("train on 2", {"GLOO_SOCKET_IFNAME": "evil0"}, EITHER),
    "GLOO_SOCKET_IFNAME=evil0, alone": ("pretrain", {"GLOO_SOCKET_IFNAME": "evil0"}, EITHER),
    "CUDA_VISIBLE_DEVICES=evil": ("train on 2", {"CUDA_VISIBLE_DEVICES": "evil"}, EITHER),
    "OMP_NUM_THREADS=0": ("pretrain", {"OMP_NUM_THREADS": "0"}, EITHER),
    "MKL_NUM_THREADS=abc": ("generate", {"MKL_NUM_THREADS": "abc"}, EITHER),
    "TZ=:/dev/zero": ("pretrain", {"TZ": ":/dev/zero"}, EITHER),
    "LC_ALL=xx_YY": ("preprocess", {"LC_ALL": "xx_YY.UTF-8"}, EITHER),
    "no name of the user": ("train with graphs", {"USER": None, "LOGNAME": None, "HOME": "/nowhere"}, EITHER),
    "no variables but PATH": (
        "pretrain",
        dict.fromkeys(("HOME", "TMPDIR", "USER", "LANG", "OMP_NUM_THREADS"), None),
        EITHER,
    ),
    "TORCH_DEVICE_BACKEND_AUTOLOAD=0": ("train on 2", {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}, EITHER),
    "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD=1": ("generate", {"TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD": "1"}, REFUSED),
    "TORCHELASTIC_RUN_ID without a launcher": ("generate", {"TORCHELASTIC_RUN_ID": "x"}, EITHER),
    "TORCHELASTIC_USE_AGENT_STORE without one": (
        "pretrain",
        {
            **{"TORCHELASTIC_USE_AGENT_STORE": "True", "RANK": "0", "WORLD_SIZE": "1"},
            **{"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "9"},
        },
        DONE,  # one rank meets nobody
    ),
    "MASTER_ADDR of no host": (
        "pretrain",
        {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "evil.invalid", "MASTER_PORT": "29519"},
        REFUSED,
    ),
    "LOCAL_WORLD_SIZE=0": ("pretrain", {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "0"}, EITHER),
}


def _modes(room: Room, found: dict[str, list[str]]) -> Iterator[Later]:
    """Yield commands without a umask; others may write to nothing that they leave."""
    for command in ("pretrain", "train on 2", "preprocess", "convert", "train with graphs"):
        make = functools.partial(_open_files, room, command, found[command])
        yield Later(f"{command}: umask 0, modes", make)


def _open_files(room: Room, command: str, words: list[str]) -> Verdict:
    cache = room.folder / f"cache-of-{command}".replace(" ", "-")
    cache.mkdir(exist_ok=True)
    room.give(cache, room.user)
    variables = {"XDG_CACHE_HOME": str(cache)}
    what = f"{command}: umask 0, modes"
    given = Try(_PLACE, what, words, DONE, variables=variables, prepare=lambda: os.umask(0), limit=300)
    done = made(room, given)
    written = [*cache.rglob("*"), *room.temporary.rglob("*")]
    opened = [str(path) for path in written if _is_open(path)]
    verdict = "silent" if opened and done.verdict == "done" else done.verdict
    return done._replace(
        verdict=verdict, told=f"{len(written)} files, open: {opened[:20]}; {done.told[-500:]}"
    )


def _is_open(path: Path) -> bool:
    """Return whether others may write to a file or folder."""
    status = path.lstat()
    return not stat.S_ISLNK(status.st_mode) and bool(status.st_mode & 0o002)
