"""Checkpoints that somebody else has written: read without running them, refused in one line.

Connects ``megatron.core.dist_checkpointing`` and ``megatron.training.checkpointing``; what torch's own
reader unpickles for them is the business of ``torch_readers``.
"""

from __future__ import annotations

import contextlib
import pickle
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from megatron_npu import safe_load, torch_readers
from megatron_npu.adaptors.megatron_core.decorators import NOT_FIXED, around

_COMMON = "megatron.core.dist_checkpointing.strategies.common:TorchCommonLoadStrategy"


@contextlib.contextmanager
def _data_only(what: str) -> Iterator[None]:
    """Let torch load data in the block, and say in one line what it has refused."""
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


_common_data = partial(
    around,
    why="a value that torch's reader has refused ends in pages of its advice to load it all the same",
)


@_common_data("megatron.core.dist_checkpointing.serialization:load_common_state_dict", versions=">=0.19")
@_common_data("megatron.core.dist_checkpointing.strategies.common:load_common", versions=">=0.17")
def load_common_file(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Read ``common.pt``, or since 0.19 what lies among the sharded objects in its place, as data."""
    with _data_only("the checkpoint's common values"):
        return original(*args, **kwargs)


@around(
    f"{_COMMON}.load_common",
    versions="<0.17",
    why="0.12 and 0.13 load common.pt with weights_only=False, which runs what it holds; later ones end in "
    "pages of torch's advice to do so",
    upstream_bug=True,
    until=NOT_FIXED,
)
def load_common_data(original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
    """Read ``common.pt`` as data."""
    with _data_only("the checkpoint's common.pt"):
        return original(self, *args, **kwargs)


@around(
    f"{_COMMON}.load_sharded_objects",
    versions="<0.17",  # which has no such files
    why="as load_common: files of objects in old checkpoints",
    upstream_bug=True,
    until=NOT_FIXED,
)
def load_objects_as_data(original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
    """Read the files of sharded objects as data."""
    with _data_only("an object of the checkpoint"):
        return original(self, *args, **kwargs)


@around(
    "megatron.core.dist_checkpointing.serialization:load",
    why="a value that torch's reader has refused comes as an exception of all ranks, with their tracebacks",
)
def load_or_refuse(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Say in one line what was refused."""
    with _data_only("the checkpoint"):
        return original(*args, **kwargs)


@around(
    "megatron.training.checkpointing:_load_base_checkpoint",
    why="the format torch is loaded with weights_only=False by 0.12, which runs what it holds; and a file "
    "that cannot be read ends the process with exit code 0",
    upstream_bug=True,
    until=NOT_FIXED,
)
def load_data_only(original: Callable[..., Any], load_dir: str, *args: Any, **kwargs: Any) -> Any:
    """Read tensors, numbers and arguments, nothing that runs; say what is wrong with a bad file."""
    with _data_only(f"the checkpoint in {load_dir}"):
        try:
            return original(load_dir, *args, **kwargs)
        except SystemExit as stop:
            # upstream: print(error); sys.exit()
            cause = stop.__context__
            if not isinstance(cause, Exception):
                raise
            raise torch_readers.refusal(
                f"the checkpoint in {load_dir}", safe_load.refused_name(cause)
            ) from cause
