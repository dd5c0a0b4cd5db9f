"""Load untrusted checkpoints without executing code from them, and reject invalid ones with a one-line error.

Patches ``megatron.core.dist_checkpointing`` and ``megatron.training.checkpointing``; ``torch_readers``
controls what torch's own reader may unpickle for these checkpoints.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import pickle
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

from megatron_npu.adaptors.megatron_core.decorators import NOT_FIXED, around
from megatron_npu.adaptors.shared import checksums as of_scripts
from megatron_npu.base import files
from megatron_npu.base.errors import UsageError
from megatron_npu.safe_files import safe_load, torch_readers

_COMMON = "megatron.core.dist_checkpointing.strategies.common:TorchCommonLoadStrategy"


# What torch and zipfile say of files that were cut short.
_TORN = (EOFError, OSError, BadZipFile, pickle.UnpicklingError)
_SAID_OF_TORN = (
    "PytorchStreamReader",
    ".metadata is invalid",
    "storage has wrong byte size",
    "unexpected pos",
)
_NO_INDEX = "metadata is None"  # an assertion of torch, with why it could not read the index


@contextlib.contextmanager
def _data_only(what: str) -> Iterator[None]:
    """Make torch load only data inside the ``with`` block, and report rejected content without a
    traceback.
    """
    if not torch_readers.guarding():  # the user trusts the files
        yield
        return
    from torch.distributed.checkpoint.api import CheckpointException

    torch_readers.allow_values()
    torch_readers.last_refusal()  # of another checkpoint
    try:
        with safe_load.weights_only():
            yield
    except pickle.UnpicklingError as error:
        raise torch_readers.refusal(what, safe_load.refused_name(error)) from error
    except CheckpointException as error:  # torch's, of all ranks
        raise torch_readers.last_refusal() or error from error


@contextlib.contextmanager
def _whole(what: str) -> Iterator[None]:
    """Report, without a traceback, any truncated or damaged files that the ``with`` block reads."""
    from torch.distributed.checkpoint.api import CheckpointException

    try:
        with torch_readers.without_logged_tracebacks():
            yield
    except (AssertionError, EOFError, BadZipFile, ValueError, CheckpointException) as error:
        if torn := _torn(error):
            raise torch_readers.last_refusal() or _broken(what, torn) from error
        raise


def _torn(error: BaseException) -> str:
    """Return a one-line message if an error is due to a damaged file, and an empty string for other
    errors.
    """
    failures = [found[0] if isinstance(found, tuple) else found for found in _failures(error)]
    for each in failures:
        line = (str(each).strip() or type(each).__name__).partition("\n")[0]
        asserted = isinstance(each, AssertionError) and line.startswith(_NO_INDEX)
        if asserted or isinstance(each, _TORN) or any(text in line for text in _SAID_OF_TORN):
            return line
    return ""


def _failures(error: BaseException) -> list[Any]:
    """Return the errors of all ranks that a torch error contains, or a list with the error itself."""
    return list(getattr(error, "failures", {}).values()) or [error]


def _broken(what: str | Path, why: str) -> UsageError:
    return UsageError(
        f"{what} cannot be read: {why[:1000]}. Its files must not have changed since they were "
        f"saved. {of_scripts.REMEDY}"
    )


_common_data = partial(
    around,
    why="a value that torch's reader rejects produces pages of its advice to load the file anyway",
)


@_common_data("megatron.core.dist_checkpointing.serialization:load_common_state_dict", versions=">=0.19")
@_common_data("megatron.core.dist_checkpointing.strategies.common:load_common", versions=">=0.17")
def load_common_file(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Read the file ``common.pt`` as data, without executing code from it.

    Since 0.19, sharded objects replace this file.
    """
    with _data_only("the checkpoint's common values"):
        return original(*args, **kwargs)


@around(
    f"{_COMMON}.load_common",
    versions="<0.17",
    why="0.12 and 0.13 load common.pt with weights_only=False, which executes code in it; later versions "
    "print pages of torch's advice to do so",
    upstream_bug=True,
    until=NOT_FIXED,
)
def load_common_data(original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
    """Read the file ``common.pt`` as data, without executing code from it."""
    with _data_only("the checkpoint's common.pt"):
        return original(self, *args, **kwargs)


@around(
    f"{_COMMON}.load_sharded_objects",
    versions="<0.17",  # which has no such files
    why="same as load_common, for object files in old checkpoints",
    upstream_bug=True,
    until=NOT_FIXED,
)
def load_objects_as_data(original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
    """Read the files of sharded objects as data, without executing code from them."""
    with _data_only("an object of the checkpoint"):
        return original(self, *args, **kwargs)


@around(
    "megatron.core.dist_checkpointing.serialization:load",
    why="a value that torch's reader rejects is reported as an exception on all ranks, with their tracebacks",
    order=1,
)
def load_or_refuse(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Load a checkpoint, and report rejected content without a traceback."""
    with _data_only("the checkpoint"):
        return original(*args, **kwargs)


@around(
    "megatron.training.checkpointing:_load_base_checkpoint",
    why="0.12 loads the torch format with weights_only=False, which executes code in it, and exits with "
    "code 0 if a file cannot be read",
    upstream_bug=True,
    until=NOT_FIXED,
    order=1,
)
def load_data_only(
    original: Callable[..., Any], load_dir: str, args: argparse.Namespace, *rest: Any, **kwargs: Any
) -> Any:
    """Load a checkpoint's tensors, numbers and arguments without executing code from it.

    An invalid file raises a one-line error.
    """
    if load_dir and not getattr(args, "non_persistent_ckpt_type", None):  # which may be newer, elsewhere
        _require_described(Path(load_dir), args.ckpt_step)
    with _whole(f"the checkpoint in {load_dir}"), _data_only(f"the checkpoint in {load_dir}"):
        try:
            return original(load_dir, args, *rest, **kwargs)
        except SystemExit as stop:
            # upstream: print(error); sys.exit()
            cause = stop.__context__
            if not isinstance(cause, Exception):
                raise
            raise torch_readers.refusal(
                f"the checkpoint in {load_dir}", safe_load.refused_name(cause)
            ) from cause


def _require_described(root: Path, step: int | None) -> None:
    """Check the tracker file, and the checkpoint that it names, before upstream reads them.

    Raises:
        UsageError: the tracker is invalid, the checkpoint does not exist, or its metadata cannot be read.
    """
    tracker = root / of_scripts.TRACKER
    if not step and not tracker.is_file():  # upstream says that it begins again
        return
    place = of_scripts.to_load(root, step)
    if place is None:
        text = tracker.read_text(encoding="utf-8", errors="replace").strip()[:80]
        raise UsageError(
            f"{tracker} must contain an iteration number or `release`, but it contains {text!r}. Write the "
            "iteration of a complete checkpoint into the file."
        )
    if not place.is_dir():
        raise UsageError(
            f"the checkpoint {place} does not exist, although --ckpt-step or the tracker selects it. "
            f"{of_scripts.REMEDY}"
        )
    description = place / "metadata.json"
    try:
        content = json.loads(files.text(description)) if description.is_file() else {}
        if not isinstance(content, dict):
            raise ValueError(
                f"the file must contain a JSON object, but it contains a {type(content).__name__}"
            )
    except (OSError, ValueError, RecursionError) as error:
        raise _broken(description, str(error).partition("\n")[0] or type(error).__name__) from error
