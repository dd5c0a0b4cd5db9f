"""Find the upstream function that called a collective which the planned rank answers without its peers."""

from __future__ import annotations

from types import FrameType

# frames between upstream's function and a collective: planning.rank, the device's redirects, torch's logging
_FRAMES = 8


def nearest(name: str, frame: FrameType | None) -> FrameType | None:
    """Return the frame of the function ``name``, which is ``frame`` or shortly above it, or None."""
    for _ in range(_FRAMES):
        if frame is None or frame.f_code.co_name == name:
            return frame
        frame = frame.f_back
    return None
