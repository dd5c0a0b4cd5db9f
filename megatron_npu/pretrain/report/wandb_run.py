"""Log to Weights & Biases (``--wandb-project``); the package is imported only if requested."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from megatron_npu.base import files
from megatron_npu.base.errors import UsageError
from megatron_npu.pretrain.checkpoint.checkpoint_description import plain_arguments
from megatron_npu.pretrain.flags.plan_parts import WandbFlags

_PATIENCE = 600.0  # seconds that the end of a run waits for a server that is out of reach


class WandbRun:
    """The Weights & Biases run, with the flags as its configuration.

    Args:
        flags: project, name and contents of the run.

    Raises:
        UsageError: no run can be started, because the user is not logged in or the server cannot be reached.
    """

    def __init__(self, flags: WandbFlags) -> None:
        import wandb

        _tell_of_server()
        place = Path(flags.place)
        place.mkdir(parents=True, exist_ok=True)
        further: dict[str, Any] = {"entity": flags.wandb_entity} if flags.wandb_entity else {}
        settings = getattr(wandb, "Settings", None)
        if "finish_timeout" in getattr(settings, "model_fields", {}):  # older ones wait for ever
            further["settings"] = wandb.Settings(finish_timeout=_PATIENCE)
        self._failed = False
        try:
            self._run: Any = wandb.init(
                project=flags.wandb_project,
                name=flags.wandb_exp_name,
                dir=str(place),
                config=plain_arguments(flags.config),
                **further,
            )
        except Exception as error:  # of its own kinds, and of the network's
            raise UsageError(
                f"--wandb-project {flags.wandb_project}: {_words(error)}",
                "a run that wandb can start",
                "Run `wandb login`, or set WANDB_MODE=offline to log to --wandb-save-dir.",
            ) from error

    def log(self, iteration: int, numbers: Mapping[str, float]) -> None:
        """Log the values of an iteration."""
        if numbers:
            self._tried(self._run.log, dict(numbers), step=iteration)

    def close(self, *, went_well: bool) -> None:
        """Flush remaining data, for at most ten minutes, and report whether the run failed."""
        self._tried(self._run.finish, exit_code=0 if went_well else 1)

    def _tried(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        """Call the package; log its first error, and let the training continue."""
        try:
            call(*args, **kwargs)
        except Exception as error:  # of its own kinds: its service has ended, its disk is full
            if not self._failed:
                print(f" Weights & Biases failed; training continues without it: {_words(error)}", flush=True)
            self._failed = True


def _words(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())


def _tell_of_server() -> None:
    """Print the server that wandb's settings in the working directory select.

    That server receives the account's key.

    Raises:
        UsageError: another user could have written these settings.
    """
    for folder in (".wandb", "wandb"):  # of which wandb reads one
        path = Path(os.environ.get("WANDB_DIR", ""), folder, "settings")
        if not path.is_file():
            continue
        if wrong := files.others(path) or files.others(path.parent):
            raise UsageError(
                f"--wandb-project with {path} in {Path.cwd()}, which {wrong}",
                "settings that this user alone can write: they can send the account's key to another server",
                "Work in another directory, remove the file, or run chmod go-w on it and its folder.",
            )
        for line in files.lines(path):
            name, _, value = line.partition("=")
            if name.strip() == "base_url":
                print(f" Weights & Biases: the server is {value.strip()} ({path})", flush=True)
