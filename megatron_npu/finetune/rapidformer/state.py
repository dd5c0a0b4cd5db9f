"""Provide the flags, the logger and the timers that users' scripts can access."""

from __future__ import annotations

import logging
import sys
from argparse import Namespace
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from megatron_npu.base.errors import UsageError
from megatron_npu.finetune.rapidformer.timers import Timers

if TYPE_CHECKING:
    from megatron_npu.finetune.rapidformer.engine import RapidformerEngine
    from megatron_npu.pretrain.flags.frozen_flags import Flags

_NAME = "megatron_npu.train"
_OF_SCRIPTS = ("load", "load_from")  # what the flags and a script mean by these differs


class ScriptArgs(Namespace):
    """The flags, in the form that scripts for PAI-Rapidformer expect.

    Values that a script sets also apply to the run.

    ``load`` is the value that scripts pass to ``from_pretrained``: the model's name if one is given, and
    otherwise the folder of ``--load``. ``load_from`` is always that folder.

    Args:
        flags: the run's flags (``arguments.parse``).
    """

    __slots__ = ("flags",)
    flags: Namespace

    def __init__(self, flags: Namespace) -> None:
        own = vars(flags)
        name, of_flags = own.get("pretrained_model_name_or_path"), own.get("load")
        self.flags = flags
        self.__dict__ |= {**own, "load_from": of_flags, "load": name or of_flags}

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if name != "flags" and name not in _OF_SCRIPTS:
            setattr(self.flags, name, value)


@dataclass
class Run:
    """A run of ``megatron-npu train`` in this process.

    Attributes:
        args: the flags of the run.
        for_scripts: the same flags as seen by scripts; created on request.
        engines: engines created during the run; a script that creates no engine trains nothing.
        driver: flags of the built-in trainer while it trains a Megatron model.
        tokenizer: tokenizer selected by the flags; created on request.
    """

    args: Namespace
    for_scripts: ScriptArgs | None = None
    engines: list[RapidformerEngine] = field(default_factory=list)
    driver: Flags | None = None
    tokenizer: Any = None


class _Process:
    """The state of this process: the current run, which all threads share, and the timers."""

    def __init__(self) -> None:
        self.run: Run | None = None
        self.timers = Timers()


_process = _Process()


def set_args(args: Namespace | None) -> None:
    """Start a run with the given flags, unless a run has already been started.

    None ends the run.
    """
    run = _process.run
    if args is None:
        _process.run = None
    elif run is None or run.args is not args:
        _process.run = Run(args)


def run() -> Run | None:
    """Return the current run of this process, or None."""
    return _process.run


def current() -> Run:
    """Return the current run of this process.

    Raises:
        UsageError: no run was started.
    """
    if _process.run is None:
        raise UsageError(
            "get_args() can only be called in a process that `megatron-npu train` started. Start the script "
            "with `megatron-npu train --user-script FILE ...`."
        )
    return _process.run


def get_args() -> ScriptArgs:
    """Return the flags of the current run in the form that scripts expect.

    Raises:
        UsageError: no run was started.
    """
    run = current()
    if run.for_scripts is None:
        run.for_scripts = ScriptArgs(run.args)
    return run.for_scripts


def get_logger(name: str | None = None) -> logging.Logger:
    """Return a logger that writes to stderr.

    Ranks other than 0 log only warnings.

    Rank 0 logs messages of ``--log-level`` and above.

    Args:
        name: appended to the logger's name.
    """
    root = logging.getLogger(_NAME)
    if not root.handlers:
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
        root.addHandler(handler)
        root.propagate = False
    if _process.run is not None:
        args = _process.run.args
        root.setLevel(logging.WARNING if args.rank else args.log_level.upper())
    return root if name is None else root.getChild(name)


def get_timers() -> Timers:
    """Return the timers of this process."""
    return _process.timers
