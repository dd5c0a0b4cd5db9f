"""Open text files: plain, ``.gz``, ``.xz``, ``.bz2`` or ``.zst``."""

from __future__ import annotations

import bz2
import gzip
import importlib
import io
import lzma
import zlib
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import BinaryIO

from megatron_npu.base.errors import UsageError

ENDINGS = (".gz", ".xz", ".bz2", ".zst")


def plain_name(path: str) -> str:
    """Return the name of a file without its compression extension."""
    name = Path(path).name
    return Path(name).stem if Path(name).suffix in ENDINGS else name


def decompressed(path: str, raw: BinaryIO) -> BinaryIO | io.BufferedIOBase:
    """Return the decompressed stream; the extension selects the method.

    Args:
        path: name of the file.
        raw: the open file.

    Raises:
        UsageError: no module to read ``.zst`` is available.
    """
    suffix = Path(path).suffix
    if suffix == ".gz":
        return gzip.GzipFile(fileobj=raw)
    if suffix == ".xz":
        return lzma.LZMAFile(raw)
    if suffix == ".bz2":
        return bz2.BZ2File(raw)
    if suffix == ".zst":
        if (zstd := zstd_module()) is None:
            raise UsageError(
                f"--input {path}",
                "the package backports.zstd for .zst files",
                "Install it: pip install backports.zstd.",
            )
        return zstd.ZstdFile(raw)
    return raw


def read(stream: BinaryIO | io.BufferedIOBase, path: str, size: int = -1) -> bytes:
    """Return the next ``size`` bytes of a stream, or fewer at its end; -1 returns all.

    Raises:
        UsageError: the file cannot be read or decompressed.
    """
    damage: tuple[type[Exception], ...] = (OSError, EOFError, zlib.error, lzma.LZMAError)
    if (zstd := zstd_module()) is not None:
        damage = (*damage, zstd.ZstdError)
    try:
        return stream.read(size)
    except damage as error:
        raise UsageError(
            f"--input {path}: {error}", "an undamaged file", "Fetch or compress the file again."
        ) from error


@cache
def zstd_module() -> ModuleType | None:
    """Return the module for .zst: the standard library's in Python 3.14 and later, otherwise its backport.

    The package ``zstandard`` is not used, because it reads a truncated file without an error.
    """
    for name in ("compression.zstd", "backports.zstd"):
        try:
            return importlib.import_module(name)
        except ImportError:
            continue
    return None
