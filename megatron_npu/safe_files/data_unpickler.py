"""A pickle reader that builds only plain data.

C's gives a state to classes and enumerations too, and so changes them for the whole process
(``PosixPath._str`` is what every path says of itself); and it makes a table (to 3.14) as long as the largest
number that a value is remembered by: six bytes of a file are 26 GB.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any, ClassVar


class DataUnpickler(pickle._Unpickler):
    """Base of readers that say in ``find_class`` what a file may build, and in ``check_change`` on what."""

    stack: list[Any]
    dispatch: ClassVar[dict[int, Callable[..., None]]] = {**pickle._Unpickler.dispatch}
    del dispatch[pickle.BYTEARRAY8[0]]  # takes as much memory as the file says; nobody writes one

    def check_change(self, made: Any) -> None:
        """Raise the reader's error if ``made`` was not created by this file, so its state must not be set."""
        raise NotImplementedError

    def load_build(self) -> None:
        """Give a state to what this file has made."""
        self.check_change(self.stack[-2])
        super().load_build()  # type: ignore[misc]  # typeshed does not know it

    dispatch[pickle.BUILD[0]] = load_build
