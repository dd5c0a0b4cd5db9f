"""The decorators of ``patching``, with this host filled in, and rows for what needs no patch any more."""

from __future__ import annotations

import sys
from functools import partial
from typing import Any

from megatron_npu.patching.record import ALL_DEVICES, registry

HOST = "megatron_lm"
WITHOUT_CUDA = ("npu", "cpu")

replace = partial(registry.replace, host=HOST)
wrap = partial(registry.wrap, host=HOST)
constant = partial(registry.constant, host=HOST)


def unnecessary(target: str, *, why: str, devices: tuple[str, ...] = ALL_DEVICES) -> None:
    """Record that ``target``, which earlier ports had to replace, runs as upstream wrote it.

    The ledger shows the row as skipped, and its pin is still compared: if upstream changes the function,
    ``check`` tells, and the reason has to be thought over.
    """

    def keep(original: Any) -> Any:
        return original

    keep.__module__, keep.__qualname__ = sys._getframe(1).f_globals["__name__"], "unnecessary"
    wrap(target, why=why, devices=devices, condition=lambda: "upstream's own works here")(keep)
