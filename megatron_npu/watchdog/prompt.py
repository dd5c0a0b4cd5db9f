"""``input``: a frame of ours on the stack, where ``place`` finds that the run waits for a person."""

from __future__ import annotations

import builtins
import functools

_NAME = __name__


def make_visible() -> None:
    """Give ``input`` a frame in this module, from now on. A second call does nothing."""
    plain = builtins.input
    if getattr(plain, "__module__", "") == _NAME:
        return

    @functools.wraps(plain, assigned=("__doc__", "__name__"))
    def ask(prompt: object = "", /) -> str:
        return plain(prompt)

    builtins.input = ask
