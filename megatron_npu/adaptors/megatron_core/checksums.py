"""Checksums in the checkpoints of stock scripts: written with each, compared before it is loaded.

Connects ``megatron.core.dist_checkpointing.serialization`` and ``megatron.training``. They are of the format
``torch_dist`` alone, whose files upstream declares complete at one moment: when its metadata are written,
before the tracker. The driver, which saves through the same functions, writes its own.
"""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from megatron_npu import checksums
from megatron_npu.adaptors.megatron_core.decorators import around

_WHY = "upstream loads files with flipped bits without a word, and trains on with other weights"
_REMEDY = (
    "Write the iteration of an older one into latest_checkpointed_iteration.txt "
    "(`megatron-npu checkpoint verify` says which are whole)."
)
_in_script = False  # while a stock script saves or loads


@around(
    "megatron.training.arguments:add_megatron_arguments",
    why="--no-verify-checkpoint: neither write nor compare checksums",
)
def add_flag(original: Callable[..., Any], parser: argparse.ArgumentParser) -> Any:
    """Declare it after upstream's own flags."""
    parser = original(parser)
    parser.add_argument(
        "--no-verify-checkpoint",
        action="store_false",
        dest="verify_checkpoint",
        help="neither write checksums of checkpoints nor compare them",
    )
    return parser


@around("megatron.training.checkpointing:save_checkpoint", why=_WHY)
def save_with_checksums(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Have checksums written with what the script saves."""
    with _of_script():
        return original(*args, **kwargs)


@around("megatron.training.checkpointing:load_checkpoint", why=_WHY)
def load_with_checksums(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Have checksums compared before the script loads."""
    with _of_script():
        return original(*args, **kwargs)


@contextlib.contextmanager
def _of_script() -> Iterator[None]:
    global _in_script
    from megatron.training.global_vars import get_args

    before, _in_script = _in_script, getattr(get_args(), "verify_checkpoint", True)
    try:
        yield
    finally:
        _in_script = before


@around("megatron.core.dist_checkpointing.serialization:save", why=_WHY)
def write_checksums(
    original: Callable[..., Any], content: Any, checkpoint_dir: str, *args: Any, **kwargs: Any
) -> Any:
    """Write them when all other files are there: at once, or where an asynchronous save is finalised."""
    request = original(content, checkpoint_dir, *args, **kwargs)
    if _in_script:
        folder = Path(checkpoint_dir)
        if request is None:
            checksums.write(folder)
        else:
            request.add_finalize_fn(lambda: checksums.write(folder))
    return request


@around("megatron.core.dist_checkpointing.serialization:load", why=_WHY)
def compare_checksums(
    original: Callable[..., Any], content: Any, checkpoint_dir: str, *args: Any, **kwargs: Any
) -> Any:
    """Compare them first; a checkpoint without any is loaded as it is."""
    if _in_script:
        checksums.verify(Path(checkpoint_dir), _REMEDY)
    return original(content, checkpoint_dir, *args, **kwargs)
