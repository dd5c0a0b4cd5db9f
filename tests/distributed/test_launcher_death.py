"""A rank ends with the agent that has started it; what anybody else has started goes on."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.conftest import LONGEST

MODULE = Path(__file__).resolve().parents[2] / "megatron_npu" / "watchdog" / "launcher.py"
RANK = """
import runpy, sys, time
runpy.run_path(sys.argv[1])["end_with_launcher"]()
print("ready", flush=True)
time.sleep(600)
"""
# a shell stands between the two, as with torchrun --no-python; it does not exec its last command
LAUNCHER = """
import os, subprocess, sys
script = '"$@"; exit 0'
subprocess.run(["sh", "-c", script, "sh", *sys.argv[2:]], env={**os.environ, **eval(sys.argv[1])})
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel tells of the end of a process by a pidfd")
@pytest.mark.parametrize("environment", [{"TORCHELASTIC_RUN_ID": "7", "RANK": "3"}, {}])
def test_ranks_end_with_their_launcher_alone(environment: dict[str, str]) -> None:
    rank = [sys.executable, "-c", RANK, str(MODULE)]
    bare = {name: value for name, value in os.environ.items() if not name.startswith("TORCHELASTIC")}
    with subprocess.Popen(
        [sys.executable, "-c", LAUNCHER, repr(environment), *rank],
        env=bare,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as launcher:
        assert launcher.stdout is not None
        assert launcher.stderr is not None
        assert launcher.stdout.readline() == "ready\n"
        started = psutil.Process(launcher.pid).children(recursive=True)
        [process] = [each for each in started if RANK in each.cmdline()[2:3]]
        launcher.kill()
        try:
            gone = not psutil.wait_procs([process], timeout=LONGEST if environment else 0.5)[1]
            assert gone == bool(environment)
        finally:
            if not environment:
                os.killpg(launcher.pid, signal.SIGKILL)
        told = launcher.stderr.read()
    if environment:
        assert f"rank 3 ends: its launcher (process {launcher.pid}) has ended before it" in told
