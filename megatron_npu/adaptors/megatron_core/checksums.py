"""Checksums in the checkpoints of stock scripts: written with each, compared before it is loaded.

Connects ``megatron.core.dist_checkpointing.serialization`` and ``megatron.training``. Those of the format
``torch_dist`` are written when upstream declares its files complete: with its metadata, before the tracker;
those of the format ``torch`` when it has saved. The driver, which saves through the same functions, writes
its own.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from megatron_npu import checksums
from megatron_npu.adaptors.megatron_core.decorators import around
from megatron_npu.adaptors.shared import checksums as of_scripts

_in_script = False  # while a stock script saves or loads

around("megatron.training.arguments:add_megatron_arguments", why=of_scripts.WHY_FLAGS)(of_scripts.add_flags)


@around("megatron.training.checkpointing:save_checkpoint", why=of_scripts.WHY)
def save_with_checksums(original: Callable[..., Any], iteration: int, *args: Any, **kwargs: Any) -> Any:
    """Have checksums written with what the script saves."""
    from megatron.training.global_vars import get_args

    with _of_script() as verifies:
        if kwargs.get("non_persistent_ckpt"):  # which has another place
            return original(iteration, *args, **kwargs)
        place = of_scripts.folder(get_args().save, iteration)
        of_scripts.begin_save(place)
        result = original(iteration, *args, **kwargs)
        if verifies:
            of_scripts.write(place)
        return result


@around("megatron.training.checkpointing:load_checkpoint", why=of_scripts.WHY)
def load_with_checksums(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Have checksums compared before the script loads, and another one loaded if the flag says so."""
    from megatron.training.global_vars import get_args

    given = get_args()
    root, step = getattr(given, kwargs.get("load_arg", "load")), getattr(given, "ckpt_step", None)
    with _of_script() as verifies:
        try:
            if root and getattr(given, "load_last_good", False):
                given.ckpt_step = checksums.newest_whole(root) or step
            if root and verifies:
                _verify_ranks(root, given.ckpt_step)
            return original(*args, **kwargs)
        finally:
            given.ckpt_step = step  # of this call alone: it is a flag, which checkpoints keep


def _verify_ranks(root: str, step: int | None) -> None:
    """Compare a checkpoint of the format torch; ``compare_checksums`` does the others."""
    place = of_scripts.folder(root, step) if step else of_scripts.of_tracker(root)
    if place is not None and of_scripts.holds_ranks(place):
        of_scripts.verify(place)


@contextlib.contextmanager
def _of_script() -> Iterator[bool]:
    """Note that a script saves or loads; give whether its checkpoints are to be verified."""
    global _in_script
    from megatron.training.global_vars import get_args

    before, _in_script = _in_script, getattr(get_args(), "verify_checkpoint", True)
    try:
        yield _in_script
    finally:
        _in_script = before


@around("megatron.core.dist_checkpointing.serialization:save", why=of_scripts.WHY)
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


@around("megatron.core.dist_checkpointing.serialization:load", why=of_scripts.WHY)
def compare_checksums(
    original: Callable[..., Any], content: Any, checkpoint_dir: str, *args: Any, **kwargs: Any
) -> Any:
    """Compare them first; a checkpoint without any is loaded as it is."""
    if _in_script:
        of_scripts.verify(Path(checkpoint_dir))
    return original(content, checkpoint_dir, *args, **kwargs)
