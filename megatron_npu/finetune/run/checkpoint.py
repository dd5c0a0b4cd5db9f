"""Save and load checkpoints with ``torch.distributed.checkpoint``, from which a run resumes bitwise
identically within an epoch.

Each checkpoint is written to a hidden folder, which is renamed once every rank is done; then the tracker file
is updated, as in Megatron. Weights are stored under their names in the user's module, so that a run can
resume with different sharding or a different number of ranks. Random states are restored only if the number
of ranks is the same.
"""

from __future__ import annotations

import contextlib
import json
import pickle
import random
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter

from megatron_npu import devices, watchdog
from megatron_npu.base import files, settings
from megatron_npu.base.errors import UsageError
from megatron_npu.checkpoint_files import checksums, disks, shared_folder
from megatron_npu.finetune.model.prepare import Prepared
from megatron_npu.finetune.run import resume_changes
from megatron_npu.finetune.run.flag_parts import BeginFlags, LoadFlags, SaveFlags
from megatron_npu.pretrain.checkpoint import (
    checkpoint_description,
    checkpoint_failures,
    checkpoint_files,
    checkpoint_folder,
)
from megatron_npu.pretrain.flags.checks import logs_and_checkpoints
from megatron_npu.safe_files import safe_load, torch_readers

DESCRIPTION = checkpoint_files.DESCRIPTION_OF_TRAIN
_SAME = {  # what decides which samples an iteration has
    "global_batch_size": "--global-batch-size",
    "seed": "--seed",
    "train_samples": "the number of training samples",
}


@watchdog.phase(watchdog.SAVING)
def save(flags: SaveFlags, prepared: Prepared, iteration: int) -> Path:
    """Write the checkpoint of an iteration, and return its folder. All ranks must call this function.

    Raises:
        UnsavedError: the checkpoint could not be written.
    """
    try:
        with checkpoint_folder.writing(flags.save, iteration) as part:
            _write(flags, prepared, iteration, part)
    except checkpoint_failures.FAILURES as error:
        raise checkpoint_failures.unsaved(error, iteration, flags.save) from error
    return checkpoint_files.directory(flags.save, iteration)


def _write(flags: SaveFlags, prepared: Prepared, iteration: int, part: Path) -> None:
    content = {"train": prepared.state_dict(), "random": {str(flags.rank): _random_states()}}
    dcp.save(content, storage_writer=FileSystemWriter(part))
    if flags.rank == 0:
        version = {checkpoint_description.FORMAT: checkpoint_description.VERSION}
        description = version | {"iteration": iteration, "arguments": vars(flags.all_flags)}
        files.write(part / DESCRIPTION, json.dumps(description, indent=1, default=str))
    dist.barrier()
    checksums.write(part)


def require_there(flags: BeginFlags) -> None:
    """Check that the ``--load`` folder contains a checkpoint, before anything is loaded.

    ``--load`` may also be the ``--save`` folder of a first run, which is still empty, or, without a model
    name, the folder of a Transformers model that a script passes to ``from_pretrained``.

    Raises:
        UsageError: there is no checkpoint, or the path is a file.
    """
    if not flags.load:
        return
    folder = Path(flags.load)
    of_transformers = not flags.pretrained_model_name_or_path and (folder / "config.json").is_file()
    begins = logs_and_checkpoints.same_directory(flags.load, flags.save) or (
        flags.user_script and of_transformers
    )
    if folder.exists() and not folder.is_dir():
        raise UsageError(
            f"--load must be a folder that a run wrote with --save, but {folder} is a file. Use another path."
        )
    if not flags.load_last_good and checkpoint_files.newest(folder) is None and not begins:
        raise UsageError(
            f"--load {folder} contains no checkpoint; it must be the --save folder of this run, or another "
            f"folder with the file {checkpoint_files.TRACKER}. {checkpoint_files.right_folder(folder)}, or "
            "remove --load; pass initial weights with --pretrained-model-name-or-path."
        )


@watchdog.phase("loading")
def load(flags: LoadFlags, prepared: Prepared) -> tuple[int, list[str]]:
    """Load the newest checkpoint from the ``--load`` folder.

    With --load-last-good, load the newest undamaged checkpoint.

    All ranks must call this function.

    Returns:
        The iteration to resume from (0 if there is no checkpoint), and the log lines.

    Raises:
        UsageError: the checkpoint is damaged, or belongs to another model or other data.
    """
    whole = checksums.newest_whole(flags.load) if flags.load_last_good else None
    place = checkpoint_files.newest(flags.load, whole)
    shared_folder.require_same("--load", flags.load, place.name if place else None)
    if place is None:
        return 0, [f"there is no checkpoint in {flags.load} yet: starting from scratch"]
    found = _description(place)
    _require_same_data(vars(flags.all_flags), found["arguments"], place)
    said = [f"loaded {place}; resuming from iteration {found['iteration']}"]
    said += resume_changes.since(vars(flags.all_flags), found["arguments"], place, prepared)
    content: dict[str, Any] = {"train": prepared.state_dict()}
    if found["arguments"].get("mixed_precision") != "fp16":
        content["train"].pop("loss_scale", None)  # the checkpoint has none
    same_ranks = found["arguments"].get("world_size") == flags.world_size
    if same_ranks:
        content["random"] = {str(flags.rank): _random_states()}
    else:
        said.append("the number of ranks has changed, so random numbers start again from --seed")
    with disks.whole(place), checksums.verifying(place), _reading(place):
        reader = FileSystemReader(place)
        _require_same_weights(reader, content["train"]["model"], place)
        dcp.load(content, storage_reader=reader)
    prepared.load_state_dict(content["train"])
    if same_ranks:
        _set_random_states(content["random"][str(flags.rank)])
    return found["iteration"], said


def _description(place: Path) -> dict[str, Any]:
    """Return the description of the run that the checkpoint contains.

    Raises:
        UsageError: the description cannot be read.
    """
    path = place / DESCRIPTION
    try:
        found = json.loads(files.text(path))
        checkpoint_description.require_known_format(path, found)
        if type(found["iteration"]) is not int or not isinstance(found["arguments"], dict):
            raise ValueError("the file does not describe a training run")
        return found
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise UsageError(
            f"--load: {path} is not the description of a checkpoint that `megatron-npu train` saved: "
            f"{reason}. To start from trained weights, pass their folder to --pretrained-model-name-or-path."
        ) from error


def _require_same_data(given: Mapping[str, Any], saved: Mapping[str, Any], place: Path) -> None:
    for name, flag in _SAME.items():
        if name in saved and saved[name] != given[name]:
            raise UsageError(
                f"{flag} is {given[name]}, but it was {saved[name]} in {place}; it must not change, "
                "because it determines the samples of each iteration. Pass the flags of the original run, "
                "or start again from the trained weights."
            )


def _require_same_weights(reader: FileSystemReader, model: dict[str, Any], place: Path) -> None:
    """Check that the weights in the checkpoint have the names and shapes of the model's weights.

    torch itself reports only missing weights.

    Raises:
        UsageError: a weight differs; the error names the first one.
    """
    metadata, prefix = reader.read_metadata().state_dict_metadata, "train.model."
    saved = {
        name.removeprefix(prefix): list(getattr(entry, "size", []))
        for name, entry in metadata.items()
        if name.startswith(prefix)
    }
    wanted = {
        name: list(value.shape) if isinstance(value, torch.Tensor) else [] for name, value in model.items()
    }
    differing = sorted(name for name in saved.keys() | wanted.keys() if saved.get(name) != wanted.get(name))
    if differing:
        name = differing[0]
        raise UsageError(
            f"{place} contains a different model: {name} is {saved.get(name, 'missing')} in the checkpoint "
            f"and {wanted.get(name, 'missing')} in this run. Pass the model and the switches of the run "
            "that saved it, or load another checkpoint."
        )


@contextlib.contextmanager
def _reading(place: Path) -> Iterator[None]:
    """Prevent code in a checkpoint from being executed while the ``with`` block reads the checkpoint.

    Raises:
        UsageError: the checkpoint is damaged, or contains an object that must not be created.
    """
    guards = not settings.TRUST_FILES.enabled() and not torch_readers.guarding()
    if guards:
        torch_readers.guard(of_megatron=False)
    try:
        yield
    except UsageError:
        raise
    except pickle.UnpicklingError as error:
        raise torch_readers.refusal(f"the checkpoint {place}", safe_load.refused_name(error)) from error
    # a torn file is a ValueError to JSON, a RuntimeError or EOFError to torch
    except (OSError, CheckpointException, ValueError, RuntimeError, EOFError, KeyError) as error:
        refused = torch_readers.last_refusal()
        raise refused or UsageError(
            f"the checkpoint {place} cannot be read: {checkpoint_failures.reason(error)}. It must be a "
            "complete checkpoint of the same model. To load an older checkpoint, write its iteration into "
            f"{place.parent / checkpoint_files.TRACKER}."
        ) from error
    finally:
        if guards:
            torch_readers.release()


def _random_states() -> dict[str, torch.Tensor]:
    """Return the states of this rank's random number generators as bytes."""
    device = devices.current()
    of_numpy = np.random.get_state(legacy=False)
    assert isinstance(of_numpy, dict)
    inner = of_numpy["state"]
    plain = {**of_numpy, "state": {name: np.asarray(value).tolist() for name, value in inner.items()}}
    return {
        "python": _bytes(random.getstate()),
        "numpy": _bytes(plain),
        "host": device.host_rng_state(),
        "device": device.rng_state(),
    }


def _set_random_states(states: dict[str, torch.Tensor]) -> None:
    device = devices.current()
    try:
        version, numbers, gauss = _value(states["python"])
        random.setstate((version, tuple(numbers), gauss))
        of_numpy = _value(states["numpy"])
        of_numpy["state"]["key"] = np.asarray(of_numpy["state"]["key"], np.uint32)
        np.random.set_state(of_numpy)
    except (TypeError, AttributeError, OverflowError) as error:
        raise ValueError(f"the random-generator states are invalid ({error})") from error
    device.set_host_rng_state(states["host"])
    device.set_rng_state(states["device"])


_LENGTH = 1 << 14  # bytes of a state as JSON, more than twice what it needs: its digits change, this does not


def _bytes(value: Any) -> torch.Tensor:
    """Encode a value as JSON in a byte tensor, uint8 ``[_LENGTH]``."""
    text = json.dumps(value).encode().ljust(_LENGTH)
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)


def _value(content: torch.Tensor) -> Any:
    return json.loads(bytes(content.tolist()))
