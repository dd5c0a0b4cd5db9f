"""Warn if a PyTorch program that starts one process per GPU runs on a machine without GPUs.

``torch.multiprocessing.spawn(main, nprocs=torch.cuda.device_count())`` then starts nothing and succeeds: the
program ends with exit code 0 without training. If Megatron is imported, or the program is redirected,
``torch.cuda`` counts this machine's devices instead.
"""

from __future__ import annotations

import functools
import inspect
import logging
import sys
from collections.abc import Callable
from typing import Any

from megatron_npu.base import settings
from megatron_npu.base.replaced import Replaced

_logger = logging.getLogger(__name__)
_replaced = Replaced()


def watch(count_npus: Callable[[], int]) -> None:
    """Make ``torch.multiprocessing.spawn`` warn if a program asks it to start no processes.

    A second call has no effect.

    Args:
        count_npus: returns the number of NPUs that this process can use. It is called only for a warning.
    """
    module = sys.modules.get("torch.multiprocessing")
    if module is None or _replaced:
        return
    original, signature = module.spawn, inspect.signature(module.spawn)

    @functools.wraps(original)
    def spawn(*args: Any, **kwargs: Any) -> Any:
        if signature.bind(*args, **kwargs).arguments.get("nprocs") == 0:
            _logger.warning("%s", explanation(sys.modules["torch"].cuda.device_count(), count_npus))
        return original(*args, **kwargs)

    _replaced.set(module, "spawn", spawn)


def explanation(gpus: int, count_npus: Callable[[], int]) -> str:
    """Return the warning for a machine with so many CUDA devices."""
    said = "torch.multiprocessing.spawn was called with nprocs=0 and starts no process."
    if gpus:
        return f"{said} This machine has {_counted(gpus, 'CUDA device')}."
    npus = count_npus()
    reason, target = ("no CUDA device", "this machine's CPU")
    if npus:
        reason = f"no CUDA device, but {_counted(npus, 'NPU')}"
        target = "the NPUs" if npus > 1 else "the NPU"
    return (
        f"{said} If nprocs is torch.cuda.device_count(), the reason is that this machine has {reason}. To "
        f"map torch.cuda to {target}, set {settings.REDIRECT.name}=1, or start the program with "
        "`megatron-npu run --redirect`."
    )


def _counted(number: int, what: str) -> str:
    return f"{number} {what}{'s' if number > 1 else ''}"


def leave() -> None:
    """Restore the original ``torch.multiprocessing.spawn``."""
    _replaced.undo()
