"""The modes that document 003 asks for: files 640, folders 750."""

from __future__ import annotations

import stat
from collections.abc import Iterable
from pathlib import Path


def assert_all(paths: Iterable[Path], *patterns: str) -> None:
    """Assert that no path is more open than that, and that for each pattern there is a file among them."""
    paths = list(paths)
    for pattern in patterns:
        assert any(path.match(pattern) for path in paths), f"no {pattern} was written"
    for path in paths:
        mode = stat.S_IMODE(path.stat().st_mode)
        assert mode == (0o750 if path.is_dir() else 0o640), f"{path} has {mode:o}"
