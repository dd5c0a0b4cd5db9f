"""The end of a warm parent's fork, which takes no longer than what the fork itself has made."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import sys
import types
from collections.abc import Iterator

# modules whose globals hold what a run makes
_HOLDING = ("megatron", "torch.distributed", "torch_npu")
_CONSTANT = (
    *(types.FunctionType, types.BuiltinFunctionType, types.ModuleType, type),
    *(str, bytes, int, float, tuple, frozenset),
)
_TABLE = 20  # entries of a table, at least


class Ending:
    """The end of a fork, without what copies the parent's memory in vain: most of a short process's time.

    Threads, ``atexit``, standard files, the modules that the fork has imported itself and all that they hold
    end as in any interpreter. So does what a run has put into the globals of ``_HOLDING``. The functions and
    classes of the parent's modules are not cleared, nor are the types and names of the interpreter.
    """

    def __init__(self) -> None:
        self._kept: dict[str, types.ModuleType] = {}
        self._cleared = ["__main__", "builtins", "sys"]
        self._held = types.ModuleType("what a run has made")  # what ends with it
        self._last = ""
        self._status: int | None = None
        atexit.register(self._keep_the_libraries)

    def know_modules(self) -> None:
        """Take what is imported for the parent's."""
        self._kept = {name: each for name, each in sys.modules.items() if name not in self._cleared}
        self._last = [*sys.modules][-1]
        holding = [each for name, each in self._kept.items() if name.startswith(_HOLDING)]
        vars(self._held)["globals"] = _Globals(holding)
        self._kept[self._held.__name__] = self._held  # so that it ends after the fork's own modules

    def leave(self) -> None:
        """Leave the end of this process to another one, of the parent that it becomes."""
        atexit.unregister(self._keep_the_libraries)
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(self))

    @contextlib.contextmanager
    def status_known(self) -> Iterator[None]:
        """Record the exit status with which the interpreter will end."""
        try:
            yield
        except SystemExit as end:
            if end.code is None or isinstance(end.code, int):
                self._status = end.code or 0
            raise  # anything else is printed, as errors are, on a longer way
        self._status = 0

    def _keep_the_libraries(self) -> None:
        """Leave to the interpreter only the modules that it is to clear; called behind all ``atexit``."""
        gc.collect()  # what is garbage may still import
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._kept))
        rest = {self._held.__name__: self._held}  # the first one is cleared last
        rest |= {name: sys.modules[name] for name in self._cleared if name in sys.modules}
        for name in reversed(sys.modules):  # the fork's are the last ones
            if name == self._last:
                break
            rest[name] = sys.modules[name]
        sys.modules.clear()
        sys.modules.update(rest)
        with contextlib.suppress(Exception):  # what cannot be written changes the status, on the longer way
            sys.stdout.flush()
            if self._status is not None:
                sys._end = _End(self._status)  # type: ignore[attr-defined]


class _Globals:
    """Clears the globals of modules that may hold what a run has made, when it is destroyed.

    These are the names that have been added since, and those of anything but functions, classes, constants
    and tables. To clear all would copy much of the parent's memory.
    """

    def __init__(self, modules: list[types.ModuleType]) -> None:
        self._modules = []
        for module in modules:
            values = vars(module)
            names = [name for name, value in values.items() if name[:2] != "__" and not _is_constant(value)]
            self._modules.append((values, frozenset(values), names))
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._modules))  # nobody has to take it apart

    def __del__(self) -> None:
        for values, known, names in self._modules:
            added = values.keys() - known if len(values) != len(known) else ()
            for name in (*names, *added):
                if values.get(name) is not None:
                    values[name] = None


def _is_constant(value: object) -> bool:
    """Return whether a global is taken for something that no run changes; torch's operators are, too."""
    if isinstance(value, dict | list | set):
        return len(value) > _TABLE
    return isinstance(value, _CONSTANT) or type(value).__module__ in ("torch.library", "typing", "__future__")


class _End:
    """Ends the process when it is destroyed."""

    def __init__(self, status: int) -> None:
        self._status = status
        self._collect = gc.collect  # names are gone by then
        self._exit = ctypes.PyDLL(None).exit  # it keeps the lock of the interpreter

    def __del__(self) -> None:
        self._collect()
        self._exit(self._status)


def end_before_the_libraries() -> None:
    """Let a fork's end leave out the destructors of the libraries that the parent has loaded.

    torch's take all its operators apart, which is half of the time of a short process. All else of an end
    comes before: Python's threads, ``atexit`` and modules, the destructors of what is loaded later.
    """
    libc = ctypes.CDLL(None)
    libc.on_exit(libc._exit, None)  # with the status; called before what has been there
    getattr(libc, "__cxa_atexit")(libc.fflush, None, None)  # and this before: what C has buffered
