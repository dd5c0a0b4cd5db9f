"""Wait for the rendezvous store at MASTER_ADDR:MASTER_PORT, and explain why it does not answer.

A wrong address looks like a first machine that has not started yet: torch retries both for ten to fifteen
minutes, and logs only C++ messages. Here a line every 20 seconds states the address, the number of attempts,
the reason and what to check; the wait is limited (``MEGATRON_NPU_RENDEZVOUS_TIMEOUT``), and short if the
address cannot be right.

torch's client waits without a limit for the answer of a program that accepts its connection. So a ping and a
sum in torch's protocol are sent first, on a connection that has a limit, and again while torch connects.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeVar

from megatron_npu.base import settings
from megatron_npu.base.errors import UsageError

_T = TypeVar("_T")
_SAY = 20.0  # seconds between two lines
_TRY = 5.0  # seconds for one connection
_ANSWER = 10.0  # seconds for the answer to a ping
_PAUSE = 0.5
_LIMIT = 600.0  # seconds for the first machine to serve its store, and for the others to come; as torch
_WRONG = 60.0  # seconds, if the address seems wrong; the name of a new pod may not resolve at once
_PING = struct.Struct("=BIBI")  # of torch's TCPStore since 2.4: two queries, each with a number
_VALIDATE, _MAGIC, _QUERY = 0, 0x3C85F7CE, 13
_ADD, _DELETE = 4, 8  # queries with a key
_FOREIGN = "the program there is not the run's store: "
_STOPPED = "it no longer answers as the run's store: "
_EXIT = 2  # of a rank


class NoAnswerError(UsageError):
    """Raised when a rendezvous store does not answer in time."""


@dataclass(frozen=True)
class Place:
    """The address of a run's rendezvous store, and the process that waits for it.

    Attributes:
        who: the rank or machine that waits, with its host name.
        host, port: the address.
        serves: whether this process serves the store; it does so already.
        elsewhere: whether the store is on another machine.
        name: where the address comes from.
        patience: seconds that the launcher was told to wait, if that is more than the default; otherwise 0.
    """

    who: str
    host: str
    port: int
    serves: bool
    elsewhere: bool
    name: str = "MASTER_ADDR:MASTER_PORT"
    patience: float = 0.0

    def __str__(self) -> str:
        return f"{self.name} {self.host}:{self.port}"


def patience_for_others(told: float = 0.0) -> float:
    """Return the number of seconds that the first machine waits for the other machines."""
    return _given() or max(_LIMIT, told)


def connected(place: Place, connect: Callable[[], _T], *, speaks: bool = True) -> _T:
    """Call ``connect`` as soon as a store answers at the address, and return the result.

    Args:
        place: the address.
        connect: opens the connection; while it raises a RuntimeError or an OSError, the wait continues.
        speaks: whether this process logs that it waits.

    Raises:
        NoAnswerError: nothing answers in time.
    """
    found: list[_T] = []

    def refusal() -> str:
        reason = _refusal(place.host, place.port)
        if not reason:
            try:
                found.append(connect())
            except (RuntimeError, OSError) as error:
                return _FOREIGN + str(error).strip().partition("\n")[0]
        return reason

    _wait(place, refusal, speaks)
    return found[0]


def require_no_other_program(place: Place, *, speaks: bool = True) -> None:
    """Wait while another program answers at the address, because the store may start there later.

    Raises:
        NoAnswerError: the program is still there when the wait is over.
    """

    def refusal() -> str:
        reason = _refusal(place.host, place.port)
        return reason if reason.startswith(_FOREIGN) else ""

    _wait(place, refusal, speaks)


@contextlib.contextmanager
def watched(place: Place, code: int = _EXIT) -> Iterator[None]:
    """End this process if the store stops answering while the ``with`` block runs.

    torch's client may wait for an answer without a limit. It notices a store that is gone.

    Args:
        place: the address of the store.
        code: the exit code.
    """
    is_over = threading.Event()
    name = "megatron_npu store"
    threading.Thread(target=_watch, args=(place, is_over, code), name=name, daemon=True).start()
    try:
        yield
    finally:
        is_over.set()


def _watch(place: Place, is_over: threading.Event, code: int) -> None:
    def refusal() -> str:
        reason = "" if is_over.is_set() else _refusal(place.host, place.port)
        return reason.replace(_FOREIGN, _STOPPED) if reason.startswith(_FOREIGN) else ""

    while not is_over.wait(_SAY):
        try:
            _wait(place, refusal, speaks=False)
        except NoAnswerError as error:
            print(f"megatron_npu: error: {error}", file=sys.stderr, flush=True)
            os._exit(code)


def _wait(place: Place, refusal: Callable[[], str], speaks: bool) -> None:
    began = said = time.monotonic()
    attempts = 0
    while True:
        attempts += 1
        reason = refusal()
        if not reason:
            return
        now = time.monotonic()
        hint, patience = _hint(place)
        foreign = reason.startswith((_FOREIGN, _STOPPED))
        line, remedy = f"{place.who} cannot reach {place} ({reason}{hint})", _remedy(place, foreign)
        if now - began >= (_given() or (_WRONG if foreign else patience)):
            raise NoAnswerError(
                f"{line}: {attempts} attempt{'s' * (attempts > 1)} in {now - began:.0f} s. The first machine "
                "must serve the run's store at that address",
                remedy=f"{remedy} {settings.RENDEZVOUS_TIMEOUT.name}=SECONDS sets the wait.",
            )
        if speaks and now - said >= _SAY:
            said = now
            print(
                f"megatron_npu: {line}; still trying after {now - began:.0f} s. {remedy}",
                file=sys.stderr,
                flush=True,
            )
        time.sleep(_PAUSE)


def joined(place: Place, missing: Callable[[], str]) -> None:
    """Wait, on the machine that serves the store, until all other machines have joined.

    Args:
        place: the address of the store.
        missing: returns which machines have not come yet, or an empty string.

    Raises:
        UsageError: some do not come in time.
    """
    began = said = time.monotonic()
    while lacking := missing():
        now = time.monotonic()
        line = f"{place.who} has waited for {lacking} at {place} for {now - began:.0f} s"
        if now - began >= patience_for_others(place.patience):
            raise UsageError(
                f"{line}, but every machine of the job must connect to the run's store",
                remedy=f"See the messages on those machines. {settings.RENDEZVOUS_TIMEOUT.name}=SECONDS sets "
                "the wait.",
            )
        if now - said >= _SAY:
            said = now
            print(f"megatron_npu: {line}; see the messages on those machines", file=sys.stderr, flush=True)
        time.sleep(_PAUSE)


def is_of_this_machine(host: str) -> bool:
    """Return True if a host name or address refers to this machine."""
    with contextlib.suppress(OSError, UnicodeError):
        for family, kind, _, _, address in socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM):
            with contextlib.suppress(OSError), socket.socket(family, kind) as trial:
                trial.bind(address)
                return True
    return False


def answers(host: str, port: int) -> bool:
    """Return True if a store answers at an address."""
    return not _refusal(host, port)


def _given() -> float | None:
    value = settings.RENDEZVOUS_TIMEOUT.value()
    return None if value is None else float(str(value))


def _refusal(host: str, port: int) -> str:
    """Return the reason why no store answers at an address, or an empty string if one does."""
    try:
        with socket.create_connection((host, port), timeout=_TRY) as connection:
            return _fault_of_answer(connection)
    except socket.gaierror as error:
        return f"the host name does not resolve: {error.strerror}"
    except UnicodeError:  # of a label that is empty or too long
        return "this is not a host name"
    except TimeoutError:
        return f"no answer within {_TRY:.0f} s{_resolved(host)}"
    except OSError as error:
        return f"{os.strerror(error.errno) if error.errno else error}{_resolved(host)}"


def _fault_of_answer(connection: socket.socket) -> str:
    """Ask questions of torch's store, and return what is wrong with the answers, or an empty string.

    A ping alone is answered by programs that know no more of the protocol.
    """
    number = os.getpid() & 0xFFFFFFFF
    end = time.monotonic() + min(_ANSWER, _given() or _ANSWER)
    pinged = _PING.pack(_VALIDATE, _MAGIC, _QUERY, number)
    try:
        got = _answer(connection, pinged, 4, end)
        if got != struct.pack("=I", number):
            return f"{_FOREIGN}it answers {got!r} to a ping"
        key = f"megatron_npu/ping/{socket.gethostname()}/{number}/{time.monotonic_ns()}".encode()
        header = struct.pack(f"=Q{len(key)}s", len(key), key)
        for query, added, expected in ((_ADD, [number], number), (_ADD, [1], number + 1), (_DELETE, [], 1)):
            question = bytes([query]) + header + struct.pack(f"={len(added)}q", *added)
            got = _answer(connection, question, 8, end)
            if got != struct.pack("=q", expected):
                return f"{_FOREIGN}it answers {got!r} to a request whose answer is {expected}"
    except TimeoutError:
        return f"{_FOREIGN}it accepts the connection, but does not answer"
    except OSError:
        return f"{_FOREIGN}it closes the connection"
    return ""


def _answer(connection: socket.socket, question: bytes, length: int, end: float) -> bytes:
    """Send a question, and return so many bytes of the answer.

    Raises:
        TimeoutError: they do not come until ``end``.
        ConnectionResetError: the connection is closed instead.
    """
    connection.sendall(question)
    got = b""
    while len(got) < length:
        connection.settimeout(max(end - time.monotonic(), 0.001))
        part = connection.recv(length - len(got))
        if not part:
            raise ConnectionResetError
        got += part
    return got


def _resolved(host: str) -> str:
    with contextlib.suppress(OSError):
        found = sorted({str(each[4][0]) for each in socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)})
        return "" if found == [host] else f"; it resolves to {', '.join(found)}"
    return ""


def _hint(place: Place) -> tuple[str, float]:
    """Return a known problem with the address, and the number of seconds to wait in this case."""
    own = is_of_this_machine(place.host)
    if place.serves:
        return ("" if own else "; it is not an address of this machine, which serves the store"), _WRONG
    if own and place.elsewhere:
        return "; it is an address of this machine itself, which is not the first one", _WRONG
    return "", max(_LIMIT, place.patience)


def _remedy(place: Place, foreign: bool) -> str:
    if foreign:
        return (
            "Check that this is the address of the first machine (node rank 0) and the port of this job; if "
            "another program uses the port there, choose another one on all machines."
        )
    if place.serves:
        return "Set the address to one at which the other machines reach this machine."
    return (
        "Check that this is the address of the first machine (node rank 0), that the job is running there, "
        f"and that its firewall opens port {place.port}."
    )
