"""Support ``--log-straggler`` and ``--rerun-mode report_stats``, and end a run at a NaN loss with an
explanation.

Patches ``megatron.core.utils:StragglerDetector``, ``megatron.core.rerun_state_machine`` and
``megatron.training.training``.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch

from megatron_npu import devices
from megatron_npu.adaptors.megatron_core.decorators import NOT_FIXED, WITHOUT_CUDA, around, wrap
from megatron_npu.base.errors import LoaderWorkerError, UnsavedStateError


@around(
    "megatron.core.utils:StragglerDetector.configure",
    devices=WITHOUT_CUDA,
    why="--log-straggler silently measures nothing if CUDA is not available; over HCCL it then broadcasts a "
    "host tensor",
)
def measure_without_cuda(original: Callable[..., None], self: Any, *args: Any, **kwargs: Any) -> None:
    """Configure the straggler detector as on CUDA, but with the events and clocks of this device."""
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
    """Make ``torch.cuda.is_available`` return True inside the ``with`` block."""
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
    """Use the caller's message as its file name.

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


@around(
    "megatron.training.training:save_checkpoint_and_time",
    upstream_bug=True,
    until=NOT_FIXED,
    why="at a NaN loss without --save, a run ends with a TypeError of os.path.join: it saves its state for "
    "examination to the folder None",
)
def say_why_it_ends(original: Callable[..., None], iteration: int, *args: Any, **kwargs: Any) -> None:
    """Raise an error that names the invalid result if there is no folder in which to save the state.

    All other callers of this function check ``--save`` themselves.

    Raises:
        UnsavedStateError: ``--save`` was not given.
    """
    from megatron.core.rerun_state_machine import get_rerun_state_machine
    from megatron.training.global_vars import get_args

    if get_args().save is not None:
        return original(iteration, *args, **kwargs)
    result = getattr(get_rerun_state_machine(), "initial_result", None)  # None on ranks that found nothing
    value = "" if result is None else f" ({torch.as_tensor(result).item()})"
    raise UnsavedStateError(
        f"the loss or a gradient of iteration {iteration + 1} is invalid{value}, so Megatron ends the run; "
        "the state was not saved, because --save was not given.",
        remedy="Add --save DIR to keep the state of this iteration for examination. If training diverges, "
        "lower --lr, or check the data; --no-check-for-nan-in-loss-and-grad continues anyway.",
    )
