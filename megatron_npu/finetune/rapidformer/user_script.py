"""Implement ``--user-script FILE``, which runs a Python file as ``python FILE`` does.

The script gets names that the document's scripts use without importing them, and names that newer packages
have removed. ``from megatron import mpu`` imports a stub if Megatron no longer has the module.
"""

from __future__ import annotations

import runpy
import sys
import traceback
from pathlib import Path
from types import TracebackType
from typing import Any

from torch import Tensor

import megatron_npu
from megatron_npu.base.errors import LoaderWorkerError, UsageError
from megatron_npu.base.installed_packages import is_installed
from megatron_npu.finetune.rapidformer import state
from megatron_npu.process import python_child
from megatron_npu.standins import mpu

_PACKAGE = Path(megatron_npu.__file__).resolve().parent


def run(script: str) -> None:
    """Run the user's script until it ends.

    Raises:
        UsageError: the script raised an exception, or trained nothing.
    """
    from megatron_npu.finetune.rapidformer import engine

    path = Path(script).resolve()
    _require_python(path)
    stand_in()
    names = _supplied(path)
    made, used = engine.made(), engine.used()
    arguments, places = sys.argv, sys.path[:]
    sys.argv = [script]
    python_child.search_first(str(path.parent))
    try:
        runpy.run_path(str(path), init_globals=names, run_name="__main__")
    except (UsageError, KeyboardInterrupt):
        raise
    except SystemExit as end:
        if end.code not in (None, 0):
            raise
    except BaseException as error:
        raise _told(path, error) from error
    finally:
        sys.argv, sys.path[:] = arguments, places
    if engine.used() == used:
        none = "did not create a RapidformerEngine" if engine.made() == made else "did not train anything"
        raise UsageError(
            f"--user-script {script} {none}; it must call a template's train() or engine.compose. End the "
            "script with: engine = RapidformerEngine(); MyTrainer(engine=engine).train()"
        )


def _require_python(path: Path) -> None:
    try:
        compile(path.read_bytes(), str(path), "exec")
    except (SyntaxError, ValueError) as error:
        line = f" (line {error.lineno})" if isinstance(error, SyntaxError) and error.lineno else ""
        reason = error.msg if isinstance(error, SyntaxError) else error
        raise UsageError(
            f"--user-script {path.name} is not a valid Python file: {reason}{line}. Correct the script."
        ) from None


def stand_in() -> None:
    """Make ``from megatron import mpu`` import a stub if Megatron no longer has this module."""
    if mpu.NAME not in sys.modules and is_installed("megatron") and mpu.is_needed():
        sys.modules[mpu.NAME] = mpu


def _supplied(path: Path) -> dict[str, Any]:
    """Provide the names that a script lacks, and log them.

    Return the names to define before the script starts.
    """
    from megatron_npu.finetune.rapidformer import former_names, missing_imports

    text = path.read_bytes()
    former = former_names.supply(text.decode("utf-8", "replace"))
    names = missing_imports.given(text, path.name)  # type: ignore[arg-type]  # bytes say their encoding
    log = state.get_logger()
    if former:
        log.info(
            "--user-script %s: providing these names, which newer versions lack: %s",
            path.name,
            ", ".join(former),
        )
    if names:
        log.info(
            "--user-script %s: providing these names, which the script does not import: %s",
            path.name,
            ", ".join(names),
        )
    return names


def _told(path: Path, error: BaseException) -> BaseException:
    """Return a one-line error if the user's code raised the error, or the original error if not."""
    frame = _of_user(path, error.__traceback__)
    if frame is None or isinstance(error, LoaderWorkerError):
        return error
    reason = _beyond_an_embedding(error) or (str(error).strip() or "no message").splitlines()[0]
    where = f"{Path(frame.filename).name}, line {frame.lineno}, in {frame.name}"
    return UsageError(
        f"--user-script {path.name} failed with {type(error).__name__}: {reason} ({where}). Correct the "
        "script there; --log-level debug prints the whole traceback."
    )


def _beyond_an_embedding(error: BaseException) -> str | None:
    """Describe an embedding lookup with an index out of range, or return None for other errors.

    torch reports only that an index is out of range, both for a token and for a position beyond the maximum.
    """
    if not isinstance(error, IndexError):
        return None
    *_, (frame, _) = traceback.walk_tb(error.__traceback__)
    asked, rows = (frame.f_locals.get(name) for name in ("input", "weight"))
    if frame.f_code.co_name != "embedding" or not (isinstance(asked, Tensor) and isinstance(rows, Tensor)):
        return None
    strange = int(asked.max()) if asked.max() >= rows.shape[0] else int(asked.min())
    return f"an embedding with {rows.shape[0]} rows was indexed with {strange}"


def _of_user(path: Path, trace: TracebackType | None) -> traceback.FrameSummary | None:
    """Return the last stack frame in the user's files, or None if it is followed by frames of this
    project.
    """
    found = None
    for frame in traceback.extract_tb(trace):
        file = Path(frame.filename).resolve()
        if _PACKAGE in file.parents:
            found = None
        elif file == path or (path.parent in file.parents and "site-packages" not in file.parts):
            found = frame
    return found
