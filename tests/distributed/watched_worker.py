"""A rank of test_watchdog.py: it reduces without end, and rank 1 comes to harm as it is asked to.

With one rank it does so itself.
"""

from __future__ import annotations

import asyncio
import atexit
import fcntl
import os
import signal
import socketserver
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron_npu import watchdog
from megatron_npu.watchdog.rank import Rank

AT = 20  # the step at which it happens
# In a module of Megatron's, as the watchdog tells calls by their names, and phases that nobody enters.
MEGATRON = """
def train_step(act):
    act()
def save_checkpoint(act):
    act()
"""


def say_a_word() -> None:
    """Wait until the last word of this rank is of this step: the second one from now has begun in it."""
    said = threading.Semaphore(0)
    beat = Rank._beat

    def heard(self: Rank) -> None:
        beat(self)
        said.release()

    Rank._beat = heard  # type: ignore[method-assign]
    said.acquire()
    said.acquire()


def all_reduce() -> None:
    try:
        dist.all_reduce(torch.ones(4))
    except RuntimeError as error:
        if dist.get_rank() == 2:  # as 0.16.1 does where it builds datasets
            raise Exception("mock data cannot be built") from error
        raise


def fail() -> None:
    raise ValueError("bad luck\nand more")


def wait_for_ever() -> None:
    os.kill(os.getpid(), signal.SIGUSR1)  # as a user who wants to know where it stands
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()


def be_cut_off() -> None:
    """Let the network of this rank be cut, as the test's proxy sees it, and wait for the others."""
    (Path(tempfile.gettempdir()) / "cut").touch()
    threading.Event().wait()


BUSY = """
import time
end = time.monotonic() + 8
while time.monotonic() < end:
    sum(range(10**6))
    time.sleep(0.1)
"""


def write_in_vain() -> None:
    """Hold on to a file that one cannot get any further with, as on a disk that hangs."""
    with tempfile.NamedTemporaryFile(prefix="saved-") as file, open(file.name) as other:
        file.write(bytes(2**20))
        file.flush()
        fcntl.flock(other, fcntl.LOCK_EX)
        fcntl.flock(file, fcntl.LOCK_EX)


def write_slowly() -> None:
    """Wait for a child that writes for longer than a rank may stand still; neither computes."""
    with tempfile.TemporaryFile() as file:
        writer = os.fork()  # which has nothing to start
        if not writer:
            for _ in range(80):
                os.write(file.fileno(), bytes(100_000))
                time.sleep(0.1)
            os._exit(0)
        os.waitpid(writer, 0)
    all_reduce()


VICTIM = {"kill_first": 0}  # which holds the store


def compile_long() -> None:
    # several of them: on a busy machine each gets a small share of a core
    children = [subprocess.Popen([sys.executable, "-S", "-c", BUSY]) for _ in range(3)]
    assert [child.wait() for child in children] == [0, 0, 0]
    all_reduce()


def serve() -> None:
    """Wait for a request, as a server of Flask's does."""
    with socketserver.TCPServer(("127.0.0.1", 0), socketserver.BaseRequestHandler) as server:
        threading.Timer(6, server.shutdown).start()
        server.serve_forever()


def wait() -> None:
    """Wait for work, in whatever way."""
    with watchdog.phase(watchdog.WAITING):
        threading.Event().wait(6)


def hang_in_request() -> None:
    async def answer() -> None:
        wait_for_ever()

    asyncio.run(answer())


def save(megatron: dict[str, Any], act: Callable[[], None]) -> None:
    """Save as a patched script does."""
    with watchdog.phase(watchdog.SAVING):
        megatron["save_checkpoint"](act)


ALONE = {"serve": serve, "deadlock": wait_for_ever, "wait": wait, "hang_in_request": hang_in_request}
HARM = {
    "kill_first": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "stop": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "error": fail,
    "deadlock": wait_for_ever,
    "cut": be_cut_off,
}


def main(scenario: str) -> None:
    dist.init_process_group("gloo")
    rank, megatron = dist.get_rank(), {"__name__": "megatron.training.training"}
    exec(MEGATRON, megatron)
    if (rank, scenario) == (0, "stop"):  # as gloo's groups do, with an unfinished operation with that rank
        atexit.register(time.sleep, 600)
    with watchdog.watching():
        for step in range(1, 10**9):
            watchdog.step(step)
            if step == AT and dist.get_world_size() == 1:
                megatron["train_step"](ALONE[scenario])
                break
            megatron["train_step"](all_reduce)
            if step == AT and scenario == "slow_save":  # longer than is allowed, but it is a save
                save(megatron, all_reduce if rank else write_slowly)
                break
            if (step, rank, scenario) == (AT, 1, "stuck_save"):
                save(megatron, write_in_vain)
            if step == AT and scenario == "compile":  # a rank waits for a child at work, the others for it
                megatron["train_step"](compile_long if rank == 1 else all_reduce)
                break
            if (step, rank) == (AT, VICTIM.get(scenario, 1)):
                megatron["train_step"](lambda: (say_a_word(), HARM[scenario]()))
            time.sleep(0.01)
    dist.destroy_process_group()
    print("ended well")


if __name__ == "__main__":
    main(sys.argv[1])
