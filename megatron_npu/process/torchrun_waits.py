"""Log which machines torchrun is waiting for.

By itself, torchrun logs only C++ messages for up to fifteen minutes.

torchrun imports torch, and torch's entry point imports this package, before ranks exist. If torchrun will
start this package's commands on several machines, a thread connects to the address that torchrun was given,
logs what is wrong, and ends torchrun when the wait is over.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from megatron_npu.base import digits
from megatron_npu.base.errors import UsageError
from megatron_npu.process import meeting_place

_THREAD = "megatron_npu rendezvous"
_PROGRAMS = ("megatron_npu", "megatron-npu")
_LAUNCHERS = ("torch.distributed.run", "torchrun")
_RUN = "TORCHELASTIC_RUN_ID"  # what torchrun tells its ranks
_PORT = "29500"  # torchrun's default
_TIMEOUTS = ("timeout", "join_timeout")  # of --rdzv-backend static, and of c10d
_EXIT = 1  # torchrun's code for every failure
_PAUSE = 1.0


def watch() -> None:
    """Start the thread that logs missing machines, if this process is a torchrun that waits for machines.

    A second call has no effect.
    """
    words = _options(sys.orig_argv)
    if words and not any(thread.name == _THREAD for thread in threading.enumerate()):
        threading.Thread(target=_wait, args=(words,), name=_THREAD, daemon=True).start()


def _options(command: Sequence[str]) -> list[str]:
    """Return torchrun's own options, if the command line starts this package with torchrun.

    Otherwise the result is empty.
    """
    launcher = next((n for n, word in enumerate(command) if Path(word).name in _LAUNCHERS), None)
    program = next((n for n, word in enumerate(command) if Path(word).name in _PROGRAMS), None)
    if launcher is None or program is None or program < launcher:
        return []
    return list(command[launcher + 1 : program])


def _wait(words: Sequence[str]) -> None:
    place = _place(words)
    if place is None:
        return
    own = replace(place, host="127.0.0.1") if place.serves else place
    try:
        if not _is_of_several(words):
            meeting_place.require_no_other_program(place)
            _watch_until_ranks_start(place)
            return
        # a store that torchrun has not started yet is not an error
        while place.serves and not meeting_place.answers(own.host, own.port):
            meeting_place.require_no_other_program(own)
            time.sleep(_PAUSE)
        meeting_place.connected(place, lambda: None)
        if place.serves:
            meeting_place.joined(place, _has_started_ranks)
        else:
            _watch_until_ranks_start(place)
    except UsageError as error:
        print(f"megatron_npu: error: {error}", file=sys.stderr, flush=True)
        os._exit(_EXIT)


def _watch_until_ranks_start(place: meeting_place.Place) -> None:
    """End torchrun if the store stops answering before there are ranks."""
    with meeting_place.watched(place, _EXIT):
        while _has_started_ranks():
            time.sleep(_PAUSE)


def _has_started_ranks() -> str:
    """Describe the machines that torchrun still waits for.

    The result is empty once torchrun has started its ranks.

    Other children, such as those of torch_npu, do not have the ranks' variables.
    """
    import psutil

    for child in psutil.Process().children():
        with contextlib.suppress(psutil.Error, OSError):
            if _RUN in child.environ():
                return ""
    return "the other machines"


def _place(words: Sequence[str]) -> meeting_place.Place | None:
    """Return the rendezvous address of a job on several machines or of a ``c10d`` job on one machine.

    Return None on a single machine without such an address, and for other rendezvous backends.
    """
    backend = _value(words, "rdzv-backend", "static")
    if "--standalone" in words or not (_is_of_several(words) or backend == "c10d"):
        return None
    name, endpoint = "--rdzv-endpoint", _value(words, "rdzv-endpoint", "")
    if not endpoint:
        name, master = "--master-addr:--master-port", _value(words, "master-addr", "127.0.0.1")
        endpoint = f"{master}:{_value(words, 'master-port', _PORT)}"
    host, _, port = endpoint.rpartition(":")
    number = digits.number(port)
    if not host or not number or backend not in ("static", "c10d"):
        return None
    machine, own, patience = _value(words, "node-rank", "0"), socket.gethostname(), _patience(words)
    if backend == "c10d":  # the machine that has the address serves the store
        serves = meeting_place.is_of_this_machine(host)
        return meeting_place.Place(f"torchrun on {own}", host, number, serves, False, name, patience)
    serves = machine == "0"
    who = f"torchrun on machine {machine} ({own})"
    return meeting_place.Place(who, host, number, serves, not serves, name, patience)


def _is_of_several(words: Sequence[str]) -> bool:
    return (digits.number(_value(words, "nnodes", "1").rpartition(":")[2]) or 0) > 1


def _patience(words: Sequence[str]) -> float:
    """Return the longest wait, in seconds, that ``--rdzv-conf`` specifies (``join_timeout=1800``), or 0."""
    pairs = (pair.partition("=") for pair in _value(words, "rdzv-conf", "").split(","))
    waits = (value.strip() for name, _, value in pairs if name.strip() in _TIMEOUTS)
    return float(max((digits.number(wait) or 0 for wait in waits), default=0))


def _value(words: Sequence[str], name: str, default: str) -> str:
    """Return the value of an option of torchrun.

    torchrun also reads ``PET_…`` variables, and accepts both - and _ in names.
    """
    found = os.environ.get(f"PET_{name.replace('-', '_').upper()}", default)
    for number, word in enumerate(words):
        option, _, value = word.partition("=")
        if option.replace("_", "-") == f"--{name}":
            found = value if "=" in word else "".join(words[number + 1 : number + 2])
    return found
