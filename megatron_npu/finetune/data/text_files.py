"""Check that text files are valid UTF-8 and not empty, and report where the first error is."""

from __future__ import annotations

import codecs
import csv
import io
from collections import Counter
from pathlib import Path

from megatron_npu.base import given_files
from megatron_npu.base.errors import UsageError

_CHUNK = 1 << 20
_UTF_16 = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
# how packed files begin, by what unpacks them
_PACKED = {
    b"\x1f\x8b": "gunzip",
    b"PK\x03\x04": "unzip",
    b"BZh": "bunzip2",
    b"\xfd7zXZ": "unxz",
    b"\x28\xb5\x2f\xfd": "unzstd",
}


def require(path: Path) -> None:
    """Check that a file is valid UTF-8 text.

    Readers of JSON lines accept other encodings and fail only when a row is used.

    Raises:
        UsageError: the file is empty or compressed, or a byte is not UTF-8.
    """
    if not path.stat().st_size:
        raise UsageError(f"--data-path: {path} is empty. Pass a file that has rows.")
    with given_files.opened(path) as file:
        begin = file.read(8)
    for magic, tool in _PACKED.items():
        if begin.startswith(magic):
            raise UsageError(
                f"--data-path: {path} is compressed, but the file must contain UTF-8 text. Decompress it "
                f"with {tool} and pass the result."
            )
    found = _first_stranger(path)
    if found is None:
        return
    line, byte = found
    marked = begin.startswith(_UTF_16)
    what = "appears to be encoded in UTF-16" if marked else f"is not UTF-8: byte 0x{byte:02x} in line {line}"
    raise UsageError(
        f"--data-path: {path} {what}, but the file must contain UTF-8 text. Convert it: iconv -f "
        f"{'UTF-16' if marked else 'LATIN1'} -t UTF-8 {path.name}"
        + ("." if marked else ", if it is encoded in Latin-1.")
    )


def require_head(path: Path, separator: str) -> None:
    """Check that the column names in the header of a table are unique.

    Readers would rename a repeated name.

    Raises:
        UsageError: a name occurs twice.
    """
    with io.TextIOWrapper(given_files.opened(path), encoding="utf-8-sig", newline="") as file:
        head = next(csv.reader(file, delimiter=separator), [])
    twice = [name for name, count in Counter(head).items() if count > 1]
    if twice:
        raise UsageError(
            f"--data-path: the header of {path} contains the column {twice[0]!r} more than once, but column "
            "names must be unique. Rename one of them."
        )


def _first_stranger(path: Path) -> tuple[int, int] | None:
    """Return the line number and value of the first byte that is not valid UTF-8, or None."""
    lines, rest = 1, b""  # the bytes of a character that continues in the next chunk
    with given_files.opened(path) as file:
        while True:
            chunk = file.read(_CHUNK)
            text = rest + chunk
            try:
                used = codecs.utf_8_decode(text, "strict", not chunk)[1]
            except UnicodeDecodeError as error:
                return lines + text.count(b"\n", 0, error.start), text[error.start]
            if not chunk:
                return None
            lines += text.count(b"\n", 0, used)
            rest = text[used:]
