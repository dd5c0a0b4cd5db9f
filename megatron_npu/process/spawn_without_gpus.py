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
from typing import Any

from megatron_npu.base import settings
from megatron_npu.base.replaced import Replaced

_logger = logging.getLogger(__name__)
_replaced = Replaced()


def watch() -> None:
    """Make ``torch.multiprocessing.spawn`` warn if a program asks it to start no processes.

    A second call has no effect.
    """
    module = sys.modules.get("torch.multiprocessing")
    if module is None or _replaced:
        return
    original, signature = module.spawn, inspect.signature(module.spawn)

    @functools.wraps(original)
    def spawn(*args: Any, **kwargs: Any) -> Any:
        if signature.bind(*args, **kwargs).arguments.get("nprocs") == 0:
            _logger.warning(
                "torch.multiprocessing.spawn was called with nprocs=0 and starts no process. "
                "If nprocs is torch.cuda.device_count(), the reason is that this machine has "
                "no CUDA device. To map torch.cuda to this machine's device, set %s=1, or "
                "start the program with `megatron-npu run --redirect`.",
                settings.REDIRECT.name,
            )
        return original(*args, **kwargs)

    _replaced.set(module, "spawn", spawn)


def leave() -> None:
    """Restore the original ``torch.multiprocessing.spawn``."""
    _replaced.undo()
