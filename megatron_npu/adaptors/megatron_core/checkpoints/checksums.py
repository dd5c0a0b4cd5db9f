"""Write checksums when stock scripts save checkpoints, and verify them when stock scripts load checkpoints.

Patches ``megatron.core.dist_checkpointing.serialization`` and ``megatron.training``. Checksums for the format
``torch_dist`` are written together with upstream's metadata, which declares the files complete, and before
the tracker; those for other formats are written after the save. The tracker is always renamed into place
after the checksums, also for asynchronous saves. The built-in trainer saves through the same functions but
writes its own checksums.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import shutil
import threading
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from pathlib import Path
from typing import Any

from megatron_npu import watchdog
from megatron_npu.adaptors.megatron_core.decorators import around
from megatron_npu.adaptors.shared import addresses
from megatron_npu.adaptors.shared import checksums as of_scripts
from megatron_npu.checkpoint_files import checksums, disks, stranger_weights

_OF_DIST_CHECKPOINTING = ("torch_dist", "zarr")  # what ``write_checksums`` sees, and
_DECLARED = "metadata.json"  # which they alone have
# Whether checksums are wanted by the stock script that saves or loads; False while none does.
_VERIFIES: ContextVar[bool] = ContextVar("tells whether the script verifies checkpoints", default=False)
# Of an asynchronous save that begins: what is to be done when its files are there, when rank 0 has ended
# it, and when all ranks have.
_FINISHING: ContextVar[tuple[Callable[[], None], ...] | None] = ContextVar(
    "tells how the save that begins is finalized", default=None
)

_ARGUMENTS = "megatron.training.arguments:add_megatron_arguments"
around(_ARGUMENTS, why=of_scripts.WHY_FLAGS, order=1)(of_scripts.add_flags)


@around("megatron.training.checkpointing:save_checkpoint", why=of_scripts.WHY)
@watchdog.phase(watchdog.SAVING)
def save_with_checksums(original: Callable[..., Any], iteration: int, *args: Any, **kwargs: Any) -> Any:
    """Save a checkpoint, and write checksums of the files."""
    from megatron.training.checkpointing import get_args  # what upstream's own body asks

    given = get_args()
    asked = inspect.signature(original).bind(iteration, *args, **kwargs).arguments
    with _of_script() as verifies:
        elsewhere = asked.get("non_persistent_ckpt") or addresses.is_address(given.save)
        if given.save is None or elsewhere:
            return original(iteration, *args, **kwargs)
        place = of_scripts.folder(given.save, iteration, release=asked.get("release", False))
        declared = given.ckpt_format in _OF_DIST_CHECKPOINTING
        wanted, retain = verifies and not declared, getattr(given, "save_retain_interval", None)
        if getattr(given, "async_save", False):
            with _beginning(given.save, place, wanted, retain):
                return original(iteration, *args, **kwargs)
        former = of_scripts.of_tracker(given.save)
        with of_scripts.saving(given.save, place, verifies=wanted):
            result = original(iteration, *args, **kwargs)
        _retire(former, place, retain)
    return result


@contextlib.contextmanager
def _beginning(root: str, place: Path, verifies: bool, retain: int | None) -> Iterator[None]:
    """Prepare the steps that complete an asynchronous save started inside the ``with`` block.

    Args:
        verifies: whether to write the checksums here, because ``write_checksums`` does not write them.
        retain: the value of upstream's ``--save-retain-interval``.
    """
    with of_scripts.beginning(root, place) as save:

        def sum_up() -> None:
            if verifies:
                checksums.write(place)
            else:
                disks.complete(place)

        def name() -> None:
            former = of_scripts.of_tracker(root)
            if save.publish():
                _retire(former, place, retain)

        token = _FINISHING.set((sum_up, name, functools.partial(disks.publish, save.tracker)))
        try:
            yield
        finally:
            _FINISHING.reset(token)


@around(
    "megatron.training.async_utils:schedule_async_save",
    why="upstream rewrites the tracker of an asynchronous save in place: if killed meanwhile, it leaves an "
    "empty tracker",
)
def finish_by_name(original: Callable[..., Any], async_request: Any) -> Any:
    """Rename the tracker file after upstream has written it, before other code can find the checkpoint."""
    finishing = _FINISHING.get()
    if finishing is not None and async_request.finalize_fns:  # 0.19 hands them on to a second request
        sum_up, name, publish = finishing
        own = async_request.finalize_fns
        # the first is that of the files, on every rank; later ones are of some ranks
        own[:] = [*own[:1], sum_up, *(_then(each, name) for each in own[1:]), publish]
    return original(async_request)


def _then(first: Callable[[], None], second: Callable[[], None]) -> Callable[[], None]:
    def both() -> None:
        first()
        second()

    return both


def _retire(former: Path | None, place: Path, interval: int | None) -> None:
    """Remove the previous checkpoint, as upstream does with its own flag once the tracker file has its
    final name.
    """
    if not interval or former is None or former in (place, place.with_name(of_scripts.RELEASE)):
        return
    if disks.leads() and not former.is_symlink() and int(former.name.removeprefix("iter_")) % interval:
        threading.Thread(target=shutil.rmtree, args=(former, True)).start()


around(
    "megatron.training.checkpointing:get_checkpoint_tracker_filename",
    why="upstream marks a torch-format checkpoint as the newest before its checksums exist, and rewrites "
    "the tracker in place: if killed meanwhile, it leaves an empty tracker",
)(of_scripts.tracker_to_write)


@around(
    "megatron.training.wandb_utils:on_save_checkpoint_success",
    why="upstream uploads the tracker, which is renamed into place only a moment later",
)
def log_when_named(
    original: Callable[..., None], checkpoint_path: str, tracker_filename: str, *args: Any, **kwargs: Any
) -> None:
    """Delay the log message about a save until the tracker file has its final name."""
    save, named = of_scripts.under_way(), of_scripts.named(tracker_filename)
    if save is None or named == tracker_filename:
        original(checkpoint_path, tracker_filename, *args, **kwargs)
    else:
        save.afterwards.append(functools.partial(original, checkpoint_path, named, *args, **kwargs))


@around("megatron.training.checkpointing:load_checkpoint", why=of_scripts.WHY)
@watchdog.phase("loading")
def load_with_checksums(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Load a checkpoint and verify its checksums.

    If the flag requests it, load an older intact checkpoint instead.
    """
    from megatron.training.checkpointing import get_args  # what upstream's own body asks

    given = get_args()
    bound = inspect.signature(original).bind(*args, **kwargs).arguments
    load_arg = bound.get("load_arg", "load")
    root, step = getattr(given, load_arg), getattr(given, "ckpt_step", None)
    with _of_script() as verifies:
        if addresses.is_address(root):
            return original(*args, **kwargs)
        try:
            if root and getattr(given, "load_last_good", False):
                given.ckpt_step = checksums.newest_whole(root) or step
            whole = None
            if root:
                whole = of_scripts.to_load(root, given.ckpt_step)
                of_scripts.require_same(root, whole)
            with (
                disks.whole(whole),
                of_scripts.verifying(_of_ranks(root, given.ckpt_step) if root and verifies else None),
            ):
                result = original(*args, **kwargs)
            if root and (place := of_scripts.to_load(root, given.ckpt_step)):
                stranger_weights.tell_of_loaded(place, bound["ddp_model"])
            return result
        finally:
            given.ckpt_step = step  # of this call alone: it is a flag, which checkpoints keep


def _of_ranks(root: str, step: int | None) -> Path | None:
    """Return the checkpoint to verify, or None if ``compare_checksums`` already verifies it.

    Raises:
        UsageError: a file that the script reads earlier is damaged.
    """
    place = of_scripts.to_load(root, step)
    if place is None or not (place / _DECLARED).is_file():
        return place
    checksums.require_whole(place, (_DECLARED, "common.pt", ".metadata"), of_scripts.REMEDY)
    return None


@contextlib.contextmanager
def _of_script() -> Iterator[bool]:
    """Record, for the duration of the ``with`` block, that a script saves or loads.

    Yield whether its checkpoints are to be verified.
    """
    from megatron.training.checkpointing import get_args  # what upstream's own body asks

    verifies: bool = getattr(get_args(), "verify_checkpoint", True)
    token = _VERIFIES.set(verifies)
    try:
        yield verifies
    finally:
        _VERIFIES.reset(token)


@around("megatron.core.dist_checkpointing.serialization:save", why=of_scripts.WHY)
def write_checksums(
    original: Callable[..., Any], sharded_state_dict: Any, checkpoint_dir: str, *args: Any, **kwargs: Any
) -> Any:
    """Write the checksums of a checkpoint after all its other files.

    This happens immediately, or when an asynchronous save is finalized.
    """
    request = original(sharded_state_dict, checkpoint_dir, *args, **kwargs)
    if _VERIFIES.get():
        if addresses.is_address(checkpoint_dir):
            finish = functools.partial(addresses.declare_whole, str(checkpoint_dir))
        else:
            finish = functools.partial(checksums.write, Path(checkpoint_dir))
        if request is None:
            finish()
        else:
            request.add_finalize_fn(finish)
    return request


@around("megatron.core.dist_checkpointing.serialization:load", why=of_scripts.WHY)
def compare_checksums(
    original: Callable[..., Any], sharded_state_dict: Any, checkpoint_dir: str, *args: Any, **kwargs: Any
) -> Any:
    """Verify checksums while loading.

    A checkpoint without checksums is loaded without verification.
    """
    sums = _VERIFIES.get() and not addresses.is_address(checkpoint_dir)
    with of_scripts.verifying(Path(checkpoint_dir) if sums else None):
        return original(sharded_state_dict, checkpoint_dir, *args, **kwargs)
