"""Log a run to Weights & Biases (``--wandb-project``), importing the wandb package only if this is
requested.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import psutil

from megatron_npu.base import files, given_files
from megatron_npu.base.errors import UsageError
from megatron_npu.pretrain.checkpoint.checkpoint_description import plain_arguments
from megatron_npu.pretrain.flags.plan_parts import WandbFlags

_PATIENCE = 600.0  # seconds that the end of a run waits for a server that is out of reach
_GRACE = 60.0  # seconds that wandb's service process has to take a row, or to end after _PATIENCE


class WandbRun:
    """A Weights & Biases run, with the flags as its configuration.

    Args:
        flags: the project, name and contents of the run.

    Raises:
        UsageError: no run can be started, because the user is not logged in or the server cannot be reached.
    """

    def __init__(self, flags: WandbFlags) -> None:
        import wandb

        tell_of_server("--wandb-project")
        place = Path(flags.place)
        place.mkdir(parents=True, exist_ok=True)
        further: dict[str, Any] = {"entity": flags.wandb_entity} if flags.wandb_entity else {}
        settings = getattr(wandb, "Settings", None)
        if "finish_timeout" in getattr(settings, "model_fields", {}):  # older ones wait forever
            further["settings"] = wandb.Settings(finish_timeout=_PATIENCE)
        self._failed = False
        before = {child.pid for child in psutil.Process().children()}
        try:
            self._run: Any = wandb.init(
                project=flags.wandb_project,
                name=flags.wandb_exp_name or None,
                dir=str(place),
                config=plain_arguments(vars(flags.config)),
                **further,
            )
        except Exception as error:  # of its own kinds, and of the network's
            raise UsageError(
                f"wandb could not start the run --wandb-project {flags.wandb_project}: {_words(error)}",
                remedy="Run `wandb login`, or set WANDB_MODE=offline to log to --wandb-save-dir.",
            ) from error
        self._service = [child for child in psutil.Process().children() if child.pid not in before]

    def log(self, iteration: int, numbers: Mapping[str, float]) -> None:
        """Log the values of an iteration to Weights & Biases."""
        if numbers:
            self._tried(_GRACE, self._run.log, dict(numbers), step=iteration)

    def close(self, *, went_well: bool) -> None:
        """Send the remaining data, for at most ten minutes, and report whether the run failed."""
        self._tried(_PATIENCE + _GRACE, self._run.finish, exit_code=0 if went_well else 1)
        if self._failed:
            self._give_up()

    def _tried(self, limit: float, call: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        """Call a function of the wandb package without letting its errors stop the training.

        If the call fails, log the first error and let training continue.

        If the service process does not answer within ``limit`` seconds, it is killed and the call fails.
        """
        try:
            with self._service_killed_after(limit):
                call(*args, **kwargs)
        except Exception as error:  # of its own kinds: its service has ended, its disk is full
            if not self._failed:
                print(f" Weights & Biases failed; the run continues without it: {_words(error)}", flush=True)
            self._failed = True

    @contextlib.contextmanager
    def _service_killed_after(self, seconds: float) -> Iterator[None]:
        timer = threading.Timer(seconds, self._kill_service)
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()

    def _kill_service(self) -> None:
        for process in self._service:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()

    def _give_up(self) -> None:
        """Stop the service process of a wandb run that has failed.

        At the interpreter's exit the package would otherwise wait for it without a limit, or print a
        traceback.
        """
        import wandb

        self._kill_service()
        with contextlib.suppress(Exception, SystemExit):
            wandb.teardown()


def _words(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())


def tell_of_server(flag: str) -> None:
    """Print the address of the server that wandb's settings file in the working directory selects.

    That server receives the key of the user's account.

    Args:
        flag: the flag that starts a run of wandb.

    Raises:
        UsageError: another user could have written these settings.
    """
    for folder in (".wandb", "wandb"):  # of which wandb reads one
        path = Path(os.environ.get("WANDB_DIR", ""), folder, "settings")
        if not path.is_file():
            continue
        if wrong := files.others(path) or files.others(path.parent):
            raise UsageError(
                f"{flag} reads {path} in {Path.cwd()}, which {wrong}; the settings must be "
                "writable only by this user, because they can send the account's key to another server",
                remedy="Work in another directory, remove the file, or run chmod go-w on it and its folder.",
            )
        for line in given_files.lines(path):
            name, _, value = line.partition("=")
            if name.strip() == "base_url":
                print(f" Weights & Biases: the server is {value.strip()} ({path})", flush=True)
