"""Control what the C library does with freed memory.

torch's CPU allocator uses plain malloc.
"""

from __future__ import annotations

import ctypes
import logging

from megatron_npu.base import settings

logger = logging.getLogger(__name__)

# Parameters of mallopt(3) and glibc's own defaults.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_MMAP_MAX = -1, -3, -4
_DEFAULTS = {_M_TRIM_THRESHOLD: 128 * 1024, _M_MMAP_MAX: 65536}
_KEEP = {_M_TRIM_THRESHOLD: 2**31 - 1, _M_MMAP_MAX: 0}


def keep_freed_memory() -> None:
    """Configure malloc to keep freed memory of any size and reuse it.

    glibc maps each large block and unmaps it when it is freed, so every training step has a page fault for
    every 4 KiB of activations and logits. A caching allocator, as on CUDA and NPU, avoids this. The resident
    set stays at its peak until the process ends. ``MEGATRON_NPU_KEEP_MEMORY=0``, or a C library other than
    glibc, disables this function.
    """
    if settings.KEEP_MEMORY.enabled() and not _set(_KEEP):
        logger.info("freed memory is returned to the system, because this C library has no mallopt(3)")


def return_freed_memory() -> None:
    """Restore the default settings of glibc, and return free memory to the system."""
    if settings.KEEP_MEMORY.enabled() and _set(_DEFAULTS):
        trim()


def map_each_tensor() -> None:
    """Map every allocation of at least one megabyte separately, and unmap it when it is freed (glibc only).

    By default, glibc raises this threshold to 32 MiB as such blocks are freed, and keeps smaller blocks, so a
    second model does not fit into the gaps that the first one has left.
    """
    _set({_M_MMAP_THRESHOLD: 1 << 20})


def trim() -> None:
    """Return free memory to the system (glibc only), as ``torch.cuda.empty_cache`` does on a GPU."""
    malloc_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if malloc_trim is not None:
        malloc_trim(0)


def _set(values: dict[int, int]) -> bool:
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    return mallopt is not None and all(mallopt(name, value) == 1 for name, value in values.items())
