"""A process that multiprocessing spawns is patched as its parent is, wherever the package lies."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from tests.support import processes

ROOT = Path(__file__).resolve().parents[2]

_SCRIPT = """\
import multiprocessing
import sys


def armed() -> None:
    print("armed" if "megatron_npu" in sys.modules and sys.modules["megatron_npu"].installed() else "bare")


if __name__ == "__main__":
    sys.path.insert(0, sys.argv[1])
    import megatron_npu

    if sys.argv[2] == "uninstalled":
        megatron_npu.uninstall()
    child = multiprocessing.get_context("spawn").Process(target=armed)
    child.start()
    child.join()
    sys.exit(child.exitcode)
"""


@pytest.mark.parametrize(("state", "expected"), [("installed", "armed"), ("uninstalled", "bare")])
def test_a_spawned_child_is_armed_as_its_parent_is(tmp_path: Path, state: str, expected: str) -> None:
    """Only the parent puts the package on its path; no entry point has a say."""
    script = tmp_path / "script.py"
    script.write_text(_SCRIPT)
    variables = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = processes.run(
        [sys.executable, str(script), str(ROOT), state],
        env=variables,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout.strip()) == (0, expected), done.stderr


_SHARES = """\
import multiprocessing
import os
import sys


def shares(lock: object) -> None:
    import beside

    print(beside.__file__)


if __name__ == "__main__":
    import megatron_npu

    os.chdir(sys.argv[1])
    context = multiprocessing.get_context(sys.argv[2])
    lock = context.Lock()  # needs Python's resource tracker
    child = context.Process(target=shares, args=(lock,))
    child.start()
    child.join()
    sys.exit(child.exitcode)
"""


@pytest.mark.skipif(sys.version_info < (3, 11), reason="the case: Python has no -P before 3.11")
@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_modules_of_the_working_directory_are_not_run_in_children(tmp_path: Path, method: str) -> None:
    """Python's own command lines (``-c``) look there first, of the helpers of multiprocessing, too."""
    hostile, own = tmp_path / "hostile", tmp_path / "own"
    hostile.mkdir()
    own.mkdir()
    mark = hostile / "MARK"
    for name in ("multiprocessing", "megatron_npu", "socket", "signal"):
        (hostile / f"{name}.py").write_text(f"open({str(mark)!r}, 'a').write('{name} ')\n")
    (own / "script.py").write_text(_SHARES)
    (own / "beside.py").touch()
    done = processes.run(
        [sys.executable, str(own / "script.py"), str(hostile), method],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        cwd=own,
        capture_output=True,
        text=True,
    )
    assert not mark.exists(), mark.read_text()
    assert (done.returncode, done.stdout.strip()) == (0, str(own / "beside.py")), done.stderr
