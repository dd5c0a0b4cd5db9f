"""Write checksums of a dataset to ``<prefix>.sums.json``, and verify them when the dataset is first used.

A flipped bit in a ``.bin`` file changes a token, and no other check detects this. The checksums detect
damage, but not tampering. Each block of 4 MiB has a 64-bit XXH3 digest, so that a part of a large file can be
verified.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TypedDict

from megatron_npu.base import files
from megatron_npu.base.errors import UsageError

ENDING = "sums.json"
ALGORITHM = "xxh3_64"
BLOCK = 1 << 22  # bytes
_AT_FIRST = 64  # blocks that are compared when a run begins, evenly spread: 256 MiB


class Sums(TypedDict):
    """The size of a file and the digest of each of its blocks."""

    size: int
    blocks: list[str]


class Summer:
    """Computes the checksums of a file while the file is being written."""

    def __init__(self) -> None:
        self._size, self._blocks, self._digest = 0, list[str](), _digest()

    def add(self, data: bytes) -> None:
        """Add the next bytes that are written to the file."""
        view = memoryview(data)
        while len(view):
            part = view[: BLOCK - self._size % BLOCK]
            self._digest.update(part)
            self._size += len(part)
            view = view[len(part) :]
            if self._size % BLOCK == 0:
                self._end_block()

    def sums(self) -> Sums:
        """Return the checksums of all bytes. No bytes may be added after this call."""
        if self._size % BLOCK:
            self._end_block()
        return {"size": self._size, "blocks": self._blocks}

    def _end_block(self) -> None:
        self._blocks.append(self._digest.hexdigest())
        self._digest.reset()


def _digest(data: bytes | bytearray = b"") -> Any:
    import xxhash  # where bytes are read or written; help texts come without it

    return xxhash.xxh3_64(data)


def path_of(prefix: str | Path) -> Path:
    """Return the path of the file with the checksums of a dataset."""
    return Path(f"{prefix}.{ENDING}")


def write(prefix: str | Path, sums: Mapping[str, Sums]) -> None:
    """Write the checksums of the files of a dataset.

    The checksums are keyed by file extension.
    """
    content = {"algorithm": ALGORITHM, "block": BLOCK, "files": sums}
    files.write(path_of(prefix), json.dumps(content))
    path_of(prefix).chmod(0o640)  # as the files themselves, whatever the umask


def require(prefix: str | Path, *, whole: bool = False) -> bool:
    """Compare a dataset with its checksums. Return True if the dataset has checksums.

    Args:
        prefix: the path of the dataset without ``.bin`` and ``.idx``.
        whole: whether to verify everything instead of at most 256 MiB of each file.

    Raises:
        UsageError: the content of the dataset has changed, or its checksums cannot be read.
    """
    found = path_of(prefix)
    if not exist(prefix):
        return False
    try:
        faults = [
            fault for name, sums in _read(found).items() for fault in _faults(prefix, name, sums, whole)
        ]
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise UsageError(
            f"{found} must be the checksum file of a dataset, but it cannot be read ({error}). Remove "
            f"{found}."
        ) from error
    if faults:
        raise UsageError(
            f"the dataset is damaged: {'; '.join(faults)}. Its files must not have changed since "
            f"they were written ({found}). Copy or preprocess the data again, or remove {found} "
            "if another program rewrote the files on purpose."
        )
    return True


def exist(prefix: str | Path) -> bool:
    """Return True if a dataset has a checksum file.

    Raises:
        UsageError: the path is that of a folder, a pipe or a broken link.
    """
    found = path_of(prefix)
    if os.path.lexists(found) and not found.is_file():
        raise UsageError(
            f"{found} must be the checksum file of a dataset, but is not a regular file. Remove it."
        )
    return found.is_file()


def _read(path: Path) -> dict[str, Sums]:
    content = json.loads(files.text(path))
    if (content["algorithm"], content["block"]) != (ALGORITHM, BLOCK):
        raise ValueError(f"the checksum algorithm {content['algorithm']!r} is unknown")
    return {name: content["files"][name] for name in ("idx", "bin")}


def _faults(prefix: str | Path, ending: str, sums: Sums, whole: bool) -> Iterator[str]:
    path = Path(f"{prefix}.{ending}")
    size = path.stat().st_size
    if size != sums["size"]:
        yield f"{path} has {size} bytes instead of {sums['size']}"
        return
    with open(path, "rb", buffering=0) as stream:
        for number in _numbers(len(sums["blocks"]), whole):
            stream.seek(number * BLOCK)
            if _digest(_block(stream)).hexdigest() != sums["blocks"][number]:
                yield f"{path} differs from what was written, at or after byte {number * BLOCK}"
                return


def _numbers(blocks: int, whole: bool) -> Iterator[int]:
    if whole or blocks <= _AT_FIRST:
        return iter(range(blocks))
    return (number * (blocks - 1) // (_AT_FIRST - 1) for number in range(_AT_FIRST))


def _block(stream: Any) -> bytearray:
    """Return the next block of bytes from a stream.

    A file on a network may require several read calls.
    """
    block = bytearray(BLOCK)
    view, got = memoryview(block), 0
    while got < BLOCK and (count := stream.readinto(view[got:])):
        got += count
    view.release()
    del block[got:]
    return block
