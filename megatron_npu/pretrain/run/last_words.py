"""Print the final error message of a run on the rank that should report it."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

from megatron_npu.base import errors
from megatron_npu.base.errors import LoaderWorkerError
from megatron_npu.checkpoint_files.replicas import ReplicasDifferError
from megatron_npu.pretrain.checkpoint import checkpoint_files
from megatron_npu.pretrain.checkpoint.checkpoint_failures import UnsavedError
from megatron_npu.pretrain.run.divergence import DivergedError

# what ``tell`` is for
FAILURES = (DivergedError, LoaderWorkerError, ReplicasDifferError, UnsavedError, OSError)

_SECONDS = 10.0  # for rank 0 to tell what all ranks have found
_MORE = 3.0  # for the first rank of a machine, which is not that of rank 0


def tell(command: str, failure: BaseException) -> int:
    """Print the reason for the failure of a run on one line, and return the exit code.

    Args:
        command: the name of the command.
        failure: one of ``FAILURES``.

    Raises:
        OSError: the failure itself, if a user cannot act on it and the traceback is needed.
    """
    if not isinstance(failure, OSError):
        print(f"megatron-npu {command}: {failure}", file=sys.stderr)
    elif errors.is_of_files(failure):
        print(f"megatron-npu {command}: error: {errors.told_of_files(failure)}", file=sys.stderr)
    else:
        raise failure
    return 1


def what_is_saved(save: str | None) -> str:
    """Return the end of a sentence about where an interrupted run can be resumed.

    Args:
        save: the folder of its checkpoints. If None, there is no folder, or it is not known yet.
    """
    if not save:
        return "; nothing was saved"
    tracker = Path(save) / checkpoint_files.TRACKER
    if not tracker.is_file():
        return f"; nothing was saved in {save}"
    return f"; the last checkpoint in {save} is from iteration {tracker.read_text().strip()}"


def wait_for_rank_0_to_report() -> None:
    """Wait until rank 0 has failed and reported the error.

    A launcher stops all ranks as soon as the first one fails.

    If only this rank has an error, nothing stops it, and it reports the error itself after the wait. The same
    holds for the first rank on another machine, whose launcher does not notice rank 0 and stops the other
    ranks there.
    """
    signal.signal(signal.SIGTERM, lambda number, frame: os._exit(2))
    time.sleep(_SECONDS + (_MORE if os.environ.get("LOCAL_RANK", "0") != "0" else 0))
