"""Hosts of planned ranks: forks, their exit codes and logs, and what happens when a host or an asker ends."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from megatron_npu.planning.hosts import Hosts
from megatron_npu.planning.rank import host_process
from megatron_npu.process import python_child

START = ("pretrain",)


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    made = Hosts()
    yield made
    made.end()


def told(folder: Path) -> dict[str, object]:
    place = {"RANK": "3"}
    return {"specification": str(folder / "rank.json"), "log": str(folder / "log"), "environment": place}


def test_a_rank_whose_imports_fail_starts_anew_and_says_why(hosts: Hosts, tmp_path: Path) -> None:
    environment = python_child.environment()
    for _ in range(2):
        code, said = hosts.run("nothing", START, environment, told(tmp_path), 60)
        assert (code, said) == (1, "")
        assert "No module named megatron_npu.planning.rank.nothing" in (tmp_path / "log").read_text()
    assert len(hosts._hosts) == 1
    (one,) = hosts._hosts.values()
    os.kill(one._process.pid, signal.SIGKILL)
    assert hosts.run("nothing", START, environment, told(tmp_path), 60) == (-signal.SIGKILL, "")


def test_a_rank_that_takes_too_long_is_ended(hosts: Hosts, tmp_path: Path) -> None:
    assert hosts.run("nothing", START, python_child.environment(), told(tmp_path), 0.01) == (None, "")


def test_a_host_that_cannot_start_says_why(hosts: Hosts, tmp_path: Path) -> None:
    environment = python_child.environment(PYTHONHOME=str(tmp_path))
    code, said = hosts.run("nothing", START, environment, told(tmp_path), 60)
    assert code == 1
    assert "encodings" in said


SCRIPT = """
'''Trains.'''
import os, json
from functools import partial
rank = int(os.environ.get("RANK", 0))
if rank: print(rank)
from . import near
from gpt_builders import gpt_builder
%s
import behind
"""


@pytest.mark.parametrize(
    ("statement", "behind"),
    [
        ("stimer = object()", ["behind"]),
        ("def f(): os.environ['A'] = '1'", ["behind"]),
        ("sys.path.append('/x')", []),
        ("os.environ['A'] = '1'", []),
    ],
)
def test_modules_behind_a_statement_that_reaches_out_wait_for_it(statement: str, behind: list[str]) -> None:
    first = ["os", "json", "functools", "gpt_builders"]
    assert host_process.modules_of(SCRIPT % statement) == [*first, *behind]
