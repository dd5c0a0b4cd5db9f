"""Python's garbage collector at rest while a command imports its modules and builds its model.

What comes into being then lives as long as the process. The collector looks through it again and again all
the same, which takes about a tenth of the time to the first step.
"""

from __future__ import annotations

import gc
import sys

_resting = False


def rest() -> None:
    """Stop the collector until :func:`resume`, in a process that has not imported torch yet.

    Elsewhere, as in a test's process, other objects than this command's are there that may become garbage.
    """
    global _resting
    if "torch" not in sys.modules and gc.isenabled():
        gc.disable()
        _resting = True


def resume() -> None:
    """Start what :func:`rest` has stopped, if it has; what is there by now is not looked through again."""
    global _resting
    if _resting:
        gc.freeze()
        gc.enable()
        _resting = False
