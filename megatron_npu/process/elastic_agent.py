"""The process that has started this rank: torchrun's, that of `train`, accelerate's."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import psutil

_RUN = "TORCHELASTIC_RUN_ID"  # what the agent tells its ranks
_INIT = 1
_LOOKS = 10


def find() -> psutil.Process | None:
    """Return the nearest ancestor that is no part of the run: shells may stand between it and the rank.

    Where the agent has ended, that is what has adopted its ranks (``has_gone``). None where nobody, or
    another launcher, has started this process, and where no process can be looked at.
    """
    run = os.environ.get(_RUN)
    if run is None or not sys.platform.startswith("linux"):
        return None
    for _ in range(_LOOKS):
        try:
            return next((each for each in psutil.Process().parents() if not _is_of(run, each)), None)
        except psutil.NoSuchProcess:  # one of them has ended in the meantime: this process has others now
            continue
        except (psutil.Error, OSError):
            return None
    return None


def _is_of(run: str, process: psutil.Process) -> bool:
    try:
        return bool(process.environ().get(_RUN) == run)
    except psutil.AccessDenied:
        if process.pid == _INIT:  # whose environment is not for everybody to read
            return False
        raise


def has_gone() -> bool:
    """Return whether the agent that had started this process has ended.

    Its ranks then belong to init, or to whatever the machine has for that, which has not loaded torch.
    """
    found = find()
    if found is None:
        return False
    try:
        return b"libtorch" not in Path(f"/proc/{found.pid}/maps").read_bytes()
    except FileNotFoundError:  # just now
        return True
    except OSError:
        return found.pid == _INIT
