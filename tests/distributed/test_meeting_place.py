"""A wrong MASTER_ADDR, or a machine that does not come: each command ends early, and says why in one line."""

from __future__ import annotations

import functools
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from megatron_npu.base import settings
from megatron_npu.base.errors import UsageError
from megatron_npu.process import meeting_place, torchrun_waits
from megatron_npu.watchdog import first_contact
from tests.conftest import on_a_leash
from tests.support import foreign_stores, ports, processes, tiny, train_runs, warm

pytest.importorskip("megatron.core")

SLOW = tiny.ROOT / "tests" / "finetune" / "scripts" / "slow.py"
WAIT = {settings.RENDEZVOUS_TIMEOUT.name: "1"}
TOGETHER = 6  # commands that wait at the same time
Done = subprocess.CompletedProcess[str]
ELSEWHERE = (
    r"cannot reach MASTER_ADDR:MASTER_PORT 127\.0\.0\.1:{port} \(Connection refused; it is an address of "
    r"this machine itself, which is not the first one\): \d+ attempts? in \d s. The first machine "
    r"must .*firewall opens "
    r"port {port}\. MEGATRON_NPU_RENDEZVOUS_TIMEOUT=SECONDS sets the wait"
)
UNKNOWN = (
    r"cannot reach MASTER_ADDR:MASTER_PORT nowhere\.invalid:{port} \(the host name does not resolve.*; "
    r"it is not an address of this machine, which serves"
)
MISSING = r"has waited for (?:machine 1|\d+ s for rank 1)\b.*127\.0\.0\.1:{port}"
# the number of this machine, its MASTER_ADDR, and what is said
WRONG = {
    "another-machine": (1, "127.0.0.1", ELSEWHERE),
    "the-first-machine": (0, "nowhere.invalid", UNKNOWN),
    "nobody-comes": (0, "127.0.0.1", MISSING),
}


def ends_early(command: str, case: str) -> tuple[Done, str]:
    """Start a command that waits in vain; return what it did, and the port."""
    number, address, _ = WRONG[case]
    port = str(ports.free_port())
    place = {"MASTER_ADDR": address, "MASTER_PORT": port, **WAIT}
    if command == "train":
        script = ("--user-script", SLOW, "--train-iters", 2)
        return train_runs.train(*script, processes=1, NNODES="2", NODE_RANK=str(number), **place), port
    flags = [*tiny.flags_for(Path())[:-2], "--mock-data"]
    rank = {"RANK": str(number), "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    words = [sys.executable, "-m", "megatron_npu", "pretrain", *flags]
    env = {**tiny.environment(), **rank, **place}
    return warm.run(words, env=env, modules=warm.DRIVER, capture_output=True, text=True, check=False), port


def torchrun_ends() -> tuple[Done, str]:
    """Start torchrun, whose first machine is not there; return what it did, and the port."""
    port = str(ports.free_port())
    place = ["--nnodes", "2", "--node-rank", "1", "--master-addr=127.0.0.1", "--master_port", port]
    launcher = [sys.executable, "-m", "torch.distributed.run", *place, "--nproc-per-node", "1"]
    words = [*launcher, "-m", "megatron_npu", "pretrain", "--mock-data"]
    return processes.run(words, env={**tiny.environment(), **WAIT}, capture_output=True, text=True), port


@pytest.fixture(scope="module")
def ended() -> dict[tuple[str, ...], tuple[Done, str]]:
    """What each command that waits did, and the port; they wait for seconds, so they do it together."""
    starts: dict[tuple[str, ...], Callable[[], tuple[Done, str]]] = {("torchrun",): torchrun_ends}
    for command in ("pretrain", "train"):
        starts |= {(command, case): functools.partial(ends_early, command, case) for case in WRONG}
    for command in ("pretrain", "doctor"):
        starts |= {(command, kind): functools.partial(store_is_foreign, command, kind) for kind in FOREIGN}
    for words in TORCHRUN_AT:
        starts[("torchrun", *words)] = functools.partial(torchruns_store_is_foreign, *words)
    with ThreadPoolExecutor(TOGETHER) as pool:
        started = {key: pool.submit(start) for key, start in starts.items()}
        return {key: each.result() for key, each in started.items()}


def assert_refused(done: Done, pattern: str) -> None:
    """Check that a command has ended with exit code 2 and a line that matches, without a traceback."""
    assert done.returncode == 2, done.stderr
    assert re.search(pattern, done.stderr), done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("case", WRONG)
@pytest.mark.parametrize("command", ["pretrain", "train"])
def test_a_command_ends_early(ended, command: str, case: str) -> None:
    """It took ten minutes, of ``train`` fifteen, and torch's C++ messages were all that was said."""
    done, port = ended[command, case]
    assert_refused(done, f"error: .*{WRONG[case][2].format(port=port)}")


def test_torchrun_is_ended_early(ended) -> None:
    """In the process of torchrun, before there are ranks: torch's own limit is fifteen minutes."""
    done, port = ended[("torchrun",)]
    line = ELSEWHERE.format(port=port).replace("MASTER_ADDR:MASTER_PORT", "--master-addr:--master-port")
    assert done.returncode == 1
    assert re.search(rf"megatron_npu: error: torchrun on machine 1 \(.*\) {line}", done.stderr), done.stderr


PYTHON = ["python", "-m", "torch.distributed.run"]
OURS = ["-m", "megatron_npu", "train"]
MASTER = "--nnodes 2 --node_rank=1 --master-addr node1 --master_port 7".split()
RENDEZVOUS = "--nnodes=1:4 --rdzv-backend c10d --rdzv_endpoint=127.0.0.1:9".split()
LAUNCHES = {
    "static": ([*PYTHON, *MASTER, *OURS], ("node1", 7, False, True)),
    "first": (["/bin/torchrun", "--nnodes", "2", *OURS], ("127.0.0.1", 29500, True, False)),
    "elastic": (["/bin/torchrun", *RENDEZVOUS, *OURS], ("127.0.0.1", 9, True, False)),
    "one-machine": ([*PYTHON, "--nproc-per-node", "2", *OURS], None),
    "one-machine-with-a-store": ([*PYTHON, *RENDEZVOUS[1:], *OURS], ("127.0.0.1", 9, True, False)),
    "a-free-port": ([*PYTHON, *RENDEZVOUS[1:3], "--rdzv-endpoint=localhost:0", *OURS], None),
    "another-program": ([*PYTHON, *MASTER, "train.py"], None),
    "a-rank": (["python", "-m", "megatron_npu", "run", "torchrun", *MASTER], None),
}


@pytest.mark.parametrize("case", LAUNCHES)
def test_torchruns_that_are_watched(case: str) -> None:
    command, expected = LAUNCHES[case]
    words = torchrun_waits._options(command)
    place = torchrun_waits._place(words) if words else None
    assert (place and (place.host, place.port, place.serves, place.elsewhere)) == expected


def test_a_longer_wait_that_torchrun_was_told_is_kept() -> None:
    words = [*MASTER, "--rdzv-conf", "rank=1,timeout=1800"]
    place = torchrun_waits._place(words)
    assert place is not None
    assert meeting_place._hint(place)[1] == place.patience == 1800
    assert meeting_place.patience_for_others(place.patience) == 1800
    assert torchrun_waits._place(MASTER).patience == 0  # type: ignore[union-attr]


def test_a_rank_that_fails_before_rank_0_serves_its_store_tells_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 would wait for it for ten minutes, and not know why."""
    port = ports.free_port()
    rank = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    for name, value in (rank | {"MASTER_PORT": str(port)}).items():
        monkeypatch.setenv(name, value)
    served = []
    answers = meeting_place.answers

    def later(host: str, port: int) -> bool:
        said = answers(host, port)
        if not said:
            served.append(first_contact.serve(port))
        return said

    monkeypatch.setattr(meeting_place, "answers", later)
    first_contact.tell(meeting_place.NoAnswerError("no store"))  # it has waited already
    assert not served
    first_contact.tell(UsageError("no data", remedy="Pass some."))
    (store,) = served
    assert store.get(f"{first_contact._prefix()}/failed").endswith(b" exited: no data. Pass some.")


# what a program that is no store does with a connection that it has accepted, and what is told of it
FOREIGN: dict[str, tuple[foreign_stores.Behaviour, str]] = {
    "pongs": (
        functools.partial(foreign_stores.answering, more=0),
        "it accepts the connection, but does not answer",
    ),
    "knows-no-sums": (
        functools.partial(foreign_stores.answering, more=5),
        r"it answers b'.*' to a request whose answer is \d+",
    ),
    "silent": (lambda connection: None, "it accepts the connection, but does not answer"),
    "closes": (socket.socket.close, "it closes the connection"),
    "zeros": (
        lambda connection: connection.sendall(bytes(1 << 16)),
        r"it answers b'\\x00\\x00\\x00\\x00' to a ping",
    ),
    "http": (
        lambda connection: connection.sendall(b"HTTP/1.1 400 Bad\r\n\r\n"),
        "it answers b'HTTP' to a ping",
    ),
}


TORCHRUN_AT = [("1", "silent"), ("2", "silent"), ("2", "pongs")]  # so many nodes, and what it finds there


def store_is_foreign(command: str, kind: str) -> tuple[Done, str]:
    """Start a rank whose store is another program; return what it did, and the port."""
    with foreign_stores.serving(FOREIGN[kind][0]) as port:
        flags = [*tiny.flags_for(Path())[:-2], "--mock-data"] if command == "pretrain" else ["--cluster"]
        rank = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1"}
        place = {**rank, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        words = [sys.executable, "-m", "megatron_npu", command, *flags]
        env = {**tiny.environment(), **place, **WAIT}
        options: dict[str, Any] = {"capture_output": True, "text": True, "check": False, "timeout": 100}
        return warm.run(words, env=env, modules=warm.DRIVER, **options), str(port)


def torchruns_store_is_foreign(nodes: str, kind: str) -> tuple[Done, str]:
    """Start torchrun, whose store is another program; return what it did, and the port."""
    with foreign_stores.serving(FOREIGN[kind][0]) as port:
        place = ["--nnodes", nodes, "--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{port}"]
        launcher = [sys.executable, "-m", "torch.distributed.run", *place, "--nproc-per-node", "1"]
        words = [*launcher, "-m", "megatron_npu", "pretrain", "--mock-data"]
        env = {**tiny.environment(), **WAIT}
        return processes.run(words, env=env, capture_output=True, text=True, timeout=100), str(port)


@pytest.mark.parametrize("kind", FOREIGN)
@pytest.mark.parametrize("command", ["pretrain", "doctor"])
def test_a_rank_whose_store_is_another_program_ends(ended, command: str, kind: str) -> None:
    """torch's client waits without a limit for the answer of a program that accepts and says nothing."""
    done, port = ended[command, kind]
    place = rf"MASTER_ADDR:MASTER_PORT 127\.0\.0\.1:{port} \(.*: {FOREIGN[kind][1]}\)"
    assert_refused(done, rf"error: rank 1 \(.*\) cannot reach {place}")
    assert "choose another one on all machines" in done.stderr


@pytest.mark.parametrize(("nodes", "kind"), TORCHRUN_AT)
def test_torchrun_is_ended_whose_store_is_another_program(ended, nodes: str, kind: str) -> None:
    done, port = ended["torchrun", nodes, kind]
    assert done.returncode == 1, done.stderr
    line = rf"megatron_npu: error: torchrun on .* cannot reach --rdzv-endpoint 127\.0\.0\.1:{port} \(.*"
    assert re.search(line + FOREIGN[kind][1], done.stderr), done.stderr


_STORE = (
    "import sys, time, torch.distributed as dist; "
    "store = dist.TCPStore('127.0.0.1', 0, is_master=True, wait_for_workers=False); "
    "print(store.port, flush=True); time.sleep(100)"
)


def test_a_store_that_stops_answering_is_named(monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    """torch's client waits for an answer without a limit: the run did not end, and said nothing."""
    monkeypatch.setattr(meeting_place, "_SAY", 0.05)
    monkeypatch.setenv(settings.RENDEZVOUS_TIMEOUT.name, "1")
    codes: list[int] = []
    ended = threading.Event()
    monkeypatch.setattr(os, "_exit", lambda code: (codes.append(code), ended.set(), ended.wait(9)))
    command = [sys.executable, "-c", _STORE]
    process = subprocess.Popen(command, env=tiny.environment(), stdout=subprocess.PIPE)
    with on_a_leash(process, 100), process:
        assert process.stdout
        place = meeting_place.Place("rank 1", "127.0.0.1", int(process.stdout.readline()), False, True)
        with meeting_place.watched(place, 7):
            assert not ended.wait(1)
            process.send_signal(signal.SIGSTOP)
            assert ended.wait(60)
        process.kill()
    assert codes[0] == 7
    assert re.search(
        r"error: rank 1 cannot reach .* \(it no longer answers as the run's store: ", capsys.readouterr().err
    )


@pytest.mark.parametrize("libuv", [True, False])
def test_torchs_stores_answer(libuv: bool) -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, use_libuv=libuv)
    assert meeting_place.answers("127.0.0.1", store.port)
    assert store.num_keys() == 0
    meeting_place.require_no_other_program(
        meeting_place.Place("rank 1", "127.0.0.1", store.port, False, False)
    )


def test_what_a_store_says_to_torch_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(settings.RENDEZVOUS_TIMEOUT.name, "1")
    store = first_contact.serve(0)

    def refuse() -> None:
        raise RuntimeError("Ping failed\npage after page")

    place = meeting_place.Place("rank 1", "127.0.0.1", store.port, False, True)
    with pytest.raises(UsageError, match=r"the program there is not .* Ping failed"):
        meeting_place.connected(place, refuse)


def test_the_wait_is_logged_until_somebody_answers(monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    monkeypatch.setattr(meeting_place, "_SAY", 0.0)
    monkeypatch.setattr(meeting_place, "_PAUSE", 0.01)
    place = meeting_place.Place("rank 1 (node2)", "127.0.0.1", ports.free_port(), False, True)
    stores: list[dist.TCPStore] = []
    refusal = meeting_place._refusal

    def later(host: str, port: int) -> str:
        said = refusal(host, port)
        if not stores:
            stores.append(first_contact.serve(port))
        return said

    monkeypatch.setattr(meeting_place, "_refusal", later)
    assert meeting_place.connected(place, lambda: "the store") == "the store"
    (said,) = capsys.readouterr().err.splitlines()
    assert re.search(r"rank 1 \(node2\) cannot reach .* still trying after 0 s\. Check that this is", said)


@pytest.mark.parametrize("name", ["node..1", "n" * 64, ""])
def test_what_is_no_host_name_is_told(name: str) -> None:
    assert not meeting_place.answers(name, 1)
    assert not meeting_place.is_of_this_machine("node..1")
