"""Working directories, caches, limits, streams and variables of the environment."""

from __future__ import annotations

import os
import resource
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from tests.campaign import strangers
from tests.campaign.accounts.rooms import Room
from tests.campaign.accounts.samples import Samples
from tests.campaign.accounts.trials import DONE, EITHER, REFUSED, Try

_PLACE = "environment"
_RESULTS = "saved fine graphs hf"  # folders that the commands write
_PROGRAMS = (
    "g++ c++ gcc cc clang clang++ ld as ninja cmake git nvcc ldconfig file uname nvidia-smi npu-smi lscpu sh"
)


def tries(room: Room) -> Iterator[Try]:
    """Yield commands in a stranger's folder, and with settings of all kinds."""
    for each in _tries(room):
        remove_results(room)
        yield each


def remove_results(room: Room) -> None:
    """Remove what an earlier trial has written, so that the next one is not refused for it."""
    for name in _RESULTS.split():
        shutil.rmtree(room.temporary / name, ignore_errors=True)


def _tries(room: Room) -> Iterator[Try]:
    samples = Samples(room)
    folder = hostile(room)
    found = commands(samples)
    for name, words in found.items():
        expected = EITHER if name == "doctor" else DONE  # which advises against a second copy of the package
        yield Try(_PLACE, f"{name}: a stranger's working directory", words, expected, cwd=folder, limit=300)
    for name, variables in _of_folder(folder).items():
        for command in ("pretrain", "generate"):
            what = f"{command}: {name} of another account"
            yield Try(_PLACE, what, found[command], EITHER, cwd=folder, variables=variables, limit=300)
    for command in ("train with graphs", "bench graph"):  # these compile
        path = {"PATH": os.pathsep.join((".", "", room.environment()["PATH"]))}
        what = f"{command}: a folder with compilers, named by PATH as ."
        yield Try(_PLACE, what, found[command], EITHER, cwd=folder, variables=path, limit=500)
    for name, (command, variables, expected) in VARIABLES.items():
        words = found[command]
        yield Try(_PLACE, f"{command}: {name}", words, expected, variables=variables, limit=300)
    for name, (command, prepare, closed) in LIMITS.items():
        words = found[command]
        yield Try(_PLACE, f"{command}: {name}", words, EITHER, prepare=prepare, closed=closed, limit=300)


def hostile(room: Room) -> Path:
    """Make a folder in which every module, program and settings file leaves a mark."""
    folder = room.evil / "working"
    mark = room.mark("working directory")
    shutil.rmtree(folder, ignore_errors=True)
    strangers.hostile(folder, mark)
    for name in _PROGRAMS.split():
        (folder / name).write_text(f"#!/bin/sh\n: > '{mark}'\nexit 1\n")
    statement = f"import os; os.close(os.open({str(mark)!r}, os.O_CREAT | os.O_WRONLY))\n"
    for name in ("start.py", "setup.py", "conftest.py", "__main__.py", ".pdbrc", "wandb_settings.py"):
        (folder / name).write_text(statement)
    for name in ("torch", "megatron", "megatron_npu", "transformers", "lm_eval", "evil_package"):
        shutil.rmtree(folder / name, ignore_errors=True)
        (folder / name).mkdir()
        for file in ("__init__.py", "__main__.py"):
            (folder / name / file).write_text(statement)
    (folder / "setup.cfg").write_text("[tool]\n")
    (folder / "pyproject.toml").write_text(
        "[build-system]\nrequires=[]\nbuild-backend='evil'\nbackend-path=['.']\n"
    )
    (folder / "torchinductor_root").mkdir()
    (folder / "evil.pth").write_text(f"import os; {statement}")
    room.give(folder)
    for name in _PROGRAMS.split():
        (folder / name).chmod(0o755)
    return folder


def commands(samples: Samples) -> dict[str, list[str]]:
    """Return the commands that meet these folders and settings."""
    room = samples.room
    fine = ["train", "--user-script", str(strangers._SCRIPT), *strangers._TRAIN.split(), "--save"]
    bench = ["bench", "--suite", "graph", *strangers._BENCH.split()]
    plan = ["plan", "--devices", "2", "--device", "cuda", "--html", str(room.temporary / "plan.html")]
    pictures = [word for word in samples.pretrain() if word != "--no-plot"]
    return {
        "pretrain": [*pictures, "--save", str(room.temporary / "saved")],
        "generate": samples.generate(),
        "doctor": ["doctor", "--json"],
        "lambada": [*samples.lambada(), "--valid-data", str(samples.passages)],
        "preprocess": samples.preprocess("--input", str(samples.lines), "--workers", "2"),
        "convert": samples.export("hf", "--proof", "tensors"),
        "checkpoint": ["checkpoint", "verify", str(samples.checkpoint)],
        "data": ["data", "inspect", str(samples.dataset)],
        "patches": ["patches", "check"],
        "plan": [*plan, "--", *samples.pretrain()],
        "train": [*fine, str(room.temporary / "fine")],
        "train with graphs": [*fine, str(room.temporary / "graphs"), "--graph-optimization"],
        "bench graph": bench,
        "sim": ["sim", "--", sys.executable, "-P", "-c", "import torch"],
    }


def _of_folder(folder: Path) -> dict[str, dict[str, str | None]]:
    there = str(folder)
    names = (
        *("TMPDIR", "HOME", "XDG_CACHE_HOME", "TORCHINDUCTOR_CACHE_DIR", "MPLCONFIGDIR", "HF_HOME"),
        *("HF_MODULES_CACHE", "TRITON_CACHE_DIR", "TORCH_EXTENSIONS_DIR", "TORCH_HOME", "PYTHONUSERBASE"),
        *(
            "MEGATRON_LM_PATH",
            "XDG_CONFIG_HOME",
            "XDG_DATA_HOME",
            "WANDB_DIR",
            "NUMBA_CACHE_DIR",
            "CUDA_HOME",
        ),
    )
    return {name: {name: there} for name in names}


Limit = Callable[[], object] | None


def _limit(what: int, most: int) -> Limit:
    return lambda: resource.setrlimit(what, (most, most))


def _full(number: int) -> Limit:
    return lambda: os.dup2(os.open("/dev/full", os.O_WRONLY), number)


_PLAIN = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "LANG": None}
_RANK = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
VARIABLES: dict[str, tuple[str, dict[str, str | None], str]] = {
    "TMPDIR missing": ("generate", {"TMPDIR": "/nowhere"}, EITHER),
    "HOME missing": ("pretrain", {"HOME": "/nowhere"}, EITHER),
    "HOME unset": ("generate", {"HOME": None}, EITHER),
    "HOME empty": ("generate", {"HOME": ""}, EITHER),
    "HOME relative": ("generate", {"HOME": "."}, EITHER),
    "XDG_CACHE_HOME relative": ("pretrain", {"XDG_CACHE_HOME": "."}, EITHER),
    "locale C without UTF-8": ("generate", _PLAIN, EITHER),
    "PYTHONIOENCODING=ascii": ("generate", {"PYTHONIOENCODING": "ascii"}, EITHER),
    "OMP_NUM_THREADS=abc": ("generate", {"OMP_NUM_THREADS": "abc"}, EITHER),
    "OMP_NUM_THREADS=10^9": ("generate", {"OMP_NUM_THREADS": "1000000000"}, EITHER),
    "MEGATRON_NPU_WATCHDOG=nan": ("generate", {"MEGATRON_NPU_WATCHDOG": "nan"}, REFUSED),
    "MEGATRON_NPU_WATCHDOG=1e400": ("generate", {"MEGATRON_NPU_WATCHDOG": "1e400"}, REFUSED),
    "RANK=abc": ("pretrain", {"RANK": "abc"}, REFUSED),
    "LOCAL_RANK=x": ("generate", {"RANK": "", "LOCAL_RANK": "x"}, EITHER),
    "WORLD_SIZE=-1": ("pretrain", {**_RANK, "WORLD_SIZE": "-1", "MASTER_PORT": "29501"}, REFUSED),
    # one rank meets nobody, so it does not matter what another program has named a port of a master
    "MASTER_PORT=99999": ("pretrain", {**_RANK, "MASTER_PORT": "99999"}, DONE),
    "MASTER_PORT=99999, two ranks": (
        "pretrain",
        {**_RANK, "WORLD_SIZE": "2", "MASTER_PORT": "99999"},
        REFUSED,
    ),
    "MASTER_PORT empty": ("pretrain", {**_RANK, "MASTER_PORT": ""}, EITHER),
    "MEGATRON_NPU_DEVICE=evil": ("generate", {"MEGATRON_NPU_DEVICE": "evil;x"}, REFUSED),
    "COLUMNS=nan": ("doctor", {"COLUMNS": "nan"}, EITHER),
    "PYTHONPATH empty": ("doctor", {"PYTHONPATH": ":"}, EITHER),
    "TERM with escapes": ("doctor", {"TERM": "\x1b[2J"}, EITHER),
    "CXX of nothing": ("train with graphs", {"CXX": "/nowhere/g++"}, EITHER),
    "PATH empty": ("pretrain", {"PATH": ""}, EITHER),
    "WANDB_MODE=evil": ("pretrain", {"WANDB_MODE": "evil"}, EITHER),
    "MEGATRON_NPU_STRICT=2": ("generate", {"MEGATRON_NPU_STRICT": "2"}, EITHER),
    "HF_ENDPOINT of another": ("generate", {"HF_ENDPOINT": "http://127.0.0.1:9"}, EITHER),
}
LIMITS: dict[str, tuple[str, Limit, tuple[int, ...]]] = {
    "standard input closed": ("generate", None, (0,)),
    "standard output closed": ("generate", None, (1,)),
    "standard error closed": ("generate", None, (2,)),
    "all streams closed": ("pretrain", None, (0, 1, 2)),
    "standard output is full": ("generate", _full(1), ()),
    "standard error is full": ("pretrain", _full(2), ()),
    "umask 0": ("pretrain", lambda: os.umask(0), ()),
    "umask 777": ("preprocess", lambda: os.umask(0o777), ()),
    "ulimit -n 16": ("generate", _limit(resource.RLIMIT_NOFILE, 16), ()),
    "ulimit -n 40": ("pretrain", _limit(resource.RLIMIT_NOFILE, 40), ()),
    "ulimit -n 64": ("preprocess", _limit(resource.RLIMIT_NOFILE, 64), ()),
    "ulimit -v 700M": ("generate", _limit(resource.RLIMIT_AS, 700 << 20), ()),
    "ulimit -v 3G": ("pretrain", _limit(resource.RLIMIT_AS, 3 << 30), ()),
    "ulimit -f 0": ("pretrain", _limit(resource.RLIMIT_FSIZE, 0), ()),
    "ulimit -f 20K": ("pretrain", _limit(resource.RLIMIT_FSIZE, 20_000), ()),
    "ulimit -f 2K": ("convert", _limit(resource.RLIMIT_FSIZE, 2000), ()),
    "ulimit -u 1": ("generate", _limit(resource.RLIMIT_NPROC, 1), ()),
    "ulimit -u 1, workers": ("preprocess", _limit(resource.RLIMIT_NPROC, 1), ()),
    "ulimit -s 128K": ("generate", _limit(resource.RLIMIT_STACK, 128 << 10), ()),  # Python needs 128
}
