"""Mark calls of ``input`` as waits for a person."""

from __future__ import annotations

import builtins
import functools

from megatron_npu.watchdog.phases import WAITING, phase

_NAME = __name__


def make_visible() -> None:
    """Make ``input`` record that the run waits for a person. A second call has no effect."""
    plain = builtins.input
    if getattr(plain, "__module__", "") == _NAME:
        return

    @functools.wraps(plain, assigned=("__doc__", "__name__"))
    def ask(prompt: object = "", /) -> str:
        with phase(WAITING):
            return plain(prompt)

    builtins.input = ask
