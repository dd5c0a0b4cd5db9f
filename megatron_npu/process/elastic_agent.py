"""Find the launcher process that started this rank: torchrun, ``train`` or accelerate."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import psutil

_RUN = "TORCHELASTIC_RUN_ID"  # what the agent tells its ranks
_INIT = 1
_LOOKS = 10


def find() -> psutil.Process | None:
    """Return the nearest ancestor process that does not belong to the run.

    Shells between the launcher and the rank are skipped.

    If the agent has ended, this is the process that adopted its ranks (``has_gone``). The result is None if
    no launcher, or an unknown one, started this process, or if processes cannot be inspected.
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
    """Return True if the launcher that started this process has exited.

    Its ranks then belong to init or an equivalent process, which has not loaded torch.
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
