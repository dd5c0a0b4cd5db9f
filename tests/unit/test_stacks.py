"""SIGUSR1 prints where a process stands, and does not end it."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import LONGEST, on_a_leash
from tests.support import processes

WAITS = """
import signal, sys, threading
from megatron_npu.process import stacks
if sys.argv[1] == "handled":
    signal.signal(signal.SIGUSR1, lambda *_: print("own handler"))
registered = stacks.print_on_signal()
if sys.argv[1] == "twice":  # as the plug-in and the watchdog of a run do
    registered = stacks.print_on_signal()
def stands_here():
    print(registered, flush=True)
    for line in sys.stdin:
        pass
thread = threading.Thread(target=stands_here)
thread.start()
thread.join()
print("went on")
"""


def until_main_stands(process: subprocess.Popen[str]) -> str:
    """Return what a process says on its standard error, up to the last line of the main thread's stack."""
    assert process.stderr is not None
    said = ""
    while "in <module>" not in said:
        line = process.stderr.readline()
        assert line, said
        said += line
    return said


@pytest.mark.parametrize("which", ["free", "twice", "handled"])
def test_stacks_on_demand(which: str) -> None:
    command = [sys.executable, "-c", WAITS, which]
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    with on_a_leash(process):
        assert process.stdout is not None
        registered = process.stdout.readline().strip()
        process.send_signal(signal.SIGUSR1)
        # before its input ends, with which the thread does
        printed = until_main_stands(process) if which != "handled" else ""
        out, rest = process.communicate(timeout=LONGEST)
    err = printed + rest
    assert process.returncode == 0
    assert out.splitlines()[-1] == "went on"
    if which != "handled":
        assert registered == "True"
        assert "in stands_here" in err
        assert err.count("Current thread") == 1
    else:
        assert registered == "False"
        assert "own handler" in out


def test_the_signal_is_left_again() -> None:
    """Whoever has asked for the stacks, once or twice: afterwards the signal ends the process as before."""
    code = """
import os, signal
from megatron_npu.process import stacks
stacks.print_on_signal(); stacks.print_on_signal(); stacks.leave_signal()
assert signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL
os.kill(os.getpid(), signal.SIGUSR1)
"""
    done = processes.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (-signal.SIGUSR1, "")


def test_a_file_that_is_cut_while_it_is_read_names_the_place(tmp_path: Path) -> None:
    """The kernel ends the process with SIGBUS, which printed nothing."""
    code = """
import mmap, os, sys
from megatron_npu.process import stacks
assert stacks.print_at_crash() and not stacks.print_at_crash()
with open(sys.argv[1], "r+b") as stream:
    stream.truncate(1 << 16)
    mapped = mmap.mmap(stream.fileno(), 0)
    stream.truncate(0)
def reads_here():
    return mapped[5000]
reads_here()
"""
    command = [sys.executable, "-c", code, str(tmp_path / "data")]
    (tmp_path / "data").touch()
    done = processes.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == -signal.SIGBUS
    assert "Fatal Python error: Bus error" in done.stderr
    assert "in reads_here" in done.stderr


def test_every_command_names_the_place_of_a_crash() -> None:
    code = """
import faulthandler
from megatron_npu.commands import cli
cli.main(["checkpoint", "list", "/nowhere"])
assert faulthandler.is_enabled()
"""
    processes.run([sys.executable, "-c", code], capture_output=True, check=True)
