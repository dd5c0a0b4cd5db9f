"""A server that nobody asks, that is killed, that is stopped in the middle: does it live, what is left?

python -m tests.campaign.serving
"""

from __future__ import annotations

import random
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil

from tests.campaign.clients import ServeClient
from tests.campaign.outcomes import Outcome, main
from tests.campaign.soak import Child
from tests.support import ports, tiny

IDLE = 5  # seconds of the watchdog in these trials; by default 300


def trials(place: Path, chance: random.Random, idle: float = 4 * IDLE) -> Iterator[Outcome]:
    """Serve a small model, and harm the server in each way."""
    data = tiny.write_dataset(place / "text", documents=40)
    saved = place / "saved"
    flags = [*tiny.flags_for(data), "--train-iters", "2", "--max-position-embeddings", "2048"]
    assert tiny.run("pretrain", *flags, "--save", str(saved)).returncode == 0
    (place / "cwd").mkdir()
    port = ports.free_port()
    client = ServeClient(port, chance.random())
    serve = ("serve", "--load", str(saved), "--port", str(port))
    server = Child("serve", place / "cwd", *serve, MEGATRON_NPU_WATCHDOG=str(IDLE))
    server.until("Ctrl-C stops it")
    time.sleep(idle)
    alive = server.process.poll() is None and not client.whole()
    yield Outcome(
        "serve", f"nobody asks for {idle:g} s, the watchdog's limit is {IDLE} s", "lives" if alive else ""
    )
    for moment in ("at its start", "while it answers"):
        yield Outcome("serve", f"SIGKILL {moment}", _killed(server, client, chance, moment))
    for number in (signal.SIGTERM, signal.SIGINT):
        yield Outcome("serve", f"{number.name} while it answers", _stopped(server, client, number))
    server.end(signal.SIGTERM)


def _ask(client: ServeClient, times: int) -> list[threading.Thread]:
    threads = [threading.Thread(target=client.ask) for _ in range(times)]
    for thread in threads:
        thread.start()
    return threads


def _killed(server: Child, client: ServeClient, chance: random.Random, moment: str) -> str:
    """Kill it; a new one must have the same port at once."""
    threads: list[threading.Thread] = []
    if moment == "at its start":
        server.end(signal.SIGKILL)
        server.start()
        time.sleep(3 * chance.random())
    else:
        threads = _ask(client, 4)
        time.sleep(chance.random() / 2)
    children = psutil.Process(server.process.pid).children(recursive=True)
    server.end(signal.SIGKILL)
    for thread in threads:
        thread.join()
    if psutil.wait_procs(children, 10)[1]:
        return ""
    server.log.unlink()
    server.start()
    server.until("Ctrl-C stops it")
    return "" if client.whole() else "nothing is left, and a new one answers at the same port"


def _stopped(server: Child, client: ServeClient, number: signal.Signals) -> str:
    """Stop it while it answers: it ends well, in seconds, without a traceback."""
    threads = _ask(client, 4)
    time.sleep(0.2)
    begun = time.monotonic()
    code = server.end(number)
    for thread in threads:
        thread.join()
    told = server.told()
    if code != 0 or "Traceback" in told:
        return ""
    took = time.monotonic() - begun
    server.log.unlink()
    server.start()
    server.until("Ctrl-C stops it")
    return f"ends in {took:.0f} s, exit code 0"


if __name__ == "__main__":
    sys.exit(main(trials, __doc__))
