"""Check the caches from which Triton and torch's C++ extensions load compiled code, whoever has written it.

Neither checks who owns its cache. A variable can name another user's folder; with ``sudo -E``, so does HOME.
"""

from __future__ import annotations

import os
from pathlib import Path

from megatron_npu.base import files
from megatron_npu.base.errors import UsageError
from megatron_npu.process import extension_locks, user_cache

_EXTENSIONS, _TRITON = "TORCH_EXTENSIONS_DIR", "TRITON_CACHE_DIR"


def require_own() -> None:
    """Check that no other user can write to the caches that exist.

    Raises:
        UsageError: another user owns a cache, or can write to it or replace it.
    """
    for variable, cache in _caches().items():
        remedy = f"Set {variable} to a folder of your own (chmod 700)."
        folder = Path(os.path.realpath(cache))
        if not folder.is_dir():
            continue
        if files.is_writable_by_others(folder.stat()):  # sticky or not: anyone may add a file
            raise UsageError(
                f"code is loaded from {cache}, to which other users can write; only this user may have write "
                "access there",
                remedy=remedy,
            )
        user_cache.require_own_path(folder / "code", remedy)


def _caches() -> dict[str, Path]:
    """Return the cache folders by the variables that select them; empty without a home folder."""
    try:
        triton = Path(os.environ.get("TRITON_HOME") or Path.home()) / ".triton" / "cache"
        return {
            _TRITON: Path(os.environ.get(_TRITON) or triton),
            _EXTENSIONS: extension_locks.folder(),
        }
    except RuntimeError:  # Path.home(), which both would ask too
        return {}
