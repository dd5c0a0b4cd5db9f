"""Replace pickle in upstream modules that store pickled arrays, so that only plain data is constructed.

The data are numbers, strings, dicts and arrays. This module replaces pickle in the globals of those modules;
all other names are pickle's own.
"""

from __future__ import annotations

import io
import pickle
from typing import IO, Any

from megatron_npu.base.errors import UsageError
from megatron_npu.safe_files import checked_numpy
from megatron_npu.safe_files.data_unpickler import DataUnpickler

_ALLOWED = {name: value for value, name in checked_numpy.ENTRIES}


class _ArrayUnpickler(DataUnpickler):
    """Unpickler that constructs numpy values after checking them."""

    def find_class(self, module: str, name: str) -> Any:
        """Return the checked replacement for a name of numpy.

        Raises:
            UnpicklingError: the file names something else.
        """
        try:
            return _ALLOWED[f"{module}.{name}"]
        except KeyError:
            raise pickle.UnpicklingError(f"the pickle refers to {module}.{name}") from None

    def check_change(self, made: Any) -> None:
        """Check that state is set only on the replacements of numpy objects.

        Raises:
            UnpicklingError: ``made`` is something else.
        """
        if not isinstance(made, (checked_numpy.CheckedArray, checked_numpy.CheckedDtype)):
            raise pickle.UnpicklingError(
                f"the pickle sets attributes of a {type(made).__name__}, which is not a numpy array or dtype"
            )


def __getattr__(name: str) -> Any:
    return getattr(pickle, name)


def load(stream: IO[bytes]) -> Any:
    """Load an object as ``pickle.load`` does, but construct only data.

    Raises:
        UsageError: the file is damaged, or names other classes or functions.
    """
    try:
        return _ArrayUnpickler(io.BytesIO(stream.read())).load()
    except OSError:
        raise
    except Exception as error:  # a broken pickle raises whatever it stumbles over
        reason = str(error).partition("\n")[0] or type(error).__name__
        raise UsageError(
            f"{getattr(stream, 'name', 'a pickle')} cannot be loaded safely: {reason[:1000]}; only "
            "numbers, strings and numpy arrays are accepted",
            remedy="The file was not loaded, because other types can execute code and Megatron does not "
            "write them.",
        ) from error
