"""Faults of several machines, as a job meets them: machines.py [--only NAME...] (root, Linux, on request)

A machine is a set of namespaces (network, mount, host name, processes, ipc) on one bridge: an address,
``/tmp``, ``/dev/shm`` and processes of its own. Each trial starts a launcher on every machine, does its harm,
and looks how all of them end: nobody may be silent, live longer than the watchdog's limit and 30 s, or end
well with less than was asked for.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from tests.conftest import ROOT, checkout

LIMIT = 20  # seconds of the watchdog
START = 600  # seconds at most until ranks train, or have been refused
FLAGS = [
    *"--num-layers 2 --hidden-size 32 --num-attention-heads 2 --seq-length 32 --micro-batch-size 1".split(),
    *"--max-position-embeddings 32 --global-batch-size 4 --mock-data --tokenizer-type NullTokenizer".split(),
    *"--vocab-size 127 --lr 1e-3 --log-interval 1".split(),
]
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

    def sh(self, text: str) -> None:
        """Run shell commands in its network, as the machine outside."""
        subprocess.run(["ip", "netns", "exec", self.space, "sh", "-c", text], check=True, timeout=30)


@dataclass
class Cluster:
    """Machines that see each other, and a folder that they share."""

    folder: Path
    machines: list[Machine] = field(default_factory=list)

    def start(self, words: Callable[[int], list[str]], out: Path) -> list[subprocess.Popen[bytes]]:
        """Start a launcher on each, in a home of its own; return them."""
        found = []
        for each in self.machines:
            env = {
                **{name: os.environ[name] for name in ("PATH", "LANG") if name in os.environ},
                **{"HOME": "/tmp/disk", "OMP_NUM_THREADS": "1", "MEGATRON_NPU_WATCHDOG": str(LIMIT)},
                **{"PYTHONPATH": str(ROOT), "MEGATRON_LM_PATH": str(checkout("megatron_core", "0.16.1"))},
            }
            if words(each.number)[0] != "run":
                del env["MEGATRON_LM_PATH"]
            command = each.command(
                "env", "-C", "/tmp/disk", sys.executable, *_launcher(each.number, len(self.machines))
            )
            stream = (out / f"{each.number}.log").open("wb")
            found.append(
                subprocess.Popen(
                    [*command, "-m", "megatron_npu", *words(each.number)],
                    env=env, stdout=stream, stderr=subprocess.STDOUT,
                )
            )  # fmt: skip
        return found


def _launcher(number: int, machines: int) -> list[str]:
    where = f"--nnodes {machines} --node-rank {number - 1} --nproc-per-node 1 --master-addr node1"
    return ["-m", "torch.distributed.run", *where.split(), "--master-port", "29500"]


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
    return b"sleep" in Path(f"/proc/{pid}/cmdline").read_bytes()


# -- the trials


@dataclass(frozen=True)
class Outcome:
    """How a trial has ended.

    Attributes:
        codes: of each launcher; None: it lived on, and was killed.
        seconds: from the harm (or the start) to the last end.
        logs: what each has said.
    """

    codes: list[int | None]
    seconds: float
    logs: list[str]


def ended(started: list[subprocess.Popen[bytes]], seconds: float, out: Path, began: float) -> Outcome:
    """Wait for all launchers, at most so long; return how they have ended."""
    codes: list[int | None] = []
    for process in started:
        try:
            codes.append(process.wait(max(0.1, began + seconds - time.monotonic())))
        except subprocess.TimeoutExpired:
            codes.append(None)
            process.kill()
    logs = [path.read_text(encoding="utf-8", errors="replace") for path in sorted(out.glob("*.log"))]
    return Outcome(codes, time.monotonic() - began, logs)


def has_trained(out: Path, seconds: float = START) -> bool:
    """Wait until the first machine has told of an iteration."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if any("iteration" in path.read_text(errors="replace") for path in out.glob("1.log")):
            return True
        time.sleep(0.5)
    return False


def _commands(save: str) -> dict[str, list[str]]:
    stock = str(checkout("megatron_core", "0.16.1") / "pretrain_gpt.py")
    script = "/tmp/disk/mine.py"
    ends = ["--train-iters", "4", "--save", save, "--save-interval", "2"]
    return {
        "pretrain": ["pretrain", *FLAGS, *ends],
        "run": ["run", stock, *FLAGS, *ends, "--eval-interval", "100", "--eval-iters", "1"],
        "train": ["train", "--user-script", script, *ends],
    }


def private_save(them: Cluster, out: Path, command: str) -> list[str]:
    """A disk on each machine under one name: refused, and nothing called whole."""
    for each in range(1, len(them.machines) + 1):
        script = them.folder / f"disk{each}" / "disk" / "mine.py"
        script.write_text(
            "from rapidformer import RapidformerEngine\nRapidformerEngine()\n", encoding="utf-8"
        )
    words = _commands("/tmp/disk/save")[command]
    found = ended(them.start(lambda number: words, out), START, out, time.monotonic())
    faults = [] if all(found.codes) else [f"codes {found.codes}"]
    if not re.search(r"is not seen by node2 \(rank 1\)", found.logs[0]):
        faults.append("the machine is not named")
    return faults


def shared_save(them: Cluster, out: Path, *parallel: str) -> list[str]:
    """A folder of all: a training that ends well, with the losses of as many ranks on one machine."""
    words = [*_commands(f"{them.folder}/shared/{out.name}")["pretrain"], *parallel]
    found = ended(them.start(lambda number: words, out), START, out, time.monotonic())
    if any(code != 0 for code in found.codes):
        return [f"codes {found.codes}"]
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(len(them.machines))]
    flags = [*FLAGS, "--train-iters", "4", *parallel]
    alone = subprocess.run(
        [sys.executable, *launcher, "-m", "megatron_npu", "pretrain", *flags],
        capture_output=True,
        text=True,
        cwd=them.folder,
        timeout=START,
        check=False,
    )
    losses, expected = (
        [*map(float, re.findall(r"lm loss: (\S+)", text))] for text in (found.logs[0], alone.stdout)
    )
    same = len(losses) == len(expected) and all(abs(a - b) < 2e-6 * abs(b) for a, b in zip(losses, expected))  # noqa: B905
    return [] if same else [f"losses {losses}, of one machine {expected}"]


def _train_for_ever(them: Cluster, out: Path) -> list[subprocess.Popen[bytes]] | None:
    words = ["pretrain", *FLAGS, "--train-iters", "1000000", "--log-interval", "50"]
    started = them.start(lambda number: words, out)
    return started if has_trained(out) else None


def cut(them: Cluster, out: Path) -> list[str]:
    """The network of the last machine ends for ever: both sides end within the limit and 30 s."""
    started = _train_for_ever(them, out)
    if started is None:
        return ["it did not train"]
    them.machines[-1].sh("ip link set eth0 down")
    found = ended(started, LIMIT + 30, out, time.monotonic())
    them.machines[-1].sh("ip link set eth0 up")
    faults = [f"machine {number} lived on" for number, code in enumerate(found.codes, 1) if code is None]
    faults += [f"code 0 on machine {number}" for number, code in enumerate(found.codes, 1) if code == 0]
    for number, log in enumerate(found.logs, 1):
        expected = (
            r"has not answered for" if number == len(found.logs) else rf"rank {len(found.logs) - 1} \(node"
        )
        if not re.search(rf"megatron_npu: rank \d+ ends: .*{expected}", log):
            faults.append(f"machine {number} names nobody")
    return faults


def cut_for_a_while(them: Cluster, out: Path) -> list[str]:
    """It ends for less than the limit: the run goes on."""
    started = _train_for_ever(them, out)
    if started is None:
        return ["it did not train"]
    them.machines[-1].sh("ip link set eth0 down")
    time.sleep(LIMIT / 4)
    them.machines[-1].sh("ip link set eth0 up")
    before = len((out / "1.log").read_text(errors="replace"))
    time.sleep(LIMIT)
    goes_on = all(process.poll() is None for process in started)
    more = (out / "1.log").read_text(errors="replace")[before:]
    for process in started:
        process.kill()
    return [] if goes_on and "iteration" in more else [f"it does not go on: {more[-300:]}"]


def killed(them: Cluster, out: Path) -> list[str]:
    """The last machine is gone with all its processes."""
    started = _train_for_ever(them, out)
    if started is None:
        return ["it did not train"]
    last = them.machines[-1]
    last.sh("ip link set eth0 down")
    subprocess.run(["kill", "-9", str(last.init)], check=True, timeout=30)
    found = ended(started[:-1], LIMIT + 30, out, time.monotonic())
    named = re.search(r"rank \d+ ends: rank \d+ \(node\d+", found.logs[0])
    return ([] if named else ["the machine is not named"]) + [f"codes {found.codes}"] * (None in found.codes)


def first_killed(them: Cluster, out: Path) -> list[str]:
    """The first machine, which holds the store, is gone with all its processes; its address still answers."""
    started = _train_for_ever(them, out)
    if started is None:
        return ["it did not train"]
    subprocess.run(["kill", "-9", str(them.machines[0].init)], check=True, timeout=30)
    found = ended(started[1:], 30, out, time.monotonic())
    faults = [f"codes {found.codes}"] * (None in found.codes)
    for number, log in enumerate(found.logs[1:], 2):
        if not re.search(r"megatron_npu: rank \d+ ends: .*rank 0 \(node1", log):
            faults.append(f"machine {number} does not name it")
    return faults


def loopback(them: Cluster, out: Path) -> list[str]:
    """A host name that means 127.0.1.1, as Debian has it."""
    last = them.machines[-1]
    text = last.hosts.read_text()
    last.hosts.write_text(text.replace(f"10.77.0.{last.number} ", "127.0.1.1 "))
    return _refused(them, out, rf"the name of node{last.number} is 127\.0\.1\.1.*GLOO_SOCKET_IFNAME=eth0")


def firewall(them: Cluster, out: Path) -> list[str]:
    """Only the master's port passes."""
    for each in them.machines:
        passing = "".join(
            f"ip rule add pref {n} ipproto tcp {way} 29500 lookup main; "
            for n, way in ((10, "dport"), (11, "sport"))
        )
        each.sh(f"{passing} ip rule add pref 20 to 10.77.0.0/24 ipproto tcp unreachable")
    return _refused(them, out, r"node1 does not reach node2 at 10\.77\.0\.2:\d+.*GLOO_SOCKET_IFNAME")


def _refused(them: Cluster, out: Path, line: str) -> list[str]:
    words = ["pretrain", *FLAGS, "--train-iters", "2"]
    found = ended(them.start(lambda number: words, out), START, out, time.monotonic())
    faults = [f"codes {found.codes}"] if not all(found.codes) else []
    return faults + [
        f"machine {n} does not say it" for n, log in enumerate(found.logs, 1) if not re.search(line, log)
    ]


def doctor(them: Cluster, out: Path) -> list[str]:
    """A look at all machines, and files of those that passed."""
    words = [
        "doctor",
        "--cluster",
        "--folder",
        f"{them.folder}/shared",
        "--out",
        f"{them.folder}/shared/looked",
    ]
    found = ended(them.start(lambda number: words, out), START, out, time.monotonic())
    passed = them.folder / "shared" / "looked" / "passed.txt"
    hosts = "".join(f"node{each.number}\n" for each in them.machines)
    good = found.codes == [0] * len(them.machines) and passed.is_file() and passed.read_text() == hosts
    return [] if good else [f"codes {found.codes}: {found.logs[0][-800:]}"]


TRIALS: dict[str, tuple[int, Callable[[Cluster, Path], list[str]]]] = {
    "doctor": (2, doctor),
    "private-save": (2, lambda them, out: private_save(them, out, "pretrain")),
    "private-save-train": (2, lambda them, out: private_save(them, out, "train")),
    "private-save-stock": (2, lambda them, out: private_save(them, out, "run")),
    "loopback": (2, loopback),
    "firewall": (2, firewall),
    "data-parallel": (2, shared_save),
    "pipeline": (2, lambda them, out: shared_save(them, out, "--pipeline-model-parallel-size", "2")),
    "cut": (2, cut),
    "cut-of-three": (3, cut),
    "cut-for-a-while": (2, cut_for_a_while),
    "killed": (3, killed),
    "first-killed": (2, first_killed),
}


def main(argv: list[str] | None = None) -> int:
    """Make the trials; return 1 if one has found a fault."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", choices=TRIALS, default=list(TRIALS), metavar="NAME")
    parser.add_argument("--keep", type=Path, help="a folder for what the machines have said")
    given = parser.parse_args(argv)
    failed = 0
    for name in given.only:
        machines, trial = TRIALS[name]
        with cluster(machines) as them, tempfile.TemporaryDirectory() as folder:
            out = (given.keep or Path(folder)) / name
            out.mkdir(parents=True, exist_ok=True)
            began = time.monotonic()
            faults = trial(them, out)
        failed += bool(faults)
        print(f"{name}: {'; '.join(faults) or 'as it should'} ({time.monotonic() - began:.0f} s)", flush=True)
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
