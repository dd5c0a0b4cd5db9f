"""End ranks whose launcher has ended.

The ranks of a killed torchrun would otherwise continue to train.
"""

from __future__ import annotations

import contextlib
import os
import select
import sys
import threading
from collections.abc import Iterator
from typing import NoReturn

from megatron_npu.base.errors import UsageError
from megatron_npu.process import elastic_agent
from megatron_npu.watchdog import first_contact

_EXIT = 1
_PATIENCE = 2.0  # seconds from the end of a launcher's store to its own

_OF_STORE = ("DistNetworkError", "DistStoreError")  # of torch.distributed, which may not be imported
_THREAD = "megatron_npu launcher"


def end_with_launcher() -> None:
    """End this process when the elastic agent that started it ends, or has already ended (Linux only).

    Processes that were started without a launcher, or by an unknown launcher, are not affected: with
    ``nohup`` or a batch system, they intentionally outlive their parent. A second call has no effect.
    """
    # a forked child has no such thread
    watches = any(thread.name == _THREAD for thread in threading.enumerate())
    launcher = None if watches else elastic_agent.find()
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
    threading.Thread(target=_wait, args=(descriptor, launcher.pid), name=_THREAD, daemon=True).start()


@contextlib.contextmanager
def meeting() -> Iterator[None]:
    """If the ranks fail to connect inside the ``with`` block, report that the launcher has ended.

    The connection to the store may break before the thread that watches the launcher notices its end.

    Raises:
        UsageError: the ranks are on several machines that cannot reach each other, another program uses the
            port, or no store answers there.
    """
    try:
        with first_contact.made():
            yield
    except RuntimeError as error:  # torch's DistError is one
        if "EADDRINUSE" in str(error):
            raise UsageError(
                f"MASTER_PORT {os.environ.get('MASTER_PORT')} is in use by another program on this machine; "
                "the ranks need a free port of the first machine",
                remedy="Export another MASTER_PORT for all ranks.",
            ) from None
        launcher = elastic_agent.find()
        if launcher is not None and (elastic_agent.has_gone() or _ends(launcher.pid)):
            _end("its launcher")
        if type(error).__name__ in _OF_STORE:
            raise _no_store(error) from error
        raise


def _no_store(error: RuntimeError) -> UsageError:
    """Return the error for a store that no longer exists or has been replaced by another program."""
    at = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
    reason = str(error).partition("\n")[0]
    return UsageError(
        f"rank {os.environ.get('RANK')} cannot connect to the other ranks: {reason} "
        f"(MASTER_ADDR and MASTER_PORT name {at})",
        remedy="See the messages of the other ranks; if there are none, correct the address.",
    )


def _ends(launcher: int) -> bool:
    """Return True if a process ends within ``_PATIENCE`` seconds."""
    try:
        descriptor = os.pidfd_open(launcher)
    except ProcessLookupError:
        return True
    except (AttributeError, OSError):
        return False
    try:
        return bool(select.select([descriptor], [], [], _PATIENCE)[0])
    finally:
        os.close(descriptor)


def _wait(descriptor: int, launcher: int) -> None:
    select.select([descriptor], [], [])
    _end(f"its launcher (process {launcher})")


def _end(who: str) -> NoReturn:
    rank = os.environ.get("RANK", "0")
    told = f"megatron_npu: rank {rank} exits, because {who} exited first (it may have been killed)"
    with contextlib.suppress(OSError):  # nobody may read any more
        print(told, file=sys.stderr, flush=True)
    os._exit(_EXIT)
