"""A rank ends with the agent that has started it; what anybody else has started goes on."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from megatron_npu import watchdog
from megatron_npu.process import elastic_agent
from tests.conftest import LONGEST

MODULE = Path(__file__).resolve().parents[2] / "megatron_npu" / "watchdog" / "launcher.py"
RANK = """
import os, runpy, sys, time
if len(sys.argv) > 2:
    print("starting", flush=True)
while len(sys.argv) > 2 and not os.path.exists(sys.argv[2]):
    time.sleep(0.01)
runpy.run_path(sys.argv[1])["end_with_launcher"]()
print("ready", flush=True)
time.sleep(600)
"""
MEETING = """
import os, runpy, sys, time
with runpy.run_path(sys.argv[1])["meeting"]():
    print("starting", flush=True)
    while not os.path.exists(sys.argv[2]):
        time.sleep(0.01)
    raise RuntimeError("Connection reset by peer")
"""
# a shell stands between the two, as with torchrun --no-python; it does not exec its last command. A file of
# that name in its memory is what tells an agent of torch's from others
LAUNCHER = """
import mmap, os, subprocess, sys, tempfile
with tempfile.NamedTemporaryFile(prefix="libtorch") as file:
    file.write(bytes(4096))
    file.flush()
    memory = mmap.mmap(file.fileno(), 0)
script = '"$@"; exit 0'
subprocess.run(["sh", "-c", script, "sh", *sys.argv[2:]], env={**os.environ, **eval(sys.argv[1])})
"""
RUN = {"TORCHELASTIC_RUN_ID": "7", "RANK": "3"}
pytestmark = pytest.mark.skipif(
    sys.platform != "linux", reason="the kernel of Linux tells of ends by a pidfd"
)


def start(environment: dict[str, str], *more: str, program: str = RANK) -> subprocess.Popen[str]:
    """Start an agent, which starts a rank; wait until that says a word."""
    rank = [sys.executable, "-c", program, str(MODULE), *more]
    bare = {name: value for name, value in os.environ.items() if not name.startswith("TORCHELASTIC")}
    launcher = subprocess.Popen(
        [sys.executable, "-c", LAUNCHER, repr(environment), *rank],
        env=bare,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert launcher.stdout is not None
    assert launcher.stdout.readline() in ("ready\n", "starting\n")
    return launcher


@pytest.mark.parametrize("environment", [RUN, {}])
def test_ranks_end_with_their_launcher_alone(environment: dict[str, str]) -> None:
    with start(environment) as launcher:
        assert launcher.stderr is not None
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
        assert f"rank 3 exits, because its launcher (process {launcher.pid}) exited first" in told


def test_an_agent_that_ends_while_it_is_looked_for_is_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Found by the campaign: the rank would have trained on, watched by nobody."""
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "of no other process")
    walk, ended = psutil.Process.parents, [psutil.NoSuchProcess(4194305)]

    def parents(process: psutil.Process) -> list[psutil.Process]:
        if ended:
            raise ended.pop()
        return walk(process)

    monkeypatch.setattr(psutil.Process, "parents", parents)
    found = elastic_agent.find()
    assert found is not None
    assert found.pid == os.getppid()


@pytest.mark.parametrize("program", [RANK, MEETING], ids=["imports", "meeting"])
def test_ranks_that_are_still_starting_do_not_train_on_without_it(program: str, tmp_path: Path) -> None:
    """Found by the campaign: a launcher that is killed while its ranks import Megatron, or meet."""
    with start(RUN, str(tmp_path / "go on"), program=program) as launcher:
        assert launcher.stderr is not None
        launcher.kill()
        launcher.wait()
        (tmp_path / "go on").touch()
        assert (
            launcher.stderr.read()
            == "megatron_npu: rank 3 exits, because its launcher exited first (it may have been killed)\n"
        )


def test_ranks_that_fail_to_meet_for_another_reason_say_it() -> None:
    with pytest.raises(RuntimeError, match="too few files"), watchdog.meeting():
        raise RuntimeError("too few files")
