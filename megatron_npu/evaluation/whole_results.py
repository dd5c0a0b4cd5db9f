"""Write the result files of lm-eval either completely or not at all, and record failed writes.

lm-eval writes these files in place, logs a warning if that fails, and still ends with exit code 0. Therefore,
the ``Path`` and ``open`` of its result module are replaced with versions that write through
``files.writing``.
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
    """Make a module write only complete files inside the ``with`` block.

    Yield a list of messages about failed writes.

    Args:
        tracker: the module ``lm_eval.loggers.evaluation_tracker``.
    """
    lost: list[str] = []

    class WholePath(type(Path())):  # type: ignore[misc]  # the kind of this system
        """Path whose file is replaced only after its new content is completely on disk."""

        def write_text(self, data: str, *_: Any, **__: Any) -> int:
            """Write text to the file with the encoding and line endings of ``files.write``."""
            with self.open("w") as stream:
                stream.write(data)
            return len(data)

        def open(self, mode: str = "r", *args: Any, **options: Any) -> Any:
            """Open the file in such a way that its content is replaced only when the new content is complete.

            A file opened for writing or appending is replaced at the end of the block.
            """
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
    """Yield a text stream whose content replaces the file.

    When appending, the stream includes the old content.
    """
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
    """Remove the partial files that a run left behind when it was killed while writing."""
    for pattern in _PATTERNS:
        for partial in (*folder.glob(pattern), *folder.glob(f"*/{pattern}")):
            files.remove_abandoned(
                partial.with_name(partial.name.removesuffix(".partial").rpartition(".")[0])
            )
