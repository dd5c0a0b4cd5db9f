"""The end of the launcher: left to torch, the ranks of a torchrun that is killed train on without it."""

from __future__ import annotations

import contextlib
import os
import select
import sys
import threading
from typing import NoReturn

from megatron_npu import elastic_agent

_EXIT = 1

_watched_in = 0  # the process in which the thread runs; a forked child has none


def end_with_launcher() -> None:
    """End this process, which an elastic agent has started, as soon as that agent ends, or has. Linux only.

    A process that nobody or another launcher has started is left alone: what ``nohup`` or a batch system
    starts outlives its parent on purpose. A second call does nothing.
    """
    global _watched_in
    launcher = elastic_agent.find() if _watched_in != os.getpid() else None
    if launcher is None:
        return
    if elastic_agent.has_gone():
        _end("its launcher")
    try:
        descriptor = os.pidfd_open(launcher.pid)
    except ProcessLookupError:  # just now
        _end("its launcher")
    except (AttributeError, OSError):  # no Linux, or an old one: torchrun's own way then
        return
    _watched_in = os.getpid()
    threading.Thread(
        target=_wait, args=(descriptor, launcher.pid), name="megatron_npu launcher", daemon=True
    ).start()


def _wait(descriptor: int, launcher: int) -> None:
    select.select([descriptor], [], [])
    _end(f"its launcher (process {launcher})")


def _end(who: str) -> NoReturn:
    told = f"megatron_npu: rank {os.environ.get('RANK', '0')} ends: {who} has ended before it (killed?)"
    with contextlib.suppress(OSError):  # nobody may read any more
        print(told, file=sys.stderr, flush=True)
    os._exit(_EXIT)
