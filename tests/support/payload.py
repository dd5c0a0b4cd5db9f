"""Pickles with harmful content, which leave a mark if they are unpickled without restrictions."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path


class Calls:
    """Calls a function when it is unpickled; a reader that rejects it names that function."""

    def __init__(self, function: Callable[..., object], *given: object) -> None:
        self.call = function, given

    def __reduce__(self):
        return self.call


class Runs(Calls):
    """Creates a folder when it is unpickled; a reader that rejects it names ``posix.mkdir``."""

    def __init__(self, path: str | Path) -> None:
        super().__init__(os.mkdir, str(path))
