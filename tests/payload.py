"""What a stranger's pickle may hold: ``Runs`` leaves a mark where it is unpickled without restraint."""

from __future__ import annotations

import os
from pathlib import Path


class Runs:
    """Makes a folder when it is unpickled; a reader that refuses it names ``posix.mkdir``."""

    def __init__(self, path: str | Path) -> None:
        self.path = str(path)

    def __reduce__(self):
        return os.mkdir, (self.path,)
