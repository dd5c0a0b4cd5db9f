"""Check that ranks on different machines can reach each other, before process groups are created.

Without this check, a host name that resolves to 127.0.1.1, or a firewall, causes a run to hang for ten
minutes and to end with a page of C++ messages. Each rank registers at the store of the run; rank 0 waits for
all of them and logs the missing ranks. One rank per machine listens on the address that gloo will use, and
connects to the others. Each rank sends only a few requests to the store, for any number of ranks.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from megatron_npu.base import digits, settings
from megatron_npu.base.errors import UsageError
from megatron_npu.process import meeting_place
from megatron_npu.watchdog import network, restarts

_TRY = 20.0  # seconds for the store, and between two lines
_ANSWER = 5.0  # seconds for a store to answer
_CONNECT = 15.0  # seconds for a connection between two machines
_KNOWN = 5.0  # seconds for all to read what is wrong
_PAUSE = 0.2
_ALL = 32  # machines up to which each tries every other
_SHOWN = 8
_REACHABLE = (
    "all machines must be able to reach each other on any port, because gloo and HCCL choose free ones"
)


@dataclass(frozen=True)
class _Place:
    """The location of a rank, as reported by the rank itself.

    Attributes:
        rank, host: the number of the rank, and the host name of its machine.
        machine: ``network.machine``.
        address, port: the address on which the rank listens. Port 0 means that it is not the first rank of
            its machine.
        hccl: the address in HCCL_IF_IP and a port on which the rank listens there; empty if there is none.
        towards: the interface and the address through which the rank reaches the store; empty if unknown.
    """

    rank: int
    host: str
    machine: str
    address: str
    port: int
    hccl: tuple[str, int] | tuple[()]
    towards: tuple[str, ...]


@contextlib.contextmanager
def made() -> Iterator[None]:
    """Check that ranks on different machines can reach each other, before the ``with`` block creates process
    groups.

    On one machine, or if no launcher gives the number of ranks per machine, the check is only that no other
    program answers at the address of the store, because torch waits for its answer without a limit.

    Raises:
        UsageError: another program answers at the address of the store; or some machines cannot reach each
            other. Raised on all ranks, naming the machines and the remedy.
    """
    with contextlib.ExitStack() as held:
        if not _is_of_several_machines():
            _require_no_other_program(held)
            yield
            return
        store = _store(held)  # kept until torch's own has joined its server
        _meet(dist.PrefixStore(_prefix(), store))
        yield


def tell(error: UsageError) -> None:
    """Tell the ranks on other machines that this rank has ended before the check.

    Rank 0 may start its store later than this rank fails, so this waits for it, unless that was the error.
    """
    if not _is_of_several_machines() or isinstance(error, meeting_place.NoAnswerError):
        return
    with contextlib.suppress(Exception):  # rank 0 may be gone
        host, port = _where()
        end = time.monotonic() + _CONNECT
        while not meeting_place.answers(host, port):
            if time.monotonic() > end:
                return
            time.sleep(_PAUSE)
        store = dist.TCPStore(host, port, is_master=False, timeout=timedelta(seconds=_CONNECT))
        line = f"rank {os.environ['RANK']} ({socket.gethostname()}) exited: {error}"
        dist.PrefixStore(_prefix(), store).set("failed", line)


def _is_of_several_machines() -> bool:
    names = ("LOCAL_WORLD_SIZE", "WORLD_SIZE", "RANK")
    here, everywhere, rank = (digits.number(os.environ.get(name, "")) for name in names)
    if dist.is_initialized() or here is None or everywhere is None or rank is None:
        return False
    return here < everywhere and bool(os.environ.get("MASTER_ADDR"))


def _require_no_other_program(held: contextlib.ExitStack) -> None:
    ranks, rank, port = (
        digits.number(os.environ.get(name, "")) for name in ("WORLD_SIZE", "RANK", "MASTER_PORT")
    )
    host = os.environ.get("MASTER_ADDR", "")
    if dist.is_initialized() or not (host and port and rank is not None and (ranks or 1) > 1):
        return
    if _serves(rank):  # torch binds the port, or fails
        return
    who = f"rank {rank} ({socket.gethostname()})"
    speaks = rank == 1 or os.environ.get("LOCAL_RANK") == "0"
    place = meeting_place.Place(who, host, port, serves=False, elsewhere=False)
    meeting_place.require_no_other_program(place, speaks=speaks)
    held.enter_context(meeting_place.watched(place))


def _serves(rank: int) -> bool:
    """Return True if this rank itself serves the store of the run."""
    return rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"


def _prefix() -> str:
    return f"megatron_npu/contact/{restarts.attempt()}"


def _where() -> tuple[str, int]:
    return os.environ["MASTER_ADDR"], int(os.environ.get("MASTER_PORT", "29500"))


def _store(held: contextlib.ExitStack) -> dist.TCPStore:
    """Connect to the store of the run, which torchrun's agent or rank 0 serves.

    Args:
        held: ends at the end of the check; until then, the store is watched.

    Raises:
        UsageError: the store cannot be reached in time, or its port is in use.
    """
    host, port = _where()
    rank, locals_ = int(os.environ["RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
    serves = _serves(rank)
    served = serve(port) if serves else None
    machine = os.environ.get("GROUP_RANK", "")
    elsewhere = int(machine if machine.isdecimal() else rank // locals_) > 0
    who = f"rank {rank} ({socket.gethostname()})"
    place = meeting_place.Place(who, host, port, serves, elsewhere)
    speaks = os.environ.get("LOCAL_RANK", "0") == "0"
    client = meeting_place.connected(place, lambda: client_of(host, port), speaks=speaks)
    if not serves:
        held.enter_context(meeting_place.watched(place))
    return served or client


def serve(port: int) -> dist.TCPStore:
    """Serve a store on a port of this machine, for other machines to connect to.

    torch's own store on this port will share it.

    Raises:
        UsageError: the port cannot be used.
    """
    options: dict[str, Any] = {"multi_tenant": True, "wait_for_workers": False}
    options["use_libuv"] = os.environ.get("USE_LIBUV", "1") == "1"  # as torch, whose store shares the server
    try:
        return dist.TCPStore(
            "127.0.0.1", port, None, is_master=True, timeout=timedelta(seconds=_TRY), **options
        )
    except (dist.DistError, RuntimeError, OSError) as error:
        raise UsageError(
            f"MASTER_PORT={port} cannot be used on {socket.gethostname()}, which serves the run's store "
            f"({str(error).strip().partition(chr(10))[0]})",
            remedy="Export another MASTER_PORT on all machines, or end the program that uses this one.",
        ) from None


def client_of(host: str, port: int) -> dist.TCPStore:
    """Connect to a store at an address that answers.

    Raises:
        RuntimeError: it is not a store. torch logs a page for each attempt, so there are few.
    """
    patience = timedelta(seconds=_ANSWER)
    found = dist.TCPStore(host, port, None, is_master=False, timeout=patience, wait_for_workers=False)
    found.set_timeout(timedelta(seconds=_TRY))
    return found


def _meet(store: dist.Store) -> None:
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    address, first = network.own_address(), os.environ.get("LOCAL_RANK", "0") == "0"
    with contextlib.ExitStack() as ears:
        port = _listen(ears, address) if first else 0
        other = network.hccl_address() if first else ""
        hccl = (other, _listen(ears, other)) if other not in ("", address) else ()
        towards = network.towards(os.environ["MASTER_ADDR"]) or ()
        own = _Place(rank, socket.gethostname(), network.machine(), address, port, hccl, towards)
        store.set(f"here/{rank}", json.dumps(asdict(own)))
        store.add("arrived", 1)
        if rank == 0:
            _assemble(store, ranks)
        met = json.loads(_awaited(store, "met"))
        _require_none(store, met["fault"])
        places = {int(each): place for each, place in met["places"].items()}
        if rank in places:
            _try(store, rank, places)
        if rank == 0:
            _judge(store, places)
        if places:
            _require_none(store, json.loads(_awaited(store, "verdict")))


def _listen(ears: contextlib.ExitStack, address: str) -> int:
    return int(ears.enter_context(network.listening(address)).getsockname()[1])


def _require_none(store: dist.Store, fault: list[str]) -> None:
    """Raise the error in ``fault`` unless ``fault`` is None.

    Rank 0 first waits until the other ranks have read the error, because it may host the store.
    """
    if not fault:
        return
    store.add("known", 1)
    end = time.monotonic() + _KNOWN
    while os.environ["RANK"] == "0" and time.monotonic() < end:
        if int(store.add("known", 0)) >= int(store.add("arrived", 0)):
            break
        time.sleep(_PAUSE)
    raise UsageError(*fault)


def _awaited(store: dist.Store, name: str) -> bytes:
    """Wait until rank 0 has set a value, and return the value.

    Raises:
        UsageError: rank 0 does not set it in time.
    """
    try:
        store.wait([name], timedelta(seconds=meeting_place.patience_for_others() + 2 * _CONNECT))
        return bytes(store.get(name))
    except (dist.DistError, RuntimeError) as error:
        raise UsageError(
            f"rank {os.environ['RANK']} ({socket.gethostname()}) cannot reach rank 0 "
            f"({str(error).partition(chr(10))[0]}); all ranks must connect to the run's store",
            remedy="See the messages of rank 0.",
        ) from None


# -- what rank 0 does


def _assemble(store: dist.Store, ranks: int) -> None:
    """Wait until all ranks have reported where they run.

    Publish the first rank of each machine or the error.
    """
    fault = _await_all(store, ranks)
    places = [] if fault else _places(store, ranks)
    firsts = {each.rank: [each.host, each.address, each.port, *each.hccl] for each in places if each.port}
    if len({each.machine for each in places}) < 2:
        firsts = {}
    else:
        fault = _loopback(places)
    store.set("met", json.dumps({"fault": fault, "places": firsts}))


def _await_all(store: dist.Store, ranks: int) -> list[str]:
    """Wait until all ranks have reported, and log which ranks are missing.

    Return the error of a rank that failed or timed out.
    """
    began = said = time.monotonic()
    place = f"{_where()[0]}:{_where()[1]}"
    while int(store.add("arrived", 0)) < ranks:
        if store.check(["failed"]):
            told = store.get("failed").decode()
            return [f"the run cannot start: {told}", "", "See the messages of that rank."]
        now = time.monotonic()
        is_over = now - began > meeting_place.patience_for_others()
        if is_over or now - said > _TRY:
            said, missing = now, _missing(store, ranks)
            line = f"rank 0 ({socket.gethostname()}) has waited for {now - began:.0f} s for {missing}"
            print(f"megatron_npu: {line} to connect to {place}", file=sys.stderr, flush=True)
            if is_over:
                remedy = f"{settings.RENDEZVOUS_TIMEOUT.name}=SECONDS sets the wait."
                return [
                    f"{line}, but every rank must connect to the run's store at {place}",
                    "",
                    f"See the messages on their machines. {remedy}",
                ]
        time.sleep(_PAUSE)
    return []


def _missing(store: dist.Store, ranks: int) -> str:
    missing = [rank for rank in range(ranks) if not store.check([f"here/{rank}"])]
    more = f" and {len(missing) - _SHOWN} more" if len(missing) > _SHOWN else ""
    return f"rank{'s' * (len(missing) != 1)} {', '.join(map(str, missing[:_SHOWN]))}{more}"


def _places(store: dist.Store, ranks: int) -> list[_Place]:
    texts = store.multi_get([f"here/{rank}" for rank in range(ranks)])
    return [_Place(**json.loads(text)) for text in texts]


def _loopback(places: list[_Place]) -> list[str]:
    """Return an error if a machine would announce a loopback address, which other machines cannot reach."""
    bad = {each.host: each for each in places if network.is_private_to_the_machine(each.address)}
    if not bad:
        return []
    named = [f"{host} ({each.address})" for host, each in bad.items()]
    more = f" and {len(named) - _SHOWN} more" if len(named) > _SHOWN else ""
    way = next((each.towards for each in bad.values() if each.towards), ("eth0", "ADDRESS"))
    return [
        (
            f"the host name of {', '.join(named[:_SHOWN])}{more} resolves to an address that no other "
            "machine can reach; it must resolve to an address in the cluster's network"
        ),
        "",
        f"Export {network.INTERFACE}={way[0]} (for NPUs also HCCL_SOCKET_IFNAME={way[0]} or "
        f"HCCL_IF_IP={way[1]}) on each machine, or correct its /etc/hosts.",
    ]


def _judge(store: dist.Store, places: Mapping[int, list[Any]]) -> None:
    """Wait for the results of all machines, and publish the overall result."""
    if not places:
        return
    store.wait([f"reached/{rank}" for rank in places], timedelta(seconds=4 * _CONNECT))
    found = [
        f"{places[rank][0]} cannot reach {fault}"
        for rank, text in zip(places, store.multi_get([f"reached/{rank}" for rank in places]), strict=True)
        for fault in json.loads(text)
    ]
    more = f" and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
    remedy = (
        f"Open all ports between the machines, or set the network interface: {network.INTERFACE}, "
        "HCCL_SOCKET_IFNAME, HCCL_IF_IP."
    )
    fault = [f"{'; '.join(found[:_SHOWN])}{more}; {_REACHABLE}", "", remedy] if found else []
    store.set("verdict", json.dumps(fault))


# -- what the first rank of each machine does


def _try(store: dist.Store, rank: int, places: Mapping[int, list[Any]]) -> None:
    """Try to connect to the other machines, and report which of them cannot be reached.

    With many machines, connect only to those at distances of 1, 2, 4, ….
    """
    ranks = [*places]
    own, many = ranks.index(rank), len(ranks)
    distances = range(1, many) if many <= _ALL else [2**n for n in range(many.bit_length() - 1)]
    chosen = [ranks[(own + distance) % many] for distance in distances]
    asked = {}
    for host, address, port, *hccl in (places[each] for each in chosen):
        asked[f"{host} at {address}:{port}"] = (address, port)
        if hccl:
            asked[f"{host} at its {network.HCCL} {hccl[0]}:{hccl[1]}"] = (hccl[0], hccl[1])
    faults = network.unreached(asked, _CONNECT)
    store.set(f"reached/{rank}", json.dumps([f"{name} ({why})" for name, why in faults.items()]))
