"""Check numpy values in a file before they are built.

A checkpoint keeps arrays (the state of numpy's random generator) as calls of numpy's own ``_reconstruct``,
``scalar`` and ``__setstate__``, and torch's reader makes those calls when told that numpy's names are
harmless. They are not: ``numpy.dtype.__setstate__`` takes flags, fields and sizes as they come (numpy 2), and
a changed byte can end the process with a segmentation fault. ``ENTRIES`` are for torch's reader instead.
"""

from __future__ import annotations

import math
import pickle
import re
from typing import Any

import numpy as np

_NUMBERS = re.compile(r"(b1|i[1248]|u[1248]|f(2|4|8|16)|c(8|16|32))")
_BYTE_ORDERS = ("<", ">", "=", "|")


def _check(fits: bool, what: str) -> None:
    if not fits:
        raise pickle.UnpicklingError(
            f"it contains {what}, which is neither a numpy number nor an array of numbers"
        )


class CheckedDtype:
    """Stands for ``numpy.dtype``: one of a kind of numbers, and its byte order.

    Attributes:
        dtype: what it stands for.
    """

    def __init__(self, kind: object, align: object = False, copy: object = True) -> None:
        _check(isinstance(kind, str) and _NUMBERS.fullmatch(kind) is not None, "the dtype " + repr(kind)[:40])
        self.dtype = np.dtype(str(kind))

    def __setstate__(self, state: Any) -> None:
        """Take the byte order of ``(version, byte order, None, None, None, …)``; refuse fields."""
        plain = isinstance(state, tuple) and len(state) >= 5 and state[1] in _BYTE_ORDERS
        _check(plain and not any(field is not None for field in state[2:5]), "a dtype with several fields")
        self.dtype = self.dtype.newbyteorder(state[1])


class CheckedArray(np.ndarray):
    """Stands for ``numpy.ndarray``: numbers, as many as the shape says."""

    def __setstate__(self, state: Any) -> None:
        """Take ``(version, shape, dtype, whether Fortran's order, bytes)``."""
        _check(isinstance(state, tuple) and len(state) == 5, "an array with another layout")
        _, shape, kind, fortran, content = state
        _check(isinstance(shape, tuple) and all(type(size) is int and size >= 0 for size in shape), "a shape")
        _check(isinstance(kind, CheckedDtype) and isinstance(content, bytes), "an array of objects")
        _check(
            len(shape) <= 32 and math.prod(shape) * kind.dtype.itemsize == len(content), "a truncated array"
        )
        super().__setstate__((1, shape, kind.dtype, bool(fortran), content))  # type: ignore[arg-type]

    def __reduce__(self) -> Any:
        """Write a plain array."""
        return self.view(np.ndarray).__reduce__()


def _reconstruct(kind: object, shape: object, dtype: object) -> CheckedArray:
    """Return what ``CheckedArray.__setstate__`` fills."""
    _check(kind is CheckedArray, "an array of an unsupported kind")
    return np.ndarray.__new__(CheckedArray, (0,), np.int8)


def _scalar(kind: Any, content: Any = b"") -> Any:
    """Return the number that these bytes are."""
    _check(isinstance(kind, CheckedDtype) and isinstance(content, bytes), "an object")
    _check(len(content) == kind.dtype.itemsize, "a truncated number")
    return np.frombuffer(content, kind.dtype)[0]


# For torch.serialization.add_safe_globals: what is built, and the name that it has in the file.
ENTRIES: tuple[tuple[Any, str], ...] = (
    (CheckedDtype, "numpy.dtype"),
    (CheckedArray, "numpy.ndarray"),
    *((_reconstruct, f"numpy.{core}.multiarray._reconstruct") for core in ("core", "_core")),
    *((_scalar, f"numpy.{core}.multiarray.scalar") for core in ("core", "_core")),
)
