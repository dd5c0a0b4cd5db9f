"""Report a failure to write or read a checkpoint as a one-line error."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from pathlib import Path

from torch.distributed.checkpoint.api import CheckpointException

from megatron_npu.base.errors import UsageError
from megatron_npu.checkpoint_files import object_storage
from megatron_npu.pretrain.checkpoint import checkpoint_files
from megatron_npu.safe_files import torch_readers

# Failures of files; CheckpointException, which is not an Exception, holds those of each process.
FAILURES = (OSError, CheckpointException)
_NOT_FOR_USERS = re.compile(r"\n(?=Exception raised from |Traceback \(most recent)")  # torch's stacks
_LONGEST = 1500  # characters of a reason: some twenty names of weights
_STUMBLES = (TypeError, KeyError, AttributeError, IndexError)  # over what a file holds in another's place


class UnsavedError(RuntimeError):
    """Raised when a checkpoint could not be written, for example because the disk is full.

    Earlier checkpoints are not changed.
    """


def unsaved(error: BaseException, iteration: int, folder: str | Path) -> UnsavedError:
    """Return the error for a checkpoint that could not be written.

    Args:
        error: one of ``FAILURES``.
        iteration: iteration of the checkpoint.
        folder: folder of all checkpoints.
    """
    if isinstance(error, object_storage.UploadError):
        return UnsavedError(str(error))
    return UnsavedError(
        f"the checkpoint of iteration {iteration} could not be written to {folder}: {reason(error)}. "
        f"{_advice(error)} Earlier checkpoints are complete."
    )


def reason(error: BaseException) -> str:
    """Return the reason why the first process failed, on one line and without stack traces.

    Later lines of the error, such as the names of missing weights, are included. A very long text is
    truncated, and the number of omitted characters is appended.
    """
    if isinstance(error, CheckpointException) and error.failures:
        failure = next(iter(error.failures.values()))
        error = failure[0] if isinstance(failure, tuple) else failure
    told = " ".join(_NOT_FOR_USERS.split(str(error).strip() or repr(error))[0].split())
    if len(told) <= _LONGEST:
        return told
    return f"{told[:_LONGEST]}… ({len(told) - _LONGEST} more characters)"


def _advice(error: BaseException) -> str:
    """Return a question that asks the user about the likely cause of a failed write."""
    if "SIGKILL" in reason(error):
        return "Did the machine run out of memory?"
    return "Is the disk full?"


@contextlib.contextmanager
def reading(path: str | Path) -> Iterator[None]:
    """Report errors in the ``with`` block, which reads the checkpoint in ``path``, on a single line.

    Raises:
        UsageError: files are missing, damaged or contain code, or the checkpoint requires a newer
            megatron-core.
    """
    from megatron.core.dist_checkpointing.core import CheckpointingException

    if missing := checkpoint_files.missing(Path(path)):
        torch_readers.require_no_code(Path(path))  # an index that was exchanged names nothing of Megatron's
        raise _broken(path, f"lacks {' and '.join(missing)}")
    _require_readable_common(Path(path))
    try:
        with torch_readers.without_logged_tracebacks():
            yield
    except _STUMBLES as error:
        raise _broken(path, f"cannot be read: {type(error).__name__}: {reason(error)}") from error
    # a torn file is a ValueError to JSON, a RuntimeError or EOFError to torch
    except (*FAILURES, CheckpointingException, ValueError, RuntimeError, EOFError) as error:
        raise _broken(path, f"cannot be read: {reason(error)}") from error


def _require_readable_common(path: Path) -> None:
    """Reject a checkpoint without ``common.pt`` if megatron-core is older than 0.19 and requires the file.

    Raises:
        UsageError: the installed megatron-core is older than the checkpoint.
    """
    from megatron.core import package_info

    if (package_info.MAJOR, package_info.MINOR) >= (0, 19) or (path / checkpoint_files.COMMON).is_file():
        return
    if checkpoint_files.is_of_fsdp(path):
        return
    raise UsageError(
        f"the checkpoint {path} was saved by megatron-core 0.19 or newer, but {package_info.__version__} "
        f"is installed, which requires {checkpoint_files.COMMON}; newer versions do not write this file",
        remedy="Install megatron-core 0.19 or newer to load it.",
    )


def _broken(path: str | Path, why: str) -> UsageError:
    return UsageError(
        f"the checkpoint {path} {why}",
        remedy="Write the iteration of an older checkpoint into "
        f"{Path(path).parent / checkpoint_files.TRACKER}.",
    )
