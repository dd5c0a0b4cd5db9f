"""Children of ours run no module of the working directory, find this package, and keep PYTHONPATH."""

from __future__ import annotations

import os
import signal
import site
import subprocess
import sys
import time
from pathlib import Path

import pytest

from megatron_npu.process import python_child
from tests.conftest import ROOT, wait_until
from tests.support import processes, tiny, warm

SHADOWED = ("colorsys", "json", "logging", "socket", "torch")
SAYS = "import json, sys; print(json.__file__); print(__name__, sys.argv[1:]); print(sys.path)\n"


@pytest.fixture
def hostile(tmp_path) -> Path:
    """A folder whose modules leave a mark where they are imported."""
    folder = tmp_path / "stranger"
    folder.mkdir()
    for name in SHADOWED:
        (folder / f"{name}.py").write_text(f"open({str(folder / 'MARK')!r}, 'a').write('{name} ')\n")
    return folder


def assert_nothing_ran(folder: Path) -> None:
    mark = folder / "MARK"
    assert not mark.exists(), mark.read_text()


@pytest.mark.parametrize("old", [False, True])
def test_it_is_found_elsewhere(hostile, tmp_path, monkeypatch, old):
    """With -P, and as a Python without it."""
    if old:
        monkeypatch.setattr(sys, "version_info", (3, 10))
    modules = tmp_path / "modules"
    modules.mkdir()
    (modules / "says.py").write_text(SAYS)
    monkeypatch.setenv("PYTHONPATH", f"{os.pathsep}{modules}")  # the empty entry is the working directory
    command = python_child.module("says", ["one", "-two"], options=["-W", "ignore"])
    assert ("-P" in command) is not old
    done = processes.run(
        command, cwd=hostile, env=python_child.environment(A="b"), capture_output=True, text=True, check=True
    )
    assert_nothing_ran(hostile)
    assert "__main__ ['one', '-two']" in done.stdout
    assert str(ROOT) in done.stdout.splitlines()[-1]


def test_a_statement_is_run_elsewhere_too(hostile):
    command = python_child.code("import json")
    processes.run(command, cwd=hostile, env=python_child.environment(), check=True)
    assert_nothing_ran(hostile)


def test_installed_it_has_no_place_before_pythons_own_modules(monkeypatch):
    monkeypatch.setattr(site, "getsitepackages", lambda: [str(ROOT)])
    monkeypatch.setenv("PYTHONPATH", "/x::/y:")
    assert python_child.search_path() == "/x:/y"


def test_doctor(hostile):
    """As an installed command, which does not search the working directory itself."""
    done = command("doctor", "--json", at=hostile)
    assert_nothing_ran(hostile)
    assert '"operations"' in done.stdout, done.stderr


def test_the_page_of_a_run(hostile, tmp_path):
    done = processes.run(
        [sys.executable, "-c", SHOWN, str(tmp_path / "metrics.jsonl")],
        cwd=tmp_path,
        env=tiny.environment(),
        capture_output=True,
        text=True,
    )
    assert done.stdout == "200\n", done.stderr
    assert_nothing_ran(hostile)


SHOWN = """
import os, sys, urllib.request
from pathlib import Path
from megatron_npu.pretrain.report.dashboard import process
from megatron_npu.web.address import Address
os.chdir("stranger")
with process.shown(Path(sys.argv[1]), Address("127.0.0.1", 0)) as place:
    print(urllib.request.urlopen(place, timeout=60).status)
"""


def test_the_ranks_of_train(hostile, tmp_path):
    script = tmp_path / "elsewhere" / "script.py"
    script.parent.mkdir()
    (script.parent / "beside.py").write_text("")
    script.write_text("import beside\nprint('read')\n")
    done = command("train", "--user-script", str(script), "--nproc-per-node", "2", at=hostile, forked=True)
    assert_nothing_ran(hostile)
    assert "read" in done.stdout, done.stderr
    assert "did not train anything" in done.stderr or "did not create a RapidformerEngine" in done.stderr


@pytest.mark.skipif(sys.platform != "linux", reason="the case: other kernels do not end children")
def test_ranks_of_train_end_with_a_launcher_that_is_killed_before_they_connect(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import os, time\nfrom pathlib import Path\n"
        f"Path({str(tmp_path)!r}, 'PID' + os.environ['RANK']).write_text(str(os.getpid()))\ntime.sleep(600)\n"
    )
    words = [sys.executable, "-m", "megatron_npu", "train", "--user-script", script, "--nproc-per-node", "2"]
    launcher = subprocess.Popen([*map(str, words)], env=tiny.environment())
    files = [tmp_path / f"PID{rank}" for rank in range(2)]
    wait_until(lambda: all(file.exists() and file.read_text() for file in files))
    ranks = [int(file.read_text()) for file in files]
    launcher.kill()
    launcher.wait()
    end = time.monotonic() + 100  # they sleep longer
    wait_until(lambda: time.monotonic() > end or not any(map(python_child._is_alive, ranks)))
    left = [*filter(python_child._is_alive, ranks)]
    for rank in left:
        os.kill(rank, signal.SIGKILL)
    assert not left


def test_a_process_whose_starter_has_ended_does_not_start() -> None:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    wait_until(lambda: not python_child._is_alive(ended.pid))  # nobody has read its exit code yet
    with pytest.raises(SystemExit):
        python_child.end_with(ended.pid, signal.SIGKILL)
    ended.wait()
    python_child.end_with(os.getpid(), signal.SIGKILL)


def test_bench(hostile):
    line = "bench --suite mixed-precision --model 2x32x4 --seq-length 16 --vocab-size 256 --devices 1"
    done = command(*line.split(), "--steps", "1", "--repeat", "1", at=hostile, forked=True)
    assert_nothing_ran(hostile)
    assert done.returncode == 0, done.stderr


def command(*arguments: str, at: Path, forked: bool = False) -> subprocess.CompletedProcess[str]:
    """Run ``megatron-npu`` as its entry point does in a folder.

    Where it is ``forked``, a warm parent has imported torch for it; its children start from nothing.
    """
    start = Path(at.parent, "megatron-npu")
    start.write_text("import sys\nfrom megatron_npu.commands.cli import main\nsys.exit(main())\n")
    line, env = [sys.executable, str(start), *arguments], tiny.environment()
    if forked:
        line, env = warm.ready(line, env)
        env.pop("PYTHON_EXEC", None)
    return processes.run(line, cwd=at, env=env, capture_output=True, text=True)


@pytest.mark.skipif(sys.platform != "linux", reason="the case: other kernels do not end children")
def test_the_kernel_ends_it_with_its_parent(hostile, tmp_path, monkeypatch):
    modules = tmp_path / "modules"
    modules.mkdir()
    (modules / "waits.py").write_text(
        f"import os, time; open({str(tmp_path / 'PID')!r}, 'w').write(str(os.getpid()))\ntime.sleep(60)\n"
    )
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}{os.pathsep}{modules}")
    program = (
        "import subprocess; from megatron_npu.process import python_child\n"
        "subprocess.run(python_child.ending_module('waits'))"
    )
    parent = subprocess.Popen([sys.executable, "-P", "-c", program], cwd=hostile)
    wait_until(lambda: (tmp_path / "PID").exists() and (tmp_path / "PID").read_text())
    child = Path("/proc", (tmp_path / "PID").read_text())
    parent.kill()
    parent.wait()
    wait_until(lambda: not child.exists() or ") Z" in (child / "stat").read_text())
    assert_nothing_ran(hostile)
