"""Check the file modes that document 003 requires: 640 for files, 750 for folders."""

from __future__ import annotations

import stat
from collections.abc import Iterable
from pathlib import Path


def assert_all(paths: Iterable[Path], *patterns: str) -> None:
    """Assert that no path has a wider mode, and that each pattern matches at least one file."""
    paths = list(paths)
    for pattern in patterns:
        assert any(path.match(pattern) for path in paths), f"no {pattern} was written"
    for path in paths:
        mode = stat.S_IMODE(path.stat().st_mode)
        assert mode == (0o750 if path.is_dir() else 0o640), f"{path} has {mode:o}"
