"""Who is late, and what is said of it, by table: no store, no thread, no process."""

from __future__ import annotations

import pytest

from megatron_npu.watchdog import verdicts
from megatron_npu.watchdog.board import Beat, Process
from megatron_npu.watchdog.phases import WAITING

IN, OUT = "all_reduce", ""  # of a collective
LONG = 100.0


def process(rank: int) -> Process:
    return Process(rank, "node", 100 + rank, "space")


def beat(collective: str = IN, step: int = 3, still: float = LONG, phase: str = "training", number: int = 7):
    return Beat(number, step, still, phase, collective, f"{phase} at step {step}", ("one", "two"), "")


@pytest.mark.parametrize(
    ("beats", "expected"),
    [
        ([beat(), beat(OUT), beat()], [1]),
        ([beat(OUT), beat(), beat(OUT)], [0, 2]),
        ([beat(step=4), beat(step=3), beat(step=4)], [1]),
        ([beat(step=3), beat(OUT, step=5), beat(step=5)], [0, 1]),
        ([beat(), beat(), beat()], [0, 1, 2]),
        ([beat(OUT), beat(OUT), beat(OUT)], [0, 1, 2]),
        ([beat(OUT), beat(still=LONG / 2 - 1)], []),
        ([beat(OUT), beat(still=LONG / 2)], [0]),
        ([beat(OUT, phase=WAITING), beat()], []),
        ([beat()], [0]),
    ],
    ids=[
        "one is outside of the collective",
        "two are",
        "one is in an earlier step",
        "one is earlier, another outside",
        "all are inside, in one step",
        "all are outside",
        "another has moved",
        "another has not moved for just so long",
        "one waits for what is outside of the run",
        "one alone",
    ],
)
def test_who_is_late(beats, expected):
    late = verdicts.late([process(rank) for rank in range(len(beats))], beats, LONG / 2)
    assert [who.rank for who, _ in late] == expected
    assert [word for _, word in late] == [beats[rank] for rank in expected]


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [([1, 1], [2, 2], []), ([1, 1], [1, 2], [0]), ([4, 5], [4, 5], [0, 1]), ([], [], [])],
    ids=["both speak", "one does", "neither does", "nobody else"],
)
def test_who_is_silent(before, after, expected):
    words = ([beat(number=number) for number in numbers] for numbers in (before, after))
    silent = verdicts.silent([process(rank) for rank in range(len(before))], *words)
    assert [who.rank for who, _ in silent] == expected


@pytest.mark.parametrize(
    ("error", "how"),
    [
        ("ValueError: no", "exited with ValueError: no"),
        (None, "exited without an error message (it may have been killed)"),
    ],
    ids=["an error", "no word"],
)
def test_what_is_said_of_an_end(error, how):
    told = verdicts.of_end(process(1), error, beat())
    assert told == f"rank 1 (node, process 101) {how}; last seen training at step 3 (step 3), for 100 s"


@pytest.mark.parametrize(
    ("first", "has_ended", "expected"),
    [
        (process(0), True, "rank 0 (node, process 100) has exited"),
        (process(0), False, "possibly rank 0 (node, process 100) as well (OSError)"),
        (None, True, "rank 0 has exited"),
        (None, False, "possibly rank 0 as well (OSError)"),
    ],
    ids=["known, ended", "known", "unknown, ended", "unknown"],
)
def test_what_is_said_of_a_lost_store(first, has_ended, expected):
    assert expected in verdicts.of_store(first, has_ended=has_ended, error=OSError("gone"))


def test_a_verdict_on_one_rank_has_its_stack_alone():
    told = verdicts.of_late([(process(2), beat(OUT))], 60.0)
    assert told == (
        "no rank has made progress for 60 s: rank 2 (node, process 102) is training at step 3 (step 3), for "
        "100 s\n  one\n  two"
    )


def test_a_verdict_on_many_ranks_has_some_stacks():
    many = [(process(rank), beat()) for rank in range(verdicts.SHOWN + 1)]
    told = verdicts.of_late(many, 60.0)
    assert told.count("\n rank ") == verdicts.SHOWN
    assert told.endswith("\n …")
    assert not verdicts.of_late(many[:-1], 60.0).endswith("…")


def test_what_is_said_of_who_says_nothing():
    assert verdicts.of_silent([(process(1), beat()), (process(2), beat())]).count("is lost, last seen") == 2
    assert "has sent no heartbeat for 61 s" in verdicts.of_neighbour(process(1), beat(), 61.2)
