"""Faults of several machines, as a job meets them: machines.py [--only TEXT...] (root, Linux, on request)

Each trial starts a launcher on every machine (``namespaces``), does its harm, and looks how all of them end:
nobody may be silent, live longer than the watchdog's limit and 30 s, or end well with less than was asked
for. The harms are done to each of ``COMMANDS``; compiled kernels are those of this user, everything else is
each machine's own.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron_npu.upstream import megatrons
from tests.campaign.namespaces import Cluster, Machine, cluster
from tests.conftest import ROOT, checkout
from tests.support import stock_lm

LIMIT = 20  # seconds of the watchdog
BATCH = 12  # which one to four ranks share
START = 600  # seconds at most until ranks train, or have been refused
FLAGS = [
    *"--num-layers 2 --hidden-size 32 --num-attention-heads 2 --seq-length 32 --micro-batch-size 1".split(),
    *"--max-position-embeddings 32 --global-batch-size 12 --mock-data --tokenizer-type NullTokenizer".split(),
    *"--vocab-size 127 --lr 1e-3 --log-interval 1".split(),
]
STOCK = [*FLAGS, *"--eval-interval 1000000 --eval-iters 0".split()]
TRAIN = ROOT / "tests" / "finetune" / "scripts" / "dropout.py"
STILL = """
import torch
from rapidformer import Finetuner, RapidformerEngine

class Sums(Finetuner):
    def train_valid_test_datasets_provider(self):
        numbers = torch.randn(60, 8, generator=torch.Generator().manual_seed(0))
        return [{"x": row, "labels": (row.sum() > 0).long()} for row in numbers], None, None, None

    def model_optimizer_lr_scheduler_provider(self):
        layers = torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 2)
        return torch.nn.Sequential(*layers), None, None

    def run_forward_step(self, batch, model):
        return torch.nn.functional.cross_entropy(model(batch["x"]), batch["labels"])

Sums(RapidformerEngine()).train()
"""
LOSS = r"\bloss: ([-+]?\d[-+.\dEe]*)"


@dataclass(frozen=True)
class Command:
    """What is started on each machine.

    Attributes:
        words: of ``megatron-npu``, given the folder that all machines share, for so many iterations.
        variables: of its environment.
    """

    words: Callable[[Path, int], list[str]]
    variables: dict[str, str] = field(default_factory=dict)


def _driver(_: Path, iterations: int) -> list[str]:
    return ["pretrain", *FLAGS, "--train-iters", str(iterations), "--eval-iters", "0"]


def _train(_: Path, iterations: int) -> list[str]:
    sizes = "--micro-batch-size 2 --global-batch-size 12 --lr 1e-2 --log-interval 1 --no-plot"
    return ["train", "--user-script", str(TRAIN), *sizes.split(), "--train-iters", str(iterations)]


def _core(_: Path, iterations: int) -> list[str]:
    script = checkout("megatron_core", "0.16.1") / "pretrain_gpt.py"
    return ["run", str(script), *STOCK, "--train-iters", str(iterations)]


def _tree(tree: Path, shared: Path, iterations: int) -> list[str]:
    if not (shared / "text.bin").exists():
        stock_lm.write_data(shared)
    ends = ["--train-iters", str(iterations), "--eval-iters", "0", "--eval-interval", "1000000"]
    ends += ["--global-batch-size", str(BATCH)]
    return ["run", str(tree / "pretrain_gpt.py"), *stock_lm.flags(shared), *ends]


def _legacy(shared: Path, iterations: int) -> list[str]:
    return _tree(checkout("megatron_lm", megatrons.LEGACY_VERSION), shared, iterations)


def _deepspeed(shared: Path, iterations: int) -> list[str]:
    path = shared / "engine.json"
    sizes = {"train_micro_batch_size_per_gpu": 2, "train_batch_size": BATCH}
    path.write_text(json.dumps({**sizes, "zero_optimization": {"stage": 1}}))
    engine = f"--deepspeed --deepspeed_config {path} --zero-stage 1"
    return [*_tree(_tree_of_deepspeed(), shared, iterations), *engine.split()]


def _tree_of_deepspeed() -> Path:
    return checkout("megatron_deepspeed", "8387ae17")


def _of(tree: Callable[[], Path]) -> dict[str, str]:
    return {"MEGATRON_LM_PATH": str(tree())}


COMMANDS: dict[str, Callable[[], Command]] = {
    "driver": lambda: Command(_driver),
    "train": lambda: Command(_train),
    "stock-0.16.1": lambda: Command(_core, _of(lambda: checkout("megatron_core", "0.16.1"))),
    "stock-285068c8": lambda: Command(
        _legacy, _of(lambda: checkout("megatron_lm", megatrons.LEGACY_VERSION))
    ),
    "deepspeed": lambda: Command(_deepspeed, _of(_tree_of_deepspeed)),
}


@dataclass(frozen=True)
class Plan:
    """What a trial does.

    Attributes:
        machines: how many.
        command: see ``COMMANDS``.
        look: what is done, and what is found.
        ranks: of each machine.
        flags: of the layout.
        simulated: whether on simulated NPUs.
    """

    machines: int
    command: str
    look: Callable[[Trial], list[str]]
    ranks: int = 1
    flags: tuple[str, ...] = ()
    simulated: bool = False


@dataclass
class Trial:
    """Machines, and what is started on them.

    Attributes:
        them: the machines.
        out: the folder of what they say.
        command: see ``COMMANDS``.
        plan: see ``Plan``.
        own: variables of a single machine, by its number.
    """

    them: Cluster
    out: Path
    command: Command
    plan: Plan
    own: dict[int, dict[str, str]] = field(default_factory=dict)

    @property
    def ranks(self) -> int:
        return self.plan.ranks

    @property
    def shared(self) -> Path:
        return self.them.folder / "shared"

    def words(self, iterations: int, *more: str) -> list[str]:
        """Return the command for so many iterations, with more flags."""
        return [*self.command.words(self.shared, iterations), *self.plan.flags, *more]

    def start(self, words: list[str], **how: Any) -> list[subprocess.Popen[bytes]]:
        """Start a launcher on each machine, as ``start_on`` does."""
        return [self.start_on(machine, words, **how) for machine in self.them.machines]

    def start_on(
        self,
        machine: Machine,
        words: list[str],
        *,
        launcher: Sequence[str] | None = None,
    ) -> subprocess.Popen[bytes]:
        """Start a launcher on a machine, in a home of its own.

        Args:
            machine: one of them.
            words: of ``megatron-npu``.
            launcher: torchrun's flags, in place of those of a fixed number of machines.
        """
        cache = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
        env = {
            **{name: os.environ[name] for name in ("PATH", "LANG") if name in os.environ},
            **{"HOME": "/tmp/disk", "OMP_NUM_THREADS": "1", "MEGATRON_NPU_WATCHDOG": str(LIMIT)},
            **{"PYTHONPATH": str(ROOT), "XDG_CACHE_HOME": cache, "HF_HUB_OFFLINE": "1"},
            **({} if self.plan.simulated else {"MEGATRON_NPU_DEVICE": "cpu"}),
            **self.command.variables,
        }
        own = [f"{name}={value}" for name, value in self.own.get(machine.number, {}).items()]
        where = f"--nnodes {len(self.them.machines)} --node-rank {machine.number - 1}"
        fixed = [*where.split(), "--master-addr", "node1", "--master-port", "29500"]
        each = ["--nproc-per-node", str(self.ranks), "-m", "megatron_npu"]
        torchrun = [sys.executable, "-m", "torch.distributed.run", *(launcher or fixed), *each]
        with (self.out / f"{machine.number}.log").open("ab") as stream:
            return subprocess.Popen(
                machine.command(
                    "env", "-C", "/tmp/disk", *own, *self.on_devices(self.ranks), *torchrun, *words
                ),
                env=env,
                stdout=stream,
                stderr=subprocess.STDOUT,
            )

    def on_devices(self, count: int) -> list[str]:
        """Return what runs a command on so many simulated NPUs, if the trial is one of NPUs.

        Megatron-DeepSpeed (8387ae17) takes the rank modulo the devices of a machine for the local rank.
        """
        if not self.plan.simulated:
            return []
        return [sys.executable, "-m", "megatron_npu", "sim", "--devices", str(count), "--"]

    def run(self, words: list[str]) -> Outcome:
        """Start the launchers and wait for all of them."""
        return self.ended(self.start(words), START, time.monotonic())

    def for_ever(self, *more: str) -> list[subprocess.Popen[bytes]] | None:
        """Start a training without an end; return its launchers as soon as it trains, None if it does not."""
        interval = "1" if self.plan.simulated else "20"  # a step of simulated NPUs takes about a second
        started = self.start(self.words(1000000, "--log-interval", interval, *more))
        end = time.monotonic() + START
        while time.monotonic() < end and all(process.poll() is None for process in started):
            if re.search(r"\biteration +\d*[1-9]", self.log(1)) or "| lm loss" in self.log(len(started)):
                return started
            time.sleep(0.5)
        return None

    def log(self, number: int) -> str:
        return (self.out / f"{number}.log").read_text(encoding="utf-8", errors="replace")

    def logs(self) -> list[str]:
        return [self.log(machine.number) for machine in self.them.machines]

    def ended(self, started: list[subprocess.Popen[bytes]], seconds: float, began: float) -> Outcome:
        """Wait for these launchers, at most so long; return how they have ended."""
        codes: list[int | None] = []
        for process in started:
            try:
                codes.append(process.wait(max(0.1, began + seconds - time.monotonic())))
            except subprocess.TimeoutExpired:
                codes.append(None)
                process.kill()
        return Outcome(codes, time.monotonic() - began, self.logs())


@dataclass(frozen=True)
class Outcome:
    """How a trial has ended.

    Attributes:
        codes: of each launcher; None: it lived on, and was killed.
        seconds: from the harm (or the start) to the last end.
        logs: what each machine has said.
    """

    codes: list[int | None]
    seconds: float
    logs: list[str]


# -- the trials


def private_save(trial: Trial) -> list[str]:
    """A disk on each machine under one name: refused, and nothing called whole."""
    found = trial.run(trial.words(4, "--save", "/tmp/disk/save", "--save-interval", "2"))
    faults = [] if all(found.codes) else [f"codes {found.codes}"]
    if not re.search(r"(is|are) not visible on node2 \(rank \d+\)", "".join(found.logs)):
        faults.append("the machine is not named")
    return faults


def parts(trial: Trial) -> list[str]:
    """A part on each machine: called a part, resumed from, and joined to one that is whole."""
    flags = [
        "--save",
        "/tmp/disk/save",
        "--save-interval",
        "2",
        "--save-per-machine",
        "--load",
        "/tmp/disk/save",
    ]
    for iterations in (2, 4):
        # the first run ends before its schedule does
        ends = ["--exit-interval", "2"] if iterations == 2 and trial.command.words is not _train else []
        found = trial.run(trial.words(4, *flags, *ends))
        if any(found.codes):
            return [f"codes {found.codes} of the run to iteration {iterations}"]
    if not re.search(r"resuming from iteration|successfully loaded", found.logs[0]):
        return ["it has not resumed"]
    saved = [trial.them.folder / f"disk{each.number}" / "disk" / "save" for each in trial.them.machines]
    if (
        trial.command.variables == COMMANDS["deepspeed"]().variables
    ):  # whose folders the command does not know
        return []
    command = [sys.executable, "-m", "megatron_npu", "checkpoint"]
    run = functools.partial(subprocess.run, capture_output=True, text=True, cwd=ROOT, timeout=START)
    said = [run([*command, "verify", str(folder)], check=False) for folder in saved]
    faults = [each.stdout + each.stderr for each in said if each.returncode]
    # one may have all files: that of rank 0, without ZeRO
    if not any("only a part of a checkpoint" in each.stdout for each in said):
        faults.append("no machine has a part")
    joined = str(trial.them.folder / "joined")
    run([*command, "gather", *map(str, saved), "--into", joined], check=True)
    whole = run([*command, "verify", joined], check=False)
    return faults + ([] if whole.stdout.endswith(": whole\n") else [whole.stdout + whole.stderr])


def losses(trial: Trial, *flags: str, tolerance: float = 2e-6) -> list[str]:
    """A training over the machines: the losses of as many ranks on one machine."""
    words = trial.words(4, *flags)
    found = trial.run(words)
    if any(code != 0 for code in found.codes):
        return [f"codes {found.codes}"]
    ranks = trial.ranks * len(trial.them.machines)
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    alone = subprocess.run(
        [*trial.on_devices(ranks), sys.executable, *launcher, "-m", "megatron_npu", *words],
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **trial.command.variables},
        capture_output=True,
        text=True,
        cwd=trial.them.folder,
        timeout=START,
        check=False,
    )
    here, there = ([*map(float, re.findall(LOSS, text))] for text in ("".join(found.logs), alone.stdout))
    same = len(here) == len(there) > 0 and all(abs(a - b) < tolerance * abs(b) for a, b in zip(here, there))  # noqa: B905
    return [] if same else [f"losses {here}, of one machine {there}"]


def cut(trial: Trial) -> list[str]:
    """The network of the last machine ends for ever: both sides end within the limit and 30 s."""
    started = trial.for_ever()
    if started is None:
        return ["it did not train"]
    trial.them.machines[-1].sh("ip link set eth0 down")
    found = trial.ended(started, LIMIT + 30, time.monotonic())
    trial.them.machines[-1].sh("ip link set eth0 up")
    faults = [f"machine {number} lived on" for number, code in enumerate(found.codes, 1) if code is None]
    faults += [f"code 0 on machine {number}" for number, code in enumerate(found.codes, 1) if code == 0]
    for number, log in enumerate(found.logs, 1):
        expected = (
            r"has not answered for" if number == len(found.logs) else rf"rank \d+ \(node{len(found.logs)}"
        )
        if not re.search(rf"megatron_npu: rank \d+ exits: .*{expected}", log):
            faults.append(f"machine {number} names nobody")
    return faults


def cut_for_a_while(trial: Trial) -> list[str]:
    """It ends for less than the limit: the run goes on, with the losses and norms of a run without a cut."""
    started = trial.for_ever()
    if started is None:
        return ["it did not train"]
    trial.them.machines[-1].sh("ip link set eth0 down")
    time.sleep(LIMIT / 4)
    trial.them.machines[-1].sh("ip link set eth0 up")
    before = [len(log) for log in trial.logs()]
    time.sleep(LIMIT)
    goes_on = all(process.poll() is None for process in started)
    for machine in trial.them.machines:
        machine.kill_all()
    after = [len(log) for log in trial.logs()]
    if not goes_on or not _curve(trial, before):
        return [f"it does not go on: {''.join(trial.logs())[-300:]}"]
    cut_off = _curve(trial, [0] * len(after))
    trial.for_ever()
    end = time.monotonic() + START
    while time.monotonic() < end and max(_curve(trial, after), default=0) < max(cut_off):
        time.sleep(1)
    whole = _curve(trial, after)
    differing = [each for each, row in cut_off.items() if whole.get(each) != row]
    return [f"other losses or norms at {differing[:5]} of {max(cut_off)} iterations"] if differing else []


def preempted(trial: Trial) -> list[str]:
    """Each launcher gets SIGTERM, as of a batch system: a last save, from which the next run goes on."""
    save = trial.shared / "save"
    flags = ["--save", str(save), "--load", str(save), "--save-interval"]
    if trial.command.words is _deepspeed:  # 8387ae17 has no such flag: it goes on from its last interval
        flags += ["3"]
    else:
        flags += ["100000", "--exit-signal-handler"]
    started = trial.for_ever(*flags)
    end = time.monotonic() + START
    while "3" in flags and not (save / "latest").exists():  # DeepSpeed's own name of the tracker
        if time.monotonic() > end:
            return ["it did not save"]
        time.sleep(1)
    if started is None:
        return ["it did not train"]
    for machine in trial.them.machines:
        term = machine.command("pkill", "-TERM", "-f", "torch.distributed.run")
        subprocess.run(term, check=True, timeout=30)
    found = trial.ended(started, LIMIT + 30, time.monotonic())
    if None in found.codes:
        return [f"codes {found.codes}"]
    begins = [len(log) for log in found.logs]
    trial.start(trial.words(1000000, *flags))
    resumed = r"(?:resuming from iteration|successfully loaded .* iteration) +0*[1-9]"
    end = time.monotonic() + START
    while time.monotonic() < end:
        if any(re.search(resumed, log[n:]) for log, n in zip(trial.logs(), begins, strict=True)):
            return []
        time.sleep(1)
    return ["the next run has not resumed"]


def _curve(trial: Trial, begins: list[int]) -> dict[int, tuple[str, str]]:
    """Return loss and gradient norm by iteration, as logs say them from these places on."""
    text = "\n".join(log[begin:] for log, begin in zip(trial.logs(), begins, strict=True))
    rows = re.findall(r"\biteration +(\d+)/.*?\bloss: (\S+).*?\bgrad norm: (\S+)", text)
    return {int(number): (loss, norm) for number, loss, norm in rows}


def killed(trial: Trial) -> list[str]:
    """The last machine is gone with all its processes."""
    started = trial.for_ever()
    if started is None:
        return ["it did not train"]
    last = trial.them.machines[-1]
    last.sh("ip link set eth0 down")
    subprocess.run(["kill", "-9", str(last.init)], check=True, timeout=30)
    found = trial.ended(started[:-1], LIMIT + 30, time.monotonic())
    named = re.search(rf"rank \d+ exits: rank \d+ \(node{last.number}", found.logs[0])
    return ([] if named else ["the machine is not named"]) + [f"codes {found.codes}"] * (None in found.codes)


def first_killed(trial: Trial) -> list[str]:
    """The first machine, which holds the store, is gone with all its processes; its address still answers."""
    started = trial.for_ever()
    if started is None:
        return ["it did not train"]
    subprocess.run(["kill", "-9", str(trial.them.machines[0].init)], check=True, timeout=30)
    found = trial.ended(started[1:], 30, time.monotonic())
    faults = [f"codes {found.codes}"] * (None in found.codes)
    for number, log in enumerate(found.logs[1:], 2):
        # torch_npu ends a process for an error of HCCL, which names the rank: often before the watchdog does
        by_hccl = "|HCCL: a peer is gone .*rank 0 \\(global rank 0, node1" * trial.plan.simulated
        if not re.search(rf"megatron_npu: rank \d+ exits: .*rank 0 \(node1{by_hccl}", log):
            faults.append(f"machine {number} does not name it")
    return faults


def loopback(trial: Trial) -> list[str]:
    """A host name that means 127.0.1.1, as Debian has it."""
    last = trial.them.machines[-1]
    text = last.hosts.read_text()
    last.hosts.write_text(text.replace(f"10.77.0.{last.number} ", "127.0.1.1 "))
    return _refused(trial, rf"the host name of node{last.number} \(127\.0\.1\.1\).*GLOO_SOCKET_IFNAME=eth0")


def firewall(trial: Trial) -> list[str]:
    """Only the master's port passes."""
    for each in trial.them.machines:
        passing = "".join(
            f"ip rule add pref {n} ipproto tcp {way} 29500 lookup main; "
            for n, way in ((10, "dport"), (11, "sport"))
        )
        each.sh(f"{passing} ip rule add pref 20 to 10.77.0.0/24 ipproto tcp unreachable")
    return _refused(trial, r"node1 cannot reach node2 at 10\.77\.0\.2:\d+.*GLOO_SOCKET_IFNAME")


def _refused(trial: Trial, line: str) -> list[str]:
    found = trial.run(trial.words(2))
    faults = [f"codes {found.codes}"] if not all(found.codes) else []
    return faults + [
        f"machine {n} does not say it" for n, log in enumerate(found.logs, 1) if not re.search(line, log)
    ]


def wrong_address(trial: Trial) -> list[str]:
    """The second machine was given an address where nobody is: both end after the wait, and say why."""
    trial.command.variables["MEGATRON_NPU_RENDEZVOUS_TIMEOUT"] = str(LIMIT)
    began, words, started = time.monotonic(), trial.words(2), []
    for machine, address in zip(trial.them.machines, ("node1", "10.77.0.9"), strict=True):
        place = f"--nnodes 2 --node-rank {machine.number - 1} --master-addr {address} --master-port 29500"
        started.append(trial.start_on(machine, words, launcher=place.split()))
    found = trial.ended(started, LIMIT + 30, began)
    lines = (
        r"error: torchrun on machine 0 \(node1\) has waited for the other machines at .* node1:29500",
        r"error: torchrun on machine 1 \(node2\) cannot reach .* 10\.77\.0\.9:29500 \(.*: \d+ attempts in",
    )
    faults = [] if all(found.codes) else [f"codes {found.codes}"]
    return faults + [
        f"machine {n} does not say it"
        for n, (log, line) in enumerate(zip(found.logs, lines, strict=True), 1)
        if not re.search(line, log)
    ]


def hccl_address(trial: Trial) -> list[str]:
    """HCCL was given an address on each machine that the other one does not reach."""
    for each in trial.them.machines:
        each.sh(f"ip addr add 10.88.0.{each.number}/32 dev lo")
        trial.own[each.number] = {"HCCL_IF_IP": f"10.88.0.{each.number}"}
    return _refused(trial, r"node1 cannot reach node2 at its HCCL_IF_IP 10\.88\.0\.2:\d+")


def private_load(trial: Trial) -> list[str]:
    """Each machine has only its own files, and then the second one none: loaded whole, or refused."""
    folder = "/tmp/disk/save"
    ends = ["--exit-interval", "2"] if trial.command.words is not _train else ["--train-iters", "2"]
    save = ["--save", folder, "--save-interval", "2", "--save-per-machine"]
    found = trial.run([*trial.words(4, *save), *ends])
    if any(found.codes):
        return [f"codes {found.codes} of the first run"]
    began = [len(log) for log in found.logs]
    found = trial.run(trial.words(4, "--load", folder))
    said = [log[begin:] for log, begin in zip(found.logs, began, strict=True)]
    faults = [f"codes {found.codes} of the run that loads"] if any(found.codes) else []
    if not re.search(r"resuming from iteration 2|successfully loaded .* iteration 2", "".join(said)):
        faults.append("it has not resumed")
    began = [len(log) for log in found.logs]
    shutil.rmtree(trial.them.folder / "disk2" / "disk" / "save")
    found = trial.run(trial.words(4, "--load", folder))
    said = [log[begin:] for log, begin in zip(found.logs, began, strict=True)]
    faults += [] if all(found.codes) else [f"codes {found.codes} of the run without a part"]
    return faults + ([] if re.search(r"error: .*node2", "".join(said)) else ["node2 is not named"])


def kernels(trial: Trial) -> list[str]:
    """A cache on each machine, and no compiler on the second: one compilation, and the same losses."""
    for machine in trial.them.machines:
        folder = trial.them.folder / f"disk{machine.number}" / "disk" / "bin"
        folder.mkdir()
        for file in Path("/usr/bin").iterdir():
            if not re.search(r"g\+\+|c\+\+|clang|gcc|^cc$", file.name):
                (folder / file.name).symlink_to(file)
        trial.own[machine.number] = {"PATH": "/tmp/disk/bin", "XDG_CACHE_HOME": "/tmp/disk/cache"}
    compiler = trial.them.folder / "disk1" / "disk" / "bin" / "g++"
    compiler.write_text('#!/bin/sh\necho "$*" >> /tmp/disk/compiled\nPATH=/usr/bin exec /usr/bin/g++ "$@"\n')
    compiler.chmod(0o755)
    # with and without the kernels, dropout draws other numbers
    faults = losses(trial, "--attention-dropout", "0", "--hidden-dropout", "0", tolerance=1e-5)
    compiled = (trial.them.folder / "disk1" / "disk" / "compiled").read_text().splitlines()
    count = sum("kernels.cpp" in line for line in compiled)
    faults += [] if count == 1 else [f"{count} compilations of kernels.cpp on machine 1"]
    told = re.search(r"compiled kernels .*there is no g\+\+ on PATH", trial.log(2))
    return faults + ([] if told else ["machine 2 does not say that it has no compiler"])


def elastic(trial: Trial) -> list[str]:
    """A machine is lost, the other goes on alone, and takes it back: losses are as if nothing had been."""
    save, still = trial.shared / "save", _without_chance(trial)
    goes_on = ["--save", str(save), "--load", str(save), "--save-interval", "5", *still]
    words = trial.words(100000, *goes_on)
    elastically = (
        "--nnodes 1:2 --max-restarts 3 --rdzv-backend c10d --rdzv-endpoint node1:29500 --rdzv-id job"
    )
    often = "last_call_timeout=5,keep_alive_interval=2,keep_alive_max_attempt=3"
    launcher = [*elastically.split(), "--rdzv-conf", often]
    trial.command.variables["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    started = trial.start(words, launcher=launcher)
    worlds = [2, 1, 2]
    for number, world in enumerate(worlds):
        if not _trains(save, worlds[: number + 1]):
            return [f"it does not train with {world} machine(s), after {worlds[:number]}"]
        if number == 0:
            trial.them.machines[1].kill_all()
        if number == 1:
            started[1] = trial.start_on(trial.them.machines[1], words, launcher=launcher)
    for process in started:
        process.kill()
    found = _losses_of_file(save)
    alone = trial.shared / "alone"
    command = [sys.executable, "-m", "megatron_npu"]
    end = ["--exit-interval", str(max(found)), "--save", str(alone), *still]
    subprocess.run(
        [*command, *trial.words(100000, *end)],
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        cwd=trial.shared,
        capture_output=True,
        timeout=START,
        check=True,
    )
    expected = _losses_of_file(alone)
    differing = [each for each, loss in found.items() if abs(loss - expected[each]) > 1e-4 * expected[each]]
    return [f"losses differ at {differing[:5]} of {max(found)} iterations"] if differing else []


def _without_chance(trial: Trial) -> list[str]:
    """Return flags of a training without dropout, whose state fits any number of ranks."""
    if trial.command.words is not _train:
        reshardable = ["--use-distributed-optimizer", "--dist-ckpt-optim-fully-reshardable"]
        return ["--attention-dropout", "0", "--hidden-dropout", "0", *reshardable]
    script = trial.shared / "still.py"
    script.write_text(STILL, encoding="utf-8")
    return ["--user-script", str(script)]


def _trains(save: Path, worlds: list[int]) -> bool:
    """Wait until a run has begun with so many ranks one after the other, and then trained five iterations."""
    end = time.monotonic() + START
    while time.monotonic() < end:
        rows = _rows(save)
        starts = [place for place, row in enumerate(rows) if row["event"] == "start"]
        if [rows[place]["world_size"] for place in starts] == worlds and len(rows) > starts[-1] + 8:
            return True
        time.sleep(0.5)
    return False


def _rows(save: Path) -> list[dict[str, Any]]:
    path = save / "metrics.jsonl"
    lines = path.read_text().rpartition("\n")[0].splitlines() if path.is_file() else []
    return [json.loads(line) for line in lines]


def _losses_of_file(save: Path) -> dict[int, float]:
    rows = [row for row in _rows(save) if row["event"] == "train"]
    return {row["iteration"]: row["loss"] for row in rows}


def private_folder(trial: Trial) -> list[str]:
    """A look at machines with a disk each under the folder's name: the second one has failed."""
    looked = trial.shared / "looked"
    found = trial.run(["doctor", "--cluster", "--folder", "/tmp/disk", "--out", str(looked)])
    named = (looked / "failed.txt").read_text() == "node2\n" and "not visible here" in found.logs[0]
    return [] if all(found.codes) and named else [f"codes {found.codes}: {found.logs[0][-800:]}"]


def doctor(trial: Trial) -> list[str]:
    """A look at all machines, and files of those that passed."""
    looked = trial.shared / "looked"
    found = trial.run(["doctor", "--cluster", "--folder", str(trial.shared), "--out", str(looked)])
    passed = looked / "passed.txt"
    hosts = "".join(f"node{each.number}\n" for each in trial.them.machines)
    good = found.codes == [0] * len(trial.them.machines) and passed.is_file() and passed.read_text() == hosts
    return [] if good else [f"codes {found.codes}: {found.logs[0][-800:]}"]


Look = Callable[[Trial], list[str]]
EACH: dict[str, tuple[int, Look]] = {  # machines, and what is done to each command
    "private-save": (2, private_save),
    "parts": (2, parts),
    "loopback": (2, loopback),
    "firewall": (2, firewall),
    "wrong-address": (2, wrong_address),
    "private-load": (2, private_load),
    "losses-data-parallel": (2, losses),
    "cut": (2, cut),
    "cut-for-a-while": (2, cut_for_a_while),
    "killed": (3, killed),
    "first-killed": (2, first_killed),
    "preempted": (2, preempted),
}
LAYOUTS = {  # machines, ranks of each, flags
    "pipeline": (2, 1, ("--pipeline-model-parallel-size", "2")),
    "tensor-in-data-across": (2, 2, ("--tensor-model-parallel-size", "2")),
    "data-parallel-of-four": (2, 2, ()),
    "three-machines": (3, 1, ()),
    "pipeline-of-three": (3, 1, ("--pipeline-model-parallel-size", "3", "--num-layers", "3")),
}
IN_LAYOUTS: dict[str, Look] = {"losses": losses, "cut": cut, "killed": killed, "first-killed": first_killed}
OTHERS = ("stock-285068c8", "deepspeed")  # in layouts other than data parallelism, besides the two of LAYOUTS
IN_THEIR_LAYOUTS = ("pipeline", "tensor-in-data-across")
IN_PIPELINES: dict[str, Look] = {  # across two machines
    "cut-for-a-while": cut_for_a_while,
    "preempted": preempted,
    "private-load": private_load,
    "private-save": private_save,
    "parts": parts,
}
NPU: dict[str, Look] = {"losses": losses, "cut": cut, "cut-for-a-while": cut_for_a_while, "killed": killed}


def trials() -> dict[str, Plan]:
    """Return all trials by their names."""
    found = {
        "doctor": Plan(2, "driver", doctor),
        "doctor-private-folder": Plan(2, "driver", private_folder),
        "kernels": Plan(2, "driver", kernels, ranks=2),
        "kernels/stock-0.16.1": Plan(2, "stock-0.16.1", kernels, ranks=2),
        "wrong-address-npu/driver": Plan(2, "driver", wrong_address, simulated=True),
        "hccl-address-npu/driver": Plan(2, "driver", hccl_address, simulated=True),
        "elastic": Plan(2, "driver", elastic),
        "elastic/train": Plan(2, "train", elastic),
    }
    for name, (machines, look) in EACH.items():
        found |= {f"{name}/{command}": Plan(machines, command, look) for command in COMMANDS}
    for name, (machines, ranks, flags) in LAYOUTS.items():
        for command in ("driver", "stock-0.16.1"):
            for harm, look in IN_LAYOUTS.items():
                found[f"{harm}-{name}/{command}"] = Plan(machines, command, look, ranks, flags)
    found |= _further()
    for harm, look in IN_LAYOUTS.items():
        for command in COMMANDS:
            found[f"{harm}-npu/{command}"] = Plan(2, command, look, simulated=True)
    for harm, look in NPU.items():
        for name in ("pipeline", "tensor-in-data-across"):
            machines, ranks, flags = LAYOUTS[name]
            for command in ("driver", "stock-0.16.1"):
                plan = Plan(machines, command, look, ranks, flags, simulated=True)
                found[f"{harm}-npu-{name}/{command}"] = plan
    return found


def _further() -> dict[str, Plan]:
    """Return trials of further commands on three machines, and in layouts other than data parallelism."""
    found = {}
    for harm, look in IN_LAYOUTS.items():
        for name in IN_THEIR_LAYOUTS:
            machines, ranks, flags = LAYOUTS[name]
            for command in OTHERS:
                found[f"{harm}-{name}/{command}"] = Plan(machines, command, look, ranks, flags)
        for command in ("train", *OTHERS) if harm != "killed" else ():  # which is on three machines already
            found[f"{harm}-three-machines/{command}"] = Plan(3, command, look)
    for harm, look in IN_PIPELINES.items():
        machines, ranks, flags = LAYOUTS["pipeline"]
        for command in ("driver", "stock-0.16.1"):
            found[f"{harm}-pipeline/{command}"] = Plan(machines, command, look, ranks, flags)
    return found


def main(argv: list[str] | None = None) -> int:
    """Make the trials; return 1 if one has found a fault."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--only", nargs="+", default=[""], metavar="TEXT", help="trials with it in their name"
    )
    parser.add_argument("--keep", type=Path, help="a folder for what the machines have said")
    parser.add_argument("--output", type=Path, help="a JSON file of results, to which each trial's is added")
    parser.add_argument("--missing", action="store_true", help="only trials that are not in that file")
    given = parser.parse_args(argv)
    failed = 0
    for name, plan in trials().items():
        known = _results(given.output)
        if not any(text in name for text in given.only) or (given.missing and name in known):
            continue
        with cluster(plan.machines) as them, tempfile.TemporaryDirectory() as folder:
            out = (given.keep or Path(folder)) / name.replace("/", "-")
            shutil.rmtree(out, ignore_errors=True)
            out.mkdir(parents=True)
            began = time.monotonic()
            faults = _found(Trial(them, out, COMMANDS[plan.command](), plan))
        failed += bool(faults)
        seconds = round(time.monotonic() - began)
        print(f"{name}: {'; '.join(faults) or 'as it should'} ({seconds} s)", flush=True)
        if given.output:
            record(given.output, name, faults, seconds=seconds)
    return int(bool(failed))


def record(output: Path, name: str, faults: list[str], **more: Any) -> None:
    """Add the result of a trial to a JSON file, with date and commit."""
    row = {"faults": faults, **more, "date": time.strftime("%F"), "commit": _commit()}
    text = json.dumps({**_results(output), name: row}, indent=1, sort_keys=True)
    output.write_text(text + "\n", encoding="utf-8")


def _found(trial: Trial) -> list[str]:
    try:
        return trial.plan.look(trial)
    except Exception as error:  # the others are tried all the same
        return [f"the trial itself: {type(error).__name__}: {error}"]


def _commit() -> str:
    command = ["git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=30).stdout.strip()


def _results(path: Path | None) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8")) if path and path.is_file() else {}


if __name__ == "__main__":
    sys.exit(main())
