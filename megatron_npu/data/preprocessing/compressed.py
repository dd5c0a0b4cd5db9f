"""Open text files that are plain or compressed as ``.gz``, ``.xz``, ``.bz2`` or ``.zst``."""

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

MOST_BYTES = 1 << 30  # of one document in a compressed file
ENDINGS = (".gz", ".xz", ".bz2", ".zst")


def plain_name(path: str) -> str:
    """Return the name of a file without the extension for its compression."""
    name = Path(path).name
    return Path(name).stem if Path(name).suffix in ENDINGS else name


def decompressed(path: str, raw: BinaryIO) -> BinaryIO | io.BufferedIOBase:
    """Return a stream of decompressed bytes. The file's extension determines the compression method.

    Args:
        path: the name of the file.
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
                f"--input {path} requires the package backports.zstd, which reads .zst files. Install it: "
                "pip install backports.zstd."
            )
        return zstd.ZstdFile(raw)
    return raw


def require_plausible(path: str, size: int) -> None:
    """Check that the size of a document in a compressed file is plausible.

    A few megabytes can decompress to more than a machine's memory, in which a document must fit.

    Args:
        path: the name of the file.
        size: the number of decompressed bytes of the document so far.

    Raises:
        UsageError: the file is compressed, and the document is too large.
    """
    if size > MOST_BYTES and Path(path).suffix in ENDINGS:
        raise UsageError(
            f"--input {path} contains a document of over {MOST_BYTES:,} bytes after decompression, but a "
            "document must be smaller, because several copies of it must fit into memory. Check the origin "
            "of the file; if the document is really this large, decompress the file first."
        )


def read(stream: BinaryIO | io.BufferedIOBase, path: str, size: int = -1) -> bytes:
    """Return the next ``size`` bytes of a stream, or fewer at the end of the stream.

    A size of -1 returns all bytes.

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
            f"--input {path} is damaged or not a compressed file: {error}. Fetch or compress the file again."
        ) from error


@cache
def zstd_module() -> ModuleType | None:
    """Return the module for reading .zst files, which is in the standard library since Python 3.14, or its
    backport.

    The package ``zstandard`` is not used, because it does not raise an error for a truncated file.
    """
    for name in ("compression.zstd", "backports.zstd"):
        try:
            return importlib.import_module(name)
        except ImportError:
            continue
    return None
