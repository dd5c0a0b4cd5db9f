"""Find the line of the program that a planned rank executes, and the function that called a collective."""

from __future__ import annotations

import sys
import traceback
from types import FrameType
from typing import Any

# frames between upstream's function and a collective: planning.rank, the device's redirects, torch's logging
_FRAMES = 8
# of files whose lines are nobody's program: torch's, and ours that stand between a program and torch
_BELOW = (
    *("/torch/", "/torch_npu/", "megatron_npu/planning", "megatron_npu/sim", "<"),
    *("megatron_npu/devices/redirect", "megatron_npu/patching"),
)


def asking_line() -> str:
    """Return the line of the program, outside torch, that is currently being executed."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if not any(part in frame.f_code.co_filename for part in _BELOW):
            return f"{frame.f_code.co_filename}:{frame.f_lineno}"
        frame = frame.f_back
    return "torch"


def calling_lines(operation: str) -> list[dict[str, Any]]:
    """Return the operation and the calling lines of the program outside torch, in the format of a memory
    snapshot.
    """
    lines: list[dict[str, Any]] = [{"filename": "", "line": 0, "name": operation}]
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if not any(part in code.co_filename for part in _BELOW):
            lines.append({"filename": code.co_filename, "line": frame.f_lineno, "name": code.co_name})
        frame = frame.f_back
    return lines


def failing_line(error: BaseException) -> str:
    """Return the innermost line of the program, outside torch, at which an error was raised."""
    lines = [
        f"{frame.f_code.co_filename}:{number}"
        for frame, number in traceback.walk_tb(error.__traceback__)
        if not any(part in frame.f_code.co_filename for part in _BELOW)
    ]
    return lines[-1] if lines else "torch"


def nearest(name: str, frame: FrameType | None) -> FrameType | None:
    """Return the frame of the function ``name``, which is ``frame`` or shortly above it, or None."""
    for _ in range(_FRAMES):
        if frame is None or frame.f_code.co_name == name:
            return frame
        frame = frame.f_back
    return None
