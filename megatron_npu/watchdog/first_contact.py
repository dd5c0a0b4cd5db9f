"""Check, before process groups are created, that ranks on several machines can reach each other.

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

from megatron_npu.base.errors import UsageError
from megatron_npu.watchdog import network, restarts

_TRY = 20.0  # seconds for the store, and then a line
_GIVE_UP = 600.0  # seconds for ranks to come, as torch's own default
_CONNECT = 15.0  # seconds for a connection between two machines
_KNOWN = 5.0  # seconds for all to read what is wrong
_PAUSE = 0.2
_ALL = 32  # machines up to which each tries every other
_SHOWN = 8
_EXPECTED = "machines that can reach each other on any port, because gloo and HCCL choose free ones"


@dataclass(frozen=True)
class _Place:
    """The location of a rank, as reported by the rank itself.

    Attributes:
        rank, host: the number of the rank, and the host name of its machine.
        machine: ``network.machine``.
        address, port: the address on which the rank listens. Port 0 means that it is not the first rank of
            its machine.
        towards: the interface and the address through which the rank reaches the store; empty if unknown.
    """

    rank: int
    host: str
    machine: str
    address: str
    port: int
    towards: tuple[str, ...]


@contextlib.contextmanager
def made() -> Iterator[None]:
    """Check before the block, which creates process groups, that ranks on several machines reach each other.

    On one machine, or if no launcher gives the number of ranks per machine, nothing is checked.

    Raises:
        UsageError: some machines cannot reach each other; raised on all ranks, naming the machines and the
            remedy.
    """
    if not _is_of_several_machines():
        yield
        return
    store = _store()  # kept until torch's own has joined its server
    _meet(dist.PrefixStore(_prefix(), store))
    yield


def tell(error: str) -> None:
    """Tell the other ranks, if they are on several machines, that this one ended before the check."""
    if not _is_of_several_machines() or dist.is_initialized():
        return
    with contextlib.suppress(Exception):  # rank 0 may be gone
        host, port = _where()
        store = dist.TCPStore(host, port, is_master=False, timeout=timedelta(seconds=_CONNECT))
        line = f"rank {os.environ['RANK']} ({socket.gethostname()}) exited: {error}"
        dist.PrefixStore(_prefix(), store).set("failed", line)


def _is_of_several_machines() -> bool:
    numbers = [os.environ.get(name, "") for name in ("LOCAL_WORLD_SIZE", "WORLD_SIZE", "RANK")]
    if dist.is_initialized() or not all(number.isdecimal() for number in numbers):
        return False
    return int(numbers[0]) < int(numbers[1]) and bool(os.environ.get("MASTER_ADDR"))


def _prefix() -> str:
    return f"megatron_npu/contact/{restarts.attempt()}"


def _where() -> tuple[str, int]:
    return os.environ["MASTER_ADDR"], int(os.environ.get("MASTER_PORT", "29500"))


def _store() -> dist.TCPStore:
    """Return a connection to the store of the run, which torchrun's agent or rank 0 serves.

    Raises:
        UsageError: the store cannot be reached for a long time.
    """
    host, port = _where()
    serves = os.environ["RANK"] == "0" and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    options: dict[str, Any] = {"multi_tenant": True, "wait_for_workers": False}
    options["use_libuv"] = os.environ.get("USE_LIBUV", "1") == "1"  # as torch, whose store shares the server
    began = time.monotonic()
    while True:
        try:
            return dist.TCPStore(
                host, port, None, is_master=serves, timeout=timedelta(seconds=_TRY), **options
            )
        except (dist.DistError, RuntimeError, OSError) as error:
            reason = str(error).strip().partition("\n")[0]
            line = (
                f"rank {os.environ['RANK']} ({socket.gethostname()}) cannot reach "
                f"MASTER_ADDR:MASTER_PORT {host}:{port} ({reason})"
            )
            remedy = (
                "Check that this is the first machine, that its job is running, and that the firewall "
                "opens the port."
            )
            if time.monotonic() - began > _GIVE_UP:
                raise UsageError(line, "the run's store at that address", remedy) from None
            if os.environ.get("LOCAL_RANK", "0") == "0":
                print(f"megatron_npu: {line}; still trying. {remedy}", file=sys.stderr, flush=True)


def _meet(store: dist.Store) -> None:
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    address, first = network.own_address(), os.environ.get("LOCAL_RANK", "0") == "0"
    with network.listening(address) if first else contextlib.nullcontext() as ear:
        port = ear.getsockname()[1] if ear else 0
        towards = network.towards(os.environ["MASTER_ADDR"]) or ()
        own = _Place(rank, socket.gethostname(), network.machine(), address, port, towards)
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


def _require_none(store: dist.Store, fault: list[str]) -> None:
    """Raise the error ``fault`` if there is one.

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
    """Return a value as soon as rank 0 has set it.

    Raises:
        UsageError: rank 0 does not set it in time.
    """
    try:
        store.wait([name], timedelta(seconds=_GIVE_UP + 2 * _CONNECT))
        return bytes(store.get(name))
    except (dist.DistError, RuntimeError) as error:
        raise UsageError(
            f"rank {os.environ['RANK']} ({socket.gethostname()}) cannot reach rank 0 "
            f"({str(error).partition(chr(10))[0]})",
            "all ranks to be connected to the run's store",
            "See the messages of rank 0.",
        ) from None


# -- what rank 0 does


def _assemble(store: dist.Store, ranks: int) -> None:
    """Wait for all ranks, and publish either the first rank of each machine or the fault."""
    began = said = time.monotonic()
    fault: list[str] = []
    while int(store.add("arrived", 0)) < ranks and not fault:
        now = time.monotonic()
        if store.check(["failed"]):
            fault = [
                store.get("failed").decode(),
                "all ranks to be connected to the run's store",
                "See the messages of that rank.",
            ]
        elif now - said > _TRY:
            said, missing = now, _missing(store, ranks)
            line = f"rank 0 ({socket.gethostname()}) has waited for {now - began:.0f} s for {missing}"
            print(
                f"megatron_npu: {line}, which have not connected to {_listed_place()}",
                file=sys.stderr,
                flush=True,
            )
            if now - began > _GIVE_UP:
                fault = [
                    line,
                    "all ranks to be connected to the run's store",
                    "See the messages on their machines.",
                ]
        time.sleep(_PAUSE)
    places = [] if fault else _places(store, ranks)
    firsts = {each.rank: [each.host, each.address, each.port] for each in places if each.port}
    machines = {each.machine for each in places}
    if len(machines) < 2:
        firsts = {}
    else:
        fault = _loopback(places)
    store.set("met", json.dumps({"fault": fault, "places": firsts}))


def _listed_place() -> str:
    return ":".join(map(str, _where()))


def _missing(store: dist.Store, ranks: int) -> str:
    missing = [rank for rank in range(ranks) if not store.check([f"here/{rank}"])]
    more = f" and {len(missing) - _SHOWN} more" if len(missing) > _SHOWN else ""
    return f"rank{'s' * (len(missing) != 1)} {', '.join(map(str, missing[:_SHOWN]))}{more}"


def _places(store: dist.Store, ranks: int) -> list[_Place]:
    texts = store.multi_get([f"here/{rank}" for rank in range(ranks)])
    return [_Place(**json.loads(text)) for text in texts]


def _loopback(places: list[_Place]) -> list[str]:
    """Return an error if a machine would advertise an address that only the machine itself can reach."""
    bad = {each.host: each for each in places if network.is_private_to_the_machine(each.address)}
    if not bad:
        return []
    named = [f"{host} ({each.address})" for host, each in bad.items()]
    more = f" and {len(named) - _SHOWN} more" if len(named) > _SHOWN else ""
    way = next((each.towards for each in bad.values() if each.towards), ("eth0", "ADDRESS"))
    return [
        (
            f"the host name of {', '.join(named[:_SHOWN])}{more} resolves to an address that no other "
            "machine can reach"
        ),
        "an address in the cluster's network",
        f"Export {network.INTERFACE}={way[0]} (for NPUs also HCCL_SOCKET_IFNAME={way[0]} or "
        f"HCCL_IF_IP={way[1]}) on each machine, or correct its /etc/hosts.",
    ]


def _judge(store: dist.Store, places: Mapping[int, list[Any]]) -> None:
    """Wait for the results of all machines, and publish the verdict."""
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
    fault = ["; ".join(found[:_SHOWN]) + more, _EXPECTED, remedy] if found else []
    store.set("verdict", json.dumps(fault))


# -- what the first rank of each machine does


def _try(store: dist.Store, rank: int, places: Mapping[int, list[Any]]) -> None:
    """Connect to the other machines, and report the machines that cannot be reached.

    With many machines, connect only to those at distances of 1, 2, 4, ….
    """
    ranks = [*places]
    own, many = ranks.index(rank), len(ranks)
    distances = range(1, many) if many <= _ALL else [2**n for n in range(many.bit_length() - 1)]
    chosen = [ranks[(own + distance) % many] for distance in distances]
    asked = {
        f"{host} at {address}:{port}": (address, port)
        for host, address, port in (places[each] for each in chosen)
    }
    faults = network.unreached(asked, _CONNECT)
    store.set(f"reached/{rank}", json.dumps([f"{name} ({why})" for name, why in faults.items()]))
