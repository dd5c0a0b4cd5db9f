"""Compile the CPU kernels, once per user and compiler, and load the resulting library."""

from __future__ import annotations

import ctypes
import functools
import logging
import platform
from pathlib import Path

from megatron_npu import devices
from megatron_npu.base import settings
from megatron_npu.base.errors import UsageError
from megatron_npu.ops.dispatch import report_fallback
from megatron_npu.process import cached_library, user_cache

SOURCES = tuple(Path(__file__).with_name(name) for name in ("kernels.cpp", "products.cpp", "attention.cpp"))
_HEADERS = tuple(sorted(Path(__file__).parent.glob("*.h")))
# What is left out of IEEE's rules is errno and traps, no value. A product and a sum are rounded once.
_FLAGS = (
    *("-std=c++17", "-O3", "-march=native", "-fopenmp", "-ffp-contract=fast"),
    *("-fno-math-errno", "-fno-trapping-math", "-shared", "-fPIC"),
    *("-Wall", "-Wextra", "-Wno-psabi"),  # of the last: vectors are handed to no code but this
)
_ONLY_X86 = ("-mprefer-vector-width=512",)
_logger = logging.getLogger(__name__)
_WITHOUT = f"set {settings.COMPILED.name}=0"


@functools.cache
def library() -> ctypes.CDLL | None:
    """Return the library of compiled kernels, compiling it first if necessary.

    Return None, and log the reason, if they are disabled or unavailable.

    Raises:
        FallbackForbiddenError: the kernels are unavailable, and strict mode is enabled.
    """
    if not settings.COMPILED.enabled():
        return None
    try:
        return cached_library.load(_recipe())
    except UsageError as error:
        report_fallback("compiled kernels", error.given, does="are not used", remedy=error.remedy)
        _logger.warning("how to use the compiled kernels: %s", error.remedy)
        return None


def prepare() -> None:
    """Compile the kernels before the first training step if this process will use them.

    One process per machine compiles the kernels; the others wait for it.
    """
    if devices.current().is_host:
        library()


def folder() -> Path:
    """Return the cache folder of compiled kernels, which may not exist yet."""
    return user_cache.root() / "kernels"


def _recipe() -> cached_library.Recipe:
    flags = (*_FLAGS, *(_ONLY_X86 if platform.machine() == "x86_64" else ()))
    # g++ adds its own OpenMP behind all, which is not needed then
    links = (str(_openmp()), "-Wl,--as-needed")
    return cached_library.Recipe(folder(), SOURCES, _HEADERS, flags, links, _WITHOUT)


class _Symbol(ctypes.Structure):
    """The C structure in which ``dladdr`` returns information about an address."""

    _fields_ = (
        ("file", ctypes.c_char_p),
        ("base", ctypes.c_void_p),
        ("name", ctypes.c_char_p),
        ("address", ctypes.c_void_p),
    )


def _openmp() -> Path:
    """Return the OpenMP library to which libtorch is linked.

    Another OpenMP library would start its own threads.

    Other OpenMP libraries may be loaded too: scikit-learn's wheel includes one that torch never calls.

    Raises:
        UsageError: libtorch uses another kind of threads, for which g++ cannot compile.
    """
    maps = Path("/proc/self/maps")
    lines = maps.read_text(encoding="utf-8").splitlines() if maps.is_file() else []
    torch = [line.split(maxsplit=5)[5] for line in lines if line.endswith("/libtorch_cpu.so")]
    found = _file_of(torch[0], "GOMP_parallel") if torch else ""
    if "gomp" not in Path(found).name:
        raise UsageError(
            "torch must be linked against libgomp, as torch's Linux wheels are, but it uses threads from "
            f"{found or 'an unknown library'}",
            remedy=f"Install such a torch, or {_WITHOUT}",
        )
    return Path(found)


def _file_of(library: str, symbol: str) -> str:
    """Return the file from which another library gets a function, or an empty string."""
    try:
        function = getattr(ctypes.CDLL(library), symbol)
    except (OSError, AttributeError):
        return ""
    found, dladdr = _Symbol(), ctypes.CDLL(None).dladdr
    dladdr.argtypes = [ctypes.c_void_p, ctypes.POINTER(_Symbol)]
    dladdr(ctypes.cast(function, ctypes.c_void_p), ctypes.byref(found))
    return str(found.file.decode()) if found.file else ""
