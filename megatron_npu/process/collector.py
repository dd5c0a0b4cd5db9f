"""Pause Python's garbage collector while a command imports its modules and builds its model.

These objects live as long as the process. Without the pause, the collector scans them repeatedly, which takes
about a tenth of the time to the first step.
"""

from __future__ import annotations

import gc
import sys

_resting = False


def rest() -> None:
    """Stop Python's garbage collector until :func:`resume` is called, unless torch is already imported.

    Other processes, such as a test's, may contain objects that can become garbage.
    """
    global _resting
    if "torch" not in sys.modules and gc.isenabled():
        gc.disable()
        _resting = True


def resume() -> None:
    """Restart the garbage collector if :func:`rest` stopped it, without scanning existing objects again."""
    global _resting
    if _resting:
        gc.freeze()
        gc.enable()
        _resting = False
