"""Support ``--log-straggler`` and ``--rerun-mode report_stats``.

Patches ``megatron.core.utils:StragglerDetector`` and ``megatron.core.rerun_state_machine``.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch

from megatron_npu import devices
from megatron_npu.adaptors.megatron_core.decorators import NOT_FIXED, WITHOUT_CUDA, around, wrap
from megatron_npu.base.errors import LoaderWorkerError


@around(
    "megatron.core.utils:StragglerDetector.configure",
    devices=WITHOUT_CUDA,
    why="--log-straggler silently measures nothing if CUDA is not available; over HCCL it then broadcasts a "
    "host tensor",
)
def measure_without_cuda(original: Callable[..., None], self: Any, *args: Any, **kwargs: Any) -> None:
    """Configure the straggler detector as on CUDA, with the events and clocks of this device."""
    with _claiming_cuda():
        original(self, *args, **kwargs)
    self.dev = devices.current().torch_device()


@around(
    "megatron.core.utils:StragglerDetector.__exit__",
    upstream_bug=True,
    until=NOT_FIXED,
    why="Ctrl-C while a batch is loaded is logged as a Python list of its traceback's lines",
)
def leave_without_a_word(
    original: Callable[..., bool], self: Any, ex_type: type[BaseException] | None, ex_val: Any, ex_tb: Any
) -> bool:
    """Exit without a message, because the code that ends the run logs the reason."""
    if ex_type is None or (issubclass(ex_type, Exception) and not issubclass(ex_type, LoaderWorkerError)):
        return original(self, ex_type, ex_val, ex_tb)
    return original(self, None, None, None)


@contextlib.contextmanager
def _claiming_cuda() -> Iterator[None]:
    """Make ``torch.cuda.is_available`` return True within the block."""
    answer = torch.cuda.is_available
    torch.cuda.is_available = lambda: True
    try:
        yield
    finally:
        torch.cuda.is_available = answer


@wrap(
    "megatron.core.rerun_state_machine:Caller",
    versions=">=0.14",
    upstream_bug=True,
    until=NOT_FIXED,
    why=("upstream's statistics report reads the file and line that 0.14 removed from this class, and fails"),
)
def with_place(original: Any) -> type[tuple]:
    """Use the message as the file name.

    Since 0.14, the file name distinguishes the calls of ``validate_result``.
    """

    class Caller(original):
        __slots__ = ()
        # ranks exchange them by pickle, which looks the class up by name
        __module__, __qualname__ = original.__module__, original.__qualname__

        @property
        def filename(self) -> str:
            return f"'{self.message}'"

        @property
        def lineno(self) -> Any:
            return "unknown"

    return Caller
