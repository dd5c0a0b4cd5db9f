"""Read and write a checkpoint's ``arguments.json``, which contains the flags, the position and the format.

Reading it requires neither torch nor Megatron. Fields may be added: older versions ignore new fields, and
newer versions have defaults for descriptions that lack them. A change that older versions would misread
increases the first number of the format.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from megatron_npu.base import digits, files
from megatron_npu.base.errors import UsageError
from megatron_npu.pretrain.checkpoint import checkpoint_files

FORMAT = "format"  # the field of the format's version; descriptions before 1.0 had none, and are alike
VERSION = "1.0"
# Of fields that a description may lack; without the others nobody knows where a run continues, or with what.
_DEFAULTS: dict[str, Any] = {
    "consumed_valid_samples": 0,
    "has_optimizer": True,  # one that lacks it after all says so when it is loaded
    "has_rng": True,
    "optimizer_sharding": None,
}


@dataclass(frozen=True)
class CheckpointInfo:
    """A checkpoint on disk.

    Attributes:
        path: its directory.
        iteration: the number of trained iterations.
        consumed_train_samples, consumed_valid_samples: the position in the data.
        has_optimizer, has_rng: whether it contains the optimizer state and the random states.
        optimizer_sharding: megatron-core's name for the sharding of a distributed optimizer, or None.
        arguments: the flags of the run that wrote it, with derived values.
    """

    path: Path
    iteration: int
    consumed_train_samples: int
    consumed_valid_samples: int
    has_optimizer: bool
    has_rng: bool
    optimizer_sharding: str | None
    arguments: dict[str, Any]

    @property
    def is_own(self) -> bool:
        """True if the checkpoint was saved by the built-in trainer rather than by a Megatron-LM script."""
        return (self.path / checkpoint_files.DESCRIPTION).is_file()


def find(root: str | Path, step: int | None = None) -> CheckpointInfo | None:
    """Return the newest checkpoint under ``root``, or the checkpoint of the given iteration.

    Return None if there is no such checkpoint.

    Raises:
        UsageError: the checkpoint that the tracker or ``step`` names does not exist, or has no readable
            description.
    """
    place = checkpoint_files.newest(root, step)
    return None if place is None else _read(place)


def existing(root: str | Path, step: int | None = None) -> CheckpointInfo:
    """Return the newest checkpoint under ``root``, or the checkpoint of the given iteration.

    Raise an error if there is no such checkpoint.

    Raises:
        UsageError: the checkpoint does not exist or cannot be read.
    """
    found = find(root, step)
    if found is None:
        raise checkpoint_files.no_checkpoint(root)
    return found


def _read(path: Path) -> CheckpointInfo:
    description = path / checkpoint_files.DESCRIPTION
    try:
        values = json.loads(files.text(description))
        require_known_format(description, values)
        found = CheckpointInfo(path=path, **_fields(values))
        _require_sound(found)
        return found
    except (OSError, ValueError, TypeError, RecursionError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise UsageError(
            f"{description} is not a description file that `megatron-npu pretrain` wrote: {reason}",
            remedy="Load a checkpoint of `megatron-npu pretrain`.",
        ) from error


def require_known_format(description: Path, values: object) -> None:
    """Check that this version is able to read the format of a checkpoint's description.

    Only the first number of the format must match.

    Args:
        description: the path of the description.
        values: the content of the description.

    Raises:
        UsageError: a newer version wrote the description.
        ValueError, TypeError: the content is not a description.
    """
    if not isinstance(values, Mapping):
        raise TypeError("the file does not describe a training run")
    saved = values.get(FORMAT, VERSION)
    first, second = (digits.number(part) for part in str(saved).partition(".")[::2])
    if first is None or second is None:
        raise ValueError(f"{FORMAT} must be a version number, but it is {saved!r}")
    if first > int(VERSION.partition(".")[0]):
        raise UsageError(
            f"{description} has format {saved}, but this version of megatron_npu reads only format "
            f"{VERSION.partition('.')[0]}.x",
            remedy="Use the version that saved the checkpoint, or a newer one.",
        )


def _fields(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of ``CheckpointInfo`` other than its path.

    Unknown fields from newer versions are skipped.

    Raises:
        ValueError: a field without a default is missing.
    """
    known = {each.name for each in fields(CheckpointInfo)} - {"path"}
    found = _DEFAULTS | {name: value for name, value in values.items() if name in known}
    if missing := sorted(known - found.keys()):
        raise ValueError(f"the file has no {', '.join(missing)}")
    return found


def _require_sound(found: CheckpointInfo) -> None:
    """Check that the values in a checkpoint's description are plausible.

    Raises:
        ValueError: a value is implausible; the error names it.
    """
    for name in ("iteration", "consumed_train_samples", "consumed_valid_samples"):
        value = getattr(found, name)
        if type(value) is not int or value < 0:
            raise ValueError(f"{name} must be a non-negative integer, but is {value!r}")
    if not isinstance(found.arguments, dict) or "num_layers" not in found.arguments:
        raise ValueError("the arguments in the file do not describe a model")
    for name, value in found.arguments.items():
        if isinstance(value, str) and "\0" in value:
            raise ValueError(f"{name} contains a null byte")


def describe(path: Path, found: CheckpointInfo) -> None:
    """Write the description of a checkpoint to ``path``."""
    values = {name: value for name, value in vars(found).items() if name != "path"}
    files.write(path / checkpoint_files.DESCRIPTION, json.dumps({FORMAT: VERSION, **values}, indent=1))


def plain_arguments(flags: Mapping[str, Any]) -> dict[str, Any]:
    """Return the flags whose values JSON can represent, except those specific to this machine or process."""
    local = {"rank", "local_rank", "load_from", "load_optim", "load_rng"}
    return {name: value for name, value in sorted(flags.items()) if name not in local}
