"""Processes that load data: what they hand over has no name, and one that is killed is told in a line."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

from torch.utils.data import dataloader
from torch.utils.data._utils import signal_handling

from megatron_npu.devices import nameless_sharing
from megatron_npu.devices.base import Replacement
from megatron_npu.devices.replaced import Replaced
from megatron_npu.errors import LoaderWorkerError

_replaced = Replaced()


def begin() -> None:
    """Change torch's loaders of this process, and of those that it forks; a second time nothing happens."""
    if not _replaced:
        for owner, name, value in (*nameless_sharing.replacements(), *_failures()):
            _replaced.set(owner, name, value)


def end() -> None:
    """Leave loaders as torch has them."""
    _replaced.undo()


def _failures() -> Iterator[Replacement]:
    """Yield what tells of a dead worker: at its signal, in any line of the main thread, or at a batch."""
    yield signal_handling, "_error_if_any_worker_fails", _told(signal_handling._error_if_any_worker_fails)
    iterator = dataloader._MultiProcessingDataLoaderIter
    yield iterator, "_try_get_data", _told(iterator._try_get_data)


def _told(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function whose error of a dead worker is ``LoaderWorkerError``."""

    @functools.wraps(function)
    def told(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except RuntimeError as error:
            if not str(error).startswith("DataLoader worker"):
                raise
            raise LoaderWorkerError(" ".join(str(error).split())) from error.__cause__

    return told
