"""Read pickle files that contain only plain data.

The C unpickler can also set state on classes and enumerations, which changes them for the whole process
(``PosixPath._str`` determines what every path prints); and (up to 3.14) it allocates a memo table as long as
the largest memo number, so six bytes of a file can allocate 26 GB.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any, ClassVar


class DataUnpickler(pickle._Unpickler):
    """Base class of the pickle readers in this package.

    ``find_class`` limits what a file may build, and ``check_change`` its changes.
    """

    stack: list[Any]
    dispatch: ClassVar[dict[int, Callable[..., None]]] = {**pickle._Unpickler.dispatch}
    del dispatch[pickle.BYTEARRAY8[0]]  # takes as much memory as the file says; nobody writes one

    def check_change(self, made: Any) -> None:
        """Raise an error unless this file has created ``made``, because it may set only the state of its
        own objects.
        """
        raise NotImplementedError

    def load_build(self) -> None:
        """Set the state of an object that this file has created."""
        self.check_change(self.stack[-2])
        super().load_build()  # type: ignore[misc]  # typeshed does not know it

    dispatch[pickle.BUILD[0]] = load_build
