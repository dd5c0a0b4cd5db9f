"""lm-eval's result files: whole under their names, or not there; and what could not be written is noted.

lm-eval writes them in place, logs a warning where that fails, and ends with exit code 0. Its module of
results gets a ``Path`` and an ``open`` here that write as ``files.writing`` does.
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

from megatron_npu.base import files

_PATTERNS = ("results_*.partial", "samples_*.partial", "*.json.*.partial")


@contextlib.contextmanager
def writing_whole(tracker: ModuleType) -> Iterator[list[str]]:
    """Let a module write whole files in the block; yield a list that gets a line for each that it could not.

    Args:
        tracker: ``lm_eval.loggers.evaluation_tracker``.
    """
    lost: list[str] = []

    class WholePath(type(Path())):  # type: ignore[misc]  # the kind of this system
        """A path whose file is replaced when all of the new one is on the disk."""

        def write_text(self, data: str, *_: Any, **__: Any) -> int:
            """Write the file; encoding and line ends are those of ``files.write``."""
            with self.open("w") as stream:
                stream.write(data)
            return len(data)

        def open(self, mode: str = "r", *args: Any, **options: Any) -> Any:
            """Open the file; one that is written or added to is replaced at the end of the block."""
            return _whole(self, mode, lost) if mode in ("w", "a") else super().open(mode, *args, **options)

    own = {"Path": WholePath, "open": lambda path, mode="r", *a, **o: WholePath(path).open(mode, *a, **o)}
    before = {name: vars(tracker).get(name) for name in own}
    vars(tracker).update(own)
    try:
        yield lost
    finally:
        for name, value in before.items():
            if value is None:
                del vars(tracker)[name]
            else:
                vars(tracker)[name] = value


@contextlib.contextmanager
def _whole(path: Path, mode: str, lost: list[str]) -> Iterator[io.TextIOWrapper]:
    """Yield a text stream whose content becomes the file, behind what it holds already if it is added to."""
    try:
        with files.writing(path) as binary:
            if mode == "a" and path.exists():
                binary.write(path.read_bytes())
            stream = io.TextIOWrapper(binary, encoding="utf-8", newline="\n")
            yield stream
            stream.flush()
            stream.detach()
    except OSError as error:
        lost.append(f"{path} could not be written: {error.strerror or error}")
        raise


def remove_abandoned(folder: Path) -> None:
    """Remove what a killed run has left of files that it was writing."""
    for pattern in _PATTERNS:
        for partial in (*folder.glob(pattern), *folder.glob(f"*/{pattern}")):
            files.remove_abandoned(
                partial.with_name(partial.name.removesuffix(".partial").rpartition(".")[0])
            )
