"""The address of a process that no launcher has started."""

from __future__ import annotations

import os
import random
import socket
import subprocess
import sys
from typing import Any

import pytest

from megatron_npu.adaptors.shared import rendezvous
from tests.conftest import LONGEST, on_a_leash
from tests.support.ports import free_port


@pytest.fixture(autouse=True)
def unset(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize("address", ["127.0.0.1", "0.0.0.0"])
def test_a_port_is_for_a_server_and_not_one_that_connections_get(address: str) -> None:
    port = free_port()
    assert 20_000 <= port < 32_000
    with socket.create_server((address, port)), socket.create_connection(("127.0.0.1", port)):
        pass


def test_taken_ports_are_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        taken = listener.getsockname()[1]
        monkeypatch.setitem(free_port.__globals__, "_PORTS", range(taken, taken + 1))
        with pytest.raises(OSError, match=f"no free port of 127.0.0.1 from {taken} to {taken}"):
            free_port()


def test_a_port_is_given_once(monkeypatch: pytest.MonkeyPatch) -> None:
    port = free_port()
    monkeypatch.setitem(free_port.__globals__, "_PORTS", range(port, port + 1))
    with pytest.raises(OSError, match="no free port"):
        free_port()


def test_the_run_s_random_numbers_stay_as_they_are() -> None:
    before = random.getstate()
    free_port()
    assert random.getstate() == before


def test_who_is_alone_gets_an_address(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "1")
    rendezvous.provide_address()
    assert os.environ["MASTER_ADDR"] == "127.0.0.1"
    assert os.environ["MASTER_PORT"] == "0"


def test_processes_that_are_alone_do_not_meet() -> None:
    """Two at a time, each with a store of its own, in torch's words of ``env://``."""
    code = """if True:
        import torch.distributed as dist
        from megatron_npu.adaptors.shared import rendezvous
        rendezvous.provide_address()
        dist.init_process_group("gloo", rank=0, world_size=1)
        dist.barrier()
        print("met", flush=True)
        input()"""
    command = [sys.executable, "-c", code]
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    first, second = subprocess.Popen(command, **pipes), subprocess.Popen(command, **pipes)
    with on_a_leash(first), on_a_leash(second):
        for process in (first, second):
            assert process.stdout.readline() == "met\n"
        for process in (first, second):
            process.communicate("\n", timeout=LONGEST)
    assert (first.returncode, second.returncode) == (0, 0)


@pytest.mark.parametrize("given", [{"WORLD_SIZE": "2"}, {"MASTER_ADDR": "10.0.0.1"}], ids=str)
def test_a_launcher_s_word_counts(monkeypatch: pytest.MonkeyPatch, given: dict[str, str]) -> None:
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    before = dict(os.environ)
    rendezvous.provide_address()
    assert dict(os.environ) == before
