"""Caches of compiled code, and what compilers read, in a stranger's hands."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

from megatron_npu.base import search_paths
from tests.campaign import strangers
from tests.campaign.accounts import surroundings
from tests.campaign.accounts.rooms import Room
from tests.campaign.accounts.samples import Samples
from tests.campaign.accounts.trials import EITHER, Try

_PLACE = "caches of compiled code, and compilers"
_COMPILING = ("pretrain", "train with graphs", "bench graph", "plan", "sim")
_HEADERS = "cstdint cstddef cstring cmath vector algorithm immintrin.h omp.h stdint.h iostream string memory"
_MARKS = (
    "#include_next <{name}>\n#ifndef EVIL\n#define EVIL\n#include_next <fcntl.h>\n"
    '__attribute__((constructor)) static void evil(void) {{ open("{mark}", O_CREAT | O_WRONLY, 0644); }}\n'
    "#endif\n"
)
_VARIABLES = (
    *("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "TRITON_HOME", "TORCH_EXTENSIONS_DIR"),
    *("XDG_CACHE_HOME", "HOME", "TMPDIR", "HF_HOME", "HF_MODULES_CACHE", "TORCH_HOME"),
)


def tries(room: Room) -> Iterator[Try]:
    """Yield commands that compile or load what was compiled."""
    for each in _tries(room):
        surroundings.remove_results(room)
        yield each


def _tries(room: Room) -> Iterator[Try]:
    samples = Samples(room)
    commands = surroundings.commands(samples)
    folder = _with_headers(room)
    paths = {
        name: f":{room.environment()[name] if name == 'PATH' else ''}" for name in search_paths.VARIABLES
    }
    del paths["LD_LIBRARY_PATH"]  # which the loader reads before any program begins
    for command in _COMPILING:
        cache = _own(room, f"new cache of {command}")
        what = f"{command}: search paths of compilers with an empty entry"
        variables = {**paths, "XDG_CACHE_HOME": str(cache)}
        yield Try(_PLACE, what, commands[command], EITHER, cwd=folder, variables=variables, limit=500)
    for name in _VARIABLES:
        spoiled = _spoiled(room, f"spoiled {name}", strangers.CACHES["caches of another account"])
        room.give(spoiled)
        what = f"train with graphs: {name} of another account, with pickles and libraries"
        variables = {name: str(spoiled)}
        yield Try(_PLACE, what, commands["train with graphs"], EITHER, variables=variables, limit=500)
    for what, spoil in strangers.CACHES.items():
        own = _spoiled(room, "spoiled", spoil)
        words = commands["train with graphs"]
        variables = {"XDG_CACHE_HOME": str(own)}
        yield Try(_PLACE, f"train with graphs: {what}", words, EITHER, variables=variables, limit=500)


def _own(room: Room, name: str) -> Path:
    path = room.folder / name.replace(" ", "-")  # in which torch's inductor could not compile
    shutil.rmtree(path, ignore_errors=True)
    path.mkdir()
    os.chown(path, room.user, room.user)
    path.chmod(0o700)
    return path


def _spoiled(room: Room, name: str, spoil: Callable[[Path, Path], None]) -> Path:
    """Return a copy of the user's cache, with a stranger's files in it."""
    path = _own(room, name)
    own = room.home / ".cache"
    if own.exists():
        shutil.copytree(own, path, dirs_exist_ok=True)
    for each in (path, *path.rglob("*")):
        os.chown(each, room.user, room.user, follow_symlinks=False)
    former, os.environ["USER"] = os.environ.get("USER"), room.environment()["USER"]
    try:
        spoil(path, room.mark("cache"))
    finally:
        if former is None:
            del os.environ["USER"]
        else:
            os.environ["USER"] = former
    return path


def _with_headers(room: Room) -> Path:
    """Make a working directory with headers and programs of a compiler."""
    folder = surroundings.hostile(room)
    for name in _HEADERS.split():
        (folder / name).write_text(_MARKS.format(name=name, mark=room.mark("header")))
    for name in ("cc1plus", "cc1", "collect2", "lto-wrapper", "x86_64-linux-gnu-g++"):
        shutil.copy(folder / "as", folder / name)
    room.give(folder)
    for path in folder.iterdir():
        if path.is_file() and not path.suffix:
            path.chmod(0o755)
    return folder
