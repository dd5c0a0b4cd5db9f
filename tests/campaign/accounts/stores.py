"""Ranks whose store is another program."""

from __future__ import annotations

import contextlib
import os
import pickle
import socket
import subprocess
import sys
import time
from collections.abc import Iterator

from tests.campaign.accounts.rooms import Room
from tests.campaign.accounts.samples import Samples
from tests.campaign.accounts.trials import REFUSED, Try
from tests.support import foreign_stores, ports, tiny
from tests.support.payload import Runs

_PLACE = "stores"
_LIMIT = 150.0  # seconds: 60 of waiting, 30, and the start


def tries(room: Room) -> Iterator[Try]:
    """Yield ranks and launchers that are told the address of another program."""
    samples = Samples(room)
    for name, behave in behaviours(room).items():
        for how in ("on one machine", "on two machines", "torchrun"):
            with foreign_stores.serving(behave) as port:
                what = f"{how}: a program that {name}"
                yield _rank(samples, what, port, how)
    for how in ("on one machine", "torchrun"):
        with _filled(room) as port:
            yield _rank(samples, f"{how}: a store that is full of pickles", port, how)


def _rank(samples: Samples, what: str, port: int, how: str) -> Try:
    words = [*samples.pretrain(), "--distributed-timeout-minutes", "1"]
    if how == "torchrun":
        place = ["--nnodes", "1", "--nproc-per-node", "1", "--rdzv-backend", "c10d", "--rdzv-id", "job"]
        there = ["--rdzv-endpoint", f"127.0.0.1:{port}", "--rdzv-conf", "is_host=false", "-m", "megatron_npu"]
        program = (sys.executable, "-P", "-m", "torch.distributed.run")
        return Try(_PLACE, what, [*place, *there, *words], REFUSED, program=program, limit=_LIMIT)
    local = {"LOCAL_RANK": "1"} if how == "on one machine" else {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    rank = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    return Try(_PLACE, what, words, REFUSED, variables={**rank, **local}, limit=_LIMIT)


def behaviours(room: Room) -> dict[str, foreign_stores.Behaviour]:
    """Return what programs do with a connection that they have accepted."""
    runs = pickle.dumps(Runs(room.mark("store"))) * 20
    return {
        "closes it": socket.socket.close,
        "says nothing": lambda connection: None,
        "sends noise": lambda connection: connection.sendall(os.urandom(4096)),
        "speaks HTTP": lambda connection: connection.sendall(b"HTTP/1.1 400 Bad\r\n\r\n" * 50),
        "sends pickles": lambda connection: connection.sendall(runs),
        "sends zeros": lambda connection: connection.sendall(bytes(1 << 16)),
        "answers the ping": lambda connection: foreign_stores.answering(connection, 0),
        "answers the ping and one question": lambda connection: foreign_stores.answering(connection, 1),
        "answers the ping and five questions": lambda connection: foreign_stores.answering(connection, 5),
    }


_STORE = """
import pickle, sys, time
import torch.distributed as dist
from tests.support.payload import Runs
store = dist.TCPStore("127.0.0.1", int(sys.argv[1]), is_master=True, wait_for_workers=False)
for key in ("torch.rendezvous.job", "/torch.rendezvous.job", "0", "rank_0", "init/"):
    store.set(key, pickle.dumps(Runs(sys.argv[2])))
time.sleep(600)
"""


@contextlib.contextmanager
def _filled(room: Room) -> Iterator[int]:
    """Serve a store of the stranger, with pickles under the names that torch reads."""
    port = ports.free_port()
    process = subprocess.Popen(
        [sys.executable, "-c", _STORE, str(port), str(room.mark("store"))],
        env={**room.environment(), "PYTHONPATH": str(tiny.ROOT)},
        cwd="/",
        preexec_fn=lambda: room.become(room.stranger),
    )
    try:
        for _ in range(600):
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
                break
            time.sleep(0.2)
        time.sleep(2)  # for the pickles
        yield port
    finally:
        process.kill()
        process.wait()
