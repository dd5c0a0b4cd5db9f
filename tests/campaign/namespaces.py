"""Machines that are namespaces of one host (root, Linux): network, mount, host name, processes and ipc.

On one bridge, each with an address, ``/tmp``, ``/dev/shm`` and processes of its own.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

SETUP = """
hostname {name}
mount --make-rprivate /
mkdir -p {disk}/disk
mount --bind {disk} /tmp
mount -t tmpfs tmpfs /dev/shm
mount --bind {hosts} /etc/hosts
exec sleep infinity
"""


@dataclass
class Machine:
    """One of them.

    Attributes:
        number: from 1 on.
        space: the name of its network namespace.
        init: the process that keeps its namespaces.
        hosts: its /etc/hosts, as a file outside.
    """

    number: int
    space: str
    init: int
    hosts: Path

    def command(self, *words: str) -> list[str]:
        """Return a command line that runs on it."""
        return ["nsenter", "-t", str(self.init), "-m", "-u", "-n", "-p", "-i", "--", *words]

    def kill_all(self) -> None:
        """Kill all its processes but the one that keeps it."""
        subprocess.run(self.command("sh", "-c", "kill -9 -1"), check=False, timeout=30)

    def sh(self, text: str) -> None:
        """Run shell commands in its network, as the machine outside."""
        subprocess.run(["ip", "netns", "exec", self.space, "sh", "-c", text], check=True, timeout=30)


@dataclass
class Cluster:
    """Machines that see each other, and a folder that they share."""

    folder: Path
    machines: list[Machine] = field(default_factory=list)


@contextlib.contextmanager
def cluster(count: int) -> Iterator[Cluster]:
    """Give machines in the block; what they have started ends with it."""
    mark = f"mn{os.getpid()}"
    with tempfile.TemporaryDirectory(dir="/var/tmp") as name:
        result = Cluster(Path(name))
        (result.folder / "shared").mkdir()
        keepers = []
        try:
            _ip("netns", "add", f"{mark}s")
            _in(f"{mark}s", "link add br-all type bridge")
            _in(f"{mark}s", "link set br-all up")
            for number in range(1, count + 1):
                keeper, machine = _machine(result.folder, mark, number, count)
                keepers.append(keeper)
                result.machines.append(machine)
            yield result
        finally:
            for keeper in keepers:
                keeper.kill()
            for each in result.machines:
                _kill(each.init)
            for keeper in keepers:
                keeper.wait()
            for space in (f"{mark}s", *(each.space for each in result.machines)):
                subprocess.run(["ip", "netns", "del", space], check=False, timeout=30)


def _kill(init: int) -> None:
    with contextlib.suppress(ProcessLookupError):  # a trial has done so
        os.kill(init, signal.SIGKILL)


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, timeout=30)


def _in(space: str, words: str) -> None:
    _ip("-n", space, *words.split())


def _machine(folder: Path, mark: str, number: int, count: int) -> tuple[subprocess.Popen[bytes], Machine]:
    space, disk, hosts = f"{mark}m{number}", folder / f"disk{number}", folder / f"hosts{number}"
    _ip("netns", "add", space)
    _ip(
        "link",
        "add",
        "eth0",
        "netns",
        space,
        "type",
        "veth",
        "peer",
        "name",
        f"p{number}",
        "netns",
        f"{mark}s",
    )
    _in(f"{mark}s", f"link set p{number} master br-all up")
    for words in ("link set lo up", "link set eth0 up", f"addr add 10.77.0.{number}/24 dev eth0"):
        _in(space, words)
    names = "".join(f"10.77.0.{each} node{each}\n" for each in range(1, count + 1))
    hosts.write_text(f"127.0.0.1 localhost\n{names}", encoding="utf-8")
    disk.mkdir()
    setup = SETUP.format(name=f"node{number}", disk=disk, hosts=hosts)
    command = [
        "ip",
        "netns",
        "exec",
        space,
        "unshare",
        *"--mount --uts --pid --ipc --fork --mount-proc".split(),
    ]
    keeper = subprocess.Popen([*command, "bash", "-ec", setup], start_new_session=True)
    for _ in range(100):
        time.sleep(0.1)
        found = subprocess.run(
            ["pgrep", "-P", str(keeper.pid)], capture_output=True, text=True, check=False, timeout=30
        )
        if found.stdout.strip() and _is_ready(int(found.stdout.split()[0])):
            return keeper, Machine(number, space, int(found.stdout.split()[0]), hosts)
    raise RuntimeError(f"machine {number} does not start")


def _is_ready(pid: int) -> bool:
    return Path(f"/proc/{pid}/comm").read_text(encoding="ascii") == "sleep\n"
