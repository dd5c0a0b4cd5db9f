"""The process that has started this rank: torchrun's, that of `train`, accelerate's."""

from __future__ import annotations

import os
import sys

import psutil

_RUN = "TORCHELASTIC_RUN_ID"  # what the agent tells its ranks


def find() -> psutil.Process | None:
    """Return the nearest ancestor that is no part of the run: shells may stand between it and the rank.

    None where nobody, or another launcher, has started this process, and where no process can be looked at.
    """
    run = os.environ.get(_RUN)
    if run is None or not sys.platform.startswith("linux"):
        return None
    try:
        return next((each for each in psutil.Process().parents() if each.environ().get(_RUN) != run), None)
    except (psutil.Error, OSError):
        return None
