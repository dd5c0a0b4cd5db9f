"""A rank that dies or hangs is named by the others, which end; a run that is only slow goes on."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from megatron_npu import watchdog
from megatron_npu.base.errors import UsageError
from megatron_npu.watchdog import rank as ranks_watchdog
from megatron_npu.watchdog import restarts
from tests.conftest import LONGEST
from tests.distributed import stalling_proxy
from tests.support import tiny, warm
from tests.support.ports import free_port

RANKS = 3
LIMIT = 6  # seconds, instead of the 300 of a user: enough for ranks to say a word on a busy machine
HERE = Path(__file__).parent
RANK_1 = rf"rank 1 \({re.escape(socket.gethostname())}, process \d+\)"
SAVE = r"saving, at megatron\.training\.training:\d+ in save_checkpoint \(step 20\)"
FILE = r"\S+/saved-\w+ \(1,048,576 bytes\)"
STEP = r"training, at megatron\.training\.training:\d+ in train_step \(step 20\)"


# They wait for seconds, and nearly idle: they do so at the same time.
TOGETHER = ("stop", "deadlock", "stuck_save", "cut", "slow_save", "compile")
ALONE = ("deadlock", "serve", "wait", "hang_in_request")
Ranks = list[subprocess.Popen[str]]
Alone = Callable[[str], tuple[int, str]]


def start(scenario: str, limit: int = LIMIT, **more: str) -> Ranks:
    """Start the ranks one by one, without a launcher that would end them.

    Where the network is cut, rank 1 reaches the store through a proxy.
    """
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(RANKS)}
    settings = {**tiny.environment(), **meeting, "MEGATRON_NPU_WATCHDOG": str(limit), **more}
    started = []
    for rank in range(RANKS):
        command = [sys.executable, str(HERE / "watched_worker.py"), scenario]
        way = {"MASTER_PORT": more["PROXY"]} if "PROXY" in more and rank == 1 else {}
        command, env = warm.ready(command, {**settings, **way, "RANK": str(rank)})
        started.append(
            subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        )
    return started


def ends(scenario: str, started: Ranks) -> dict[int, tuple[int, str]]:
    """Return exit codes and errors of the ranks that end."""
    try:
        waited_for = (0, 2) if scenario == "stop" else range(RANKS)
        said = {rank: started[rank].communicate(timeout=LONGEST) for rank in waited_for}
    finally:
        for process in started:
            process.kill()
    return {rank: (started[rank].returncode, err) for rank, (_, err) in said.items()}


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory, alone: Alone) -> Iterator[dict[str, Ranks]]:
    """The ranks of each scenario that waits; those of one process wait meanwhile, too."""
    folders = {each: tmp_path_factory.mktemp(each) for each in TOGETHER}
    port = free_port()
    with stalling_proxy.forwarding(port, until=folders["cut"] / "cut") as proxy:
        ways = {"cut": {"MASTER_PORT": str(port), "PROXY": str(proxy)}}
        running = {
            each: start(each, TMPDIR=str(folder), **ways.get(each, {})) for each, folder in folders.items()
        }
        yield running
    for process in (process for ranks in running.values() for process in ranks):
        process.kill()


@pytest.mark.parametrize(
    ("scenario", "told"),
    [
        ("kill", rf"{RANK_1} exited without an error message \(it may have been killed\); last seen {STEP}"),
        ("error", rf"{RANK_1} exited with ValueError: bad luck; last seen {STEP}"),
        ("stop", rf"{RANK_1} has sent no heartbeat for \d+ s: it is suspended, .*; last seen {STEP}"),
        ("deadlock", rf"no rank has made progress for {LIMIT} s: {RANK_1} is {STEP}"),
        (
            "stuck_save",
            rf"no rank has made progress for {LIMIT} s: {RANK_1} is {SAVE}, "
            rf"and makes no progress with {FILE}",
        ),
    ],
)
def test_the_rank_that_is_missed_is_named(
    started: dict[str, Ranks], scenario: str, told: str, tmp_path: Path
) -> None:
    hangs = scenario in ("stop", "deadlock", "stuck_save")
    ranks = started[scenario] if hangs else start(scenario, LONGEST, TMPDIR=str(tmp_path))
    found = ends(scenario, ranks)
    for rank in (0, 2):
        code, err = found[rank]
        assert code == 1 or ((rank, scenario) == (0, "stop") and code == -signal.SIGALRM), (
            err
        )  # its exit hangs
        assert re.search(rf"^megatron_npu: rank {rank} exits: {told}$", err, re.MULTILINE), err
        assert "Traceback (most recent call last)" not in err  # of gloo, which names nobody
    assert ("in all_reduce" in found[0][1]) == hangs  # where this rank stands
    if hangs:
        line = {"deadlock": "wait_for_ever", "stuck_save": "write_in_vain"}.get(scenario, "<lambda>")
        assert f":{line}" in found[0][1] or f"in {line}" in found[0][1]  # where that one stands
    if scenario == "deadlock":
        assert "stacks of rank 0, requested by a signal to rank 1:\n" in found[0][1]
        assert "in wait_for_ever" in found[1][1].partition("rank 1 exits:")[0]  # its own, printed at once
    if scenario == "error":
        assert "ValueError: bad luck" in found[1][1]


@pytest.fixture(scope="module")
def alone() -> Iterator[Alone]:
    """Return a function: a scenario of one process in its 20th step -> its exit code and errors."""
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0", "WORLD_SIZE": "1", "RANK": "0"}
    settings = {**tiny.environment(), **meeting, "MEGATRON_NPU_WATCHDOG": "3"}
    running: dict[str, subprocess.Popen[str]] = {}
    for each in ALONE:
        command, env = warm.ready([sys.executable, str(HERE / "watched_worker.py"), each], settings)
        running[each] = subprocess.Popen(
            command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )

    def of(scenario: str) -> tuple[int, str]:
        _, err = running[scenario].communicate(timeout=LONGEST)
        return running[scenario].returncode, err

    yield of
    for process in running.values():
        process.kill()


def test_a_run_of_one_process_that_hangs_says_where_and_ends(alone: Alone) -> None:
    code, err = alone("deadlock")
    assert code == 1, err
    told = rf"^megatron_npu: the run is stopped: it has made no progress for 3 s; it is {STEP}$"
    stack = re.split(told, err, flags=re.MULTILINE)
    assert len(stack) == 2, err
    assert re.match(r"\n  \S+:\d+ in wait_for_ever\n  \S+:\d+ in train_step\n", stack[1]), err
    assert "(most recent call first)" in stack[1]  # where all threads stand


@pytest.mark.parametrize("scenario", ["serve", "wait"])
def test_a_run_of_one_process_may_wait_for_requests(alone: Alone, scenario: str) -> None:
    assert alone(scenario) == (0, "")


def test_a_server_that_hangs_in_a_request_ends(alone: Alone) -> None:
    code, err = alone("hang_in_request")
    assert code == 1, err
    assert re.search(
        rf"the run is stopped: it has made no progress for 3 s; it is {STEP}$", err, re.MULTILINE
    ), err


def test_both_sides_of_a_cut_network_name_the_other(started: dict[str, Ranks]) -> None:
    """The side without the store said nothing, for 15 minutes."""
    found = ends("cut", started["cut"])
    # on one machine, the others may see the end of the rank's process before they miss its heartbeat
    lost = rf"{RANK_1} (?:has sent no heartbeat for \d+ s|exited without an error message)"
    store = (
        rf"the run's store at \S+:\d+ has not answered for {LIMIT} s: the network to the machine of rank 0"
    )
    for rank, told in ((0, lost), (1, store), (2, lost)):
        code, err = found[rank]
        assert code == 1, err
        assert re.search(rf"^megatron_npu: rank {rank} exits: {told}", err, re.MULTILINE), err


def test_the_rank_that_held_the_store_is_named_too() -> None:
    found = ends("kill_first", start("kill_first", LONGEST))
    for rank in (1, 2):
        code, err = found[rank]
        assert code == 1, err
        first = RANK_1.replace("rank 1", "rank 0")
        assert re.search(rf"^megatron_npu: rank {rank} exits: {first} has exited", err, re.MULTILINE), err


@pytest.mark.parametrize("scenario", ["slow_save", "compile"])
def test_a_long_save_and_a_child_at_work_are_no_hang(started: dict[str, Ranks], scenario: str) -> None:
    for code, err in ends(scenario, started[scenario]).values():
        assert (code, err) == (0, "")


def test_an_error_that_is_its_own_cause_is_looked_at_once() -> None:
    """Found by the campaign: both ranks would have looked for ever."""
    error = OSError("the disk is full")
    error.__cause__ = error
    assert not ranks_watchdog._is_of_a_collective(error)
    error.__cause__ = RuntimeError("Connection closed by peer")
    assert ranks_watchdog._is_of_a_collective(error)


def test_a_restart_that_cannot_work_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """pytorch#135712: by default the second attempt finds the addresses of the first one's processes."""
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "0")
    watchdog.require_fresh_store()
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    with pytest.raises(UsageError, match="TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 in torchrun"):
        watchdog.require_fresh_store()
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "False")
    watchdog.require_fresh_store()


def test_too_few_open_files_are_raised_or_refused() -> None:
    """Else ranks try for ten minutes to reach a store that may open no connection."""
    resource = pytest.importorskip("resource")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    used = len(os.listdir("/dev/fd"))
    if hard < used + 120:  # or -1: infinite
        pytest.skip(f"the case: a hard limit of open files that is no more than {hard}")
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (used + 10, hard))
        watchdog.require_open_files(1)
        assert used + 96 < resource.getrlimit(resource.RLIMIT_NOFILE)[0] < used + 106
        watchdog.require_open_files(2)
        assert used + 100 < resource.getrlimit(resource.RLIMIT_NOFILE)[0] < used + 110
        with pytest.raises(
            UsageError, match=rf"need {100 + 2 * hard} more open files, but the limit is {hard}"
        ):
            watchdog.require_open_files(hard)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_machine_that_joins_later_finds_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its torchrun has counted no restart: it looked elsewhere in the store, and all waited."""
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    restarted = restarts.attempt()
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "0")
    assert restarts.attempt() == restarted
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")  # which lives on
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert restarts.attempt() != restarted


def test_a_restarted_run_ends_as_if_no_rank_had_been_killed(tmp_path: Path) -> None:
    """``torchrun --max-restarts``: from the checkpoint on, with the losses of a run that nobody killed."""
    pytest.importorskip("megatron.core")
    dataset = tiny.write_dataset(tmp_path / "numbers")
    flags = [
        *tiny.flags_for(dataset),
        "--save-interval",
        "2",
        "--eval-iters",
        "0",
        "--no-plot",
        "--use-distributed-optimizer",
    ]
    calm, killed = tmp_path / "calm", tmp_path / "killed"
    launcher = [*tiny.torchrun(2), "--max-restarts", "1"]
    program = [sys.executable, *launcher, str(HERE / "restarted_worker.py"), *flags]
    env = tiny.environment() | {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    done = tiny.run_python([*program, "--save", str(killed), "--load", str(killed)], env)
    assert done.returncode == 0, done.stderr
    assert "resuming from iteration 2" in done.stdout
    assert tiny.run("pretrain", *flags, "--save", str(calm), processes=2).returncode == 0
    assert tiny.losses(killed / "metrics.jsonl") == tiny.losses(calm / "metrics.jsonl")
