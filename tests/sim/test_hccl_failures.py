"""What the simulated HCCL does with wrong programs: calls that do not fit, waiting in vain, dead ranks.

Most scenarios (hccl_raw.py) call HCCL without torch, so that a launch takes milliseconds; the last tests
show that the messages reach the user of torch.distributed.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support import processes
from tests.support.simulated import Run

HERE = Path(__file__).resolve().parent
Outcome = dict[int, object]
LONG = "60"  # seconds: a scenario that ends otherwise than by a timeout ends long before


@pytest.fixture(scope="module", params=[1, 2], ids=["one machine", "two machines"])
def machines(request) -> int:
    """The ranks are on them in turn: even ones on the first, odd ones on the second."""
    return request.param


@pytest.fixture(scope="module")
def raw(simulated: Run, machines: int) -> Callable[..., Outcome]:
    """Return a function: scenario, number of ranks -> rank -> what it returned."""
    code = "from megatron_npu.sim import build; print(build.runtime() / build.RUNTIME_LIBRARY)"
    library = simulated("python", "-c", code).stdout.split()[-1]

    def run(scenario: str, ranks: int = 2, timeout: str = LONG) -> Outcome:
        done = processes.run(
            [sys.executable, HERE / "ranks.py", str(ranks), HERE / "hccl_raw.py", library, scenario],
            env={**os.environ, "TIMEOUT": timeout, "MACHINES": str(machines)},
            capture_output=True,
            text=True,
            check=False,
        )
        outcomes = dict(map(json.loads, done.stdout.splitlines()))
        assert outcomes, done.stderr
        return outcomes

    return run


def message_of(outcomes: Outcome, rank: int) -> str:
    """Return the text with which synchronising failed."""
    code, text = outcomes[rank]
    assert code != 0
    return text


def named(rank: int) -> str:
    return rf"rank {rank} \(global rank {rank}, (machine\d, )?process \d+\)"


# ---- calls that do not fit: both are named

FIRST = r"AllReduce #1 \(4 x fp32, sum\)"
DIFFERENT = {
    "other_count": (FIRST, r"AllReduce #1 \(5 x fp32, sum\)"),
    "other_type": (FIRST, r"AllReduce #1 \(4 x int32, sum\)"),
    "other_reduction": (FIRST, r"AllReduce #1 \(4 x fp32, max\)"),
    "other_operation": (r"AllReduce #1 \(2 x fp32, sum\)", r"Broadcast #1 \(2 x fp32, root 1\)"),
    "other_root": (r"Broadcast #1 \(2 x fp32, root 0\)", r"Broadcast #1 \(2 x fp32, root 1\)"),
    "other_message_size": (r"16 bytes of message #1 \(4 x fp32\)", r"12 bytes of message #1 \(3 x fp32\)"),
    "other_part_size": (r"8 bytes of AllGatherV #1 \(fp32\)", r"12 bytes of AllGatherV #1 \(fp32\)"),
    "message_against_collective": (r"message #1 \(2 x fp32\)", r"AllReduce #1 \(2 x fp32, sum\)"),
}


@pytest.mark.parametrize("scenario", DIFFERENT)
def test_both_calls_are_named(raw, scenario):
    # A rank that only sends may be through before the other notices.
    failed = [text for code, text in raw(scenario).values() if code]
    assert failed
    for text in failed:
        assert "calls do not fit on communicator" in text
        for pattern in (named(0), named(1), *DIFFERENT[scenario]):
            assert re.search(pattern, text), (pattern, text)


def test_a_third_rank_is_told(raw):
    text = message_of(raw("third_rank_is_told", 3), 2)
    assert re.search(rf"{named(2)} stops, because {named(1)} reported: calls do not fit", text), text


def test_a_failed_communicator_refuses_further_calls(raw):
    for text in raw("failed_communicator_refuses").values():
        assert "calls do not fit" in text


def test_calls_refused_at_once(raw):
    patterns = (
        "BatchSendRecv: two items send to rank [01]; HCCL admits one per peer and direction",
        r"AllReduce \(2 x bf16, prod\): HCCL on Atlas A2 does not reduce this type",
        r"AllReduce \(2 x uint8, sum\): HCCL on Atlas A2 does not reduce this type",
        "Broadcast: there is no rank 2 to be the root",
        "Send: there is no rank 7 among 2",
        "AllReduce: unknown data type 99",
        "AllReduce: the communicator was destroyed or never created",
        "HcclGroupEnd without HcclGroupStart",
    )
    for texts in raw("refusals").values():
        for pattern, text in zip(patterns, texts, strict=True):
            assert re.search(pattern, text), (pattern, text)


# ---- waiting in vain


def test_the_timeout_names_ranks_operation_size_and_number(raw):
    text = message_of(raw("alone_in_a_collective", timeout="3"), 0)
    waits = rf"{named(0)} in AllReduce #2 \(1024 x bf16, sum\) waits\s+to receive 2048 of 2048 bytes"
    assert "timeout after 3 s without progress on communicator" in text
    assert re.search(waits, text), text
    assert re.search(rf"from {named(1)}, which last entered AllReduce #1 \(4 x fp32, sum\)", text), text


def test_a_send_waits_for_its_receiver(raw):
    text = message_of(raw("unmatched_send", timeout="3"), 0)
    assert re.search(rf"until message #1 \(1 x fp32\) is received by {named(1)}", text), text


def test_crossed_sends_hang_as_on_hardware(raw):
    outcomes = raw("crossed_sends", timeout="3")
    for rank in (0, 1):
        assert "timeout after 3 s" in message_of(outcomes, rank)


@pytest.mark.parametrize("scenario", ["dead_peer", "peer_that_ended_normally"])
def test_a_dead_peer_is_noticed_before_the_timeout(raw, scenario):
    text = message_of(raw(scenario), 0)
    assert re.search(
        rf"a peer is gone .*{named(1)} has ended, but {named(0)} in .* waits to receive", text
    ), text


def test_what_the_dead_have_sent_arrives(raw):
    assert raw("data_of_the_dead") == {0: [[0, ""], [5.0, 6.0]]}


def test_creation_notices_that_the_host_is_dead(raw):
    assert "the rank that created the communicator" in raw("host_dies")[1]


def test_creation_names_who_is_missing(raw):
    assert "timeout after 1 s; rank 2 did not join" in raw("one_is_missing", 3, timeout="1")[0]


def test_nothing_is_left_behind(raw, machines):
    """The memory has no name that could be left over: no file in /dev/shm, no open file, one mapping."""
    shared = int(machines == 1)
    assert raw("leaves_nothing") == {rank: [0, [], shared, 0] for rank in (0, 1)}


# ---- functions beyond those that torch.distributed reaches on every chip


def test_sub_communicators(raw):
    """Members [2, 0] and [1] of four: ranks by position, sums of rank + 1; rank 3 takes no part."""
    assert raw("sub_communicators", 4) == {
        0: [[0, 0, 4.0, [1, 2]]] * 2,
        1: [[0, 0, 2.0, [0, 1]]] * 2,
        2: [[0, 0, 4.0, [0, 2]]] * 2,
        3: [[0, None]] * 2,
    }


def test_functions_with_one_size_per_rank(raw):
    gathered = [0.0, 1.0, 1.0, 2.0, 2.0, 2.0]
    assert raw("vector_functions", 3) == {
        0: [0, [10.0, 20.0, 20.0], 0, gathered, [0.0]],
        1: [0, [1.0, 11.0, 11.0], 0, gathered, [3.0, 6.0]],
        2: [0, [2.0, 2.0, 22.0], 0, gathered, [9.0, 12.0, 15.0]],
    }


def test_a_group_starts_at_its_end_and_moves_at_once(raw):
    assert raw("group_of_calls") == {
        0: [[0, 0.0], 0, "", 11.0, 20.0, 1.0],
        1: [[0, 0.0], 0, "", 10.0, 21.0, 1.0],
    }


def test_half_precision_rounds_like_numpy(raw):
    assert raw("half_precision_rounds_like_numpy") == {0: [0, True], 1: [0, True]}


# ---- the same through torch

PROGRAM = """
import os, signal, sys, torch, torch.distributed as dist
rank = int(os.environ["RANK"])
torch.npu.set_device(rank)
dist.init_process_group("hccl", init_method="file://" + os.environ["RENDEZVOUS"], rank=rank, world_size=2)
dist.barrier()
if sys.argv[1] == "dies" and rank == 1:
    os.kill(os.getpid(), signal.SIGKILL)
try:
    dist.all_reduce(torch.ones(4 + rank, device="npu"))
    torch.npu.synchronize()
    text = "no error"
except RuntimeError as error:
    text = str(error)
print(f"rank {rank} raised: {text}", flush=True)
os._exit(0)
"""


@pytest.fixture
def raised(simulated, tmp_path) -> Callable[[str], list[str]]:
    """Return a function: mistake -> what torch raised on each rank that could raise."""
    (tmp_path / "program.py").write_text(PROGRAM)

    def run(mistake: str) -> list[str]:
        command = [str(HERE / "ranks.py"), "--torch", "2", str(tmp_path / "program.py"), mistake]
        # Without its watchdog, which may end the process before it prints what was raised.
        return simulated("python", *command, HCCL_ASYNC_ERROR_HANDLING="0").stdout.split("raised: ")[1:]

    return run


def test_torch_raises_with_both_calls(raised):
    texts = raised("mismatch")
    assert len(texts) == 2
    for text in texts:
        assert "AllReduce #2 (4 x fp32, sum)" in text
        assert "AllReduce #2 (5 x fp32, sum)" in text


def test_torch_raises_when_a_rank_was_killed(raised):
    (text,) = raised("dies")
    assert re.search(rf"a peer is gone .*{named(1)} has ended", text), text
