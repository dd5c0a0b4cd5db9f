"""Check numpy values in a file before they are constructed.

A checkpoint stores arrays (the state of numpy's random generator) as calls of numpy's ``_reconstruct``,
``scalar`` and ``__setstate__``, which torch's reader executes if numpy's names are declared safe. They are
not safe: ``numpy.dtype.__setstate__`` does not check flags, fields and sizes (numpy 2), so a changed byte can
cause a segmentation fault. ``ENTRIES`` replace these functions in torch's reader.
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
            f"the file contains {what}, which is neither a numpy number nor an array of numbers"
        )


class CheckedDtype:
    """Replacement for ``numpy.dtype`` that supports only numeric types and their byte order.

    Attributes:
        dtype: the dtype.
    """

    def __init__(self, kind: object, align: object = False, copy: object = True) -> None:
        _check(isinstance(kind, str) and _NUMBERS.fullmatch(kind) is not None, "the dtype " + repr(kind)[:40])
        self.dtype = np.dtype(str(kind))

    def __setstate__(self, state: Any) -> None:
        """Accept a state ``(version, byte order, None, None, None, …)``, which sets the byte order, and
        reject fields.
        """
        plain = isinstance(state, tuple) and len(state) >= 5 and state[1] in _BYTE_ORDERS
        _check(plain and not any(field is not None for field in state[2:5]), "a dtype with several fields")
        self.dtype = self.dtype.newbyteorder(state[1])


class CheckedArray(np.ndarray):
    """Replacement for ``numpy.ndarray`` that checks that the data has as many values as the shape
    requires.
    """

    def __setstate__(self, state: Any) -> None:
        """Accept a state ``(version, shape, dtype, Fortran order, bytes)``."""
        _check(isinstance(state, tuple) and len(state) == 5, "an array with another layout")
        _, shape, kind, fortran, content = state
        _check(isinstance(shape, tuple) and all(type(size) is int and size >= 0 for size in shape), "a shape")
        _check(isinstance(kind, CheckedDtype) and isinstance(content, bytes), "an array of objects")
        _check(
            len(shape) <= 32 and math.prod(shape) * kind.dtype.itemsize == len(content), "a truncated array"
        )
        super().__setstate__((1, shape, kind.dtype, bool(fortran), content))  # type: ignore[arg-type]

    def __reduce__(self) -> Any:
        """Pickle the array as an ordinary numpy array."""
        return self.view(np.ndarray).__reduce__()


def _reconstruct(kind: object, shape: object, dtype: object) -> CheckedArray:
    """Return an empty array, which ``CheckedArray.__setstate__`` fills."""
    _check(kind is CheckedArray, "an array of an unsupported kind")
    return np.ndarray.__new__(CheckedArray, (0,), np.int8)


def _scalar(kind: Any, content: Any = b"") -> Any:
    """Return the number that the given bytes represent."""
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
