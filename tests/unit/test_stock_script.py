"""The guide's ``pretrain_gpt.py`` and ``main.py``: which script they run, what they say if there is none."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import bytecode, processes, tiny

SCRIPTS = tiny.ROOT / "tests_gpt"
STOCK = "import sys\nprint(__name__, *sys.argv[1:])\n"
OURS = {"pretrain_gpt.py": "pretrain_gpt.py", "main.py": "tasks/main.py"}


@pytest.fixture
def megatron(tmp_path: Path) -> Path:
    """A Megatron-LM whose scripts print what they were given, with this project cloned in it."""
    root = tmp_path / "Megatron-LM"
    for name in OURS.values():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(STOCK)
    (root / "megatron" / "model").mkdir(parents=True)
    (root / "megatron" / "model" / "transformer.py").touch()
    (root / "megatron_npu").mkdir()
    for name in ("megatron_npu", "patches"):
        (root / "megatron_npu" / name).symlink_to(tiny.ROOT / name)
    shutil.copytree(SCRIPTS, root / "megatron_npu" / "tests_gpt")
    return root


def run(script: Path) -> subprocess.CompletedProcess[str]:
    environment = {**tiny.environment(), "MEGATRON_LM_PATH": "", **bytecode.elsewhere()}
    command = [sys.executable, str(script), "--task", "LAMBADA"]
    return processes.run(command, env=environment, capture_output=True, text=True, check=False)


def git(root: Path, *words: str) -> None:
    own = ["-c", "user.name=tests", "-c", "user.email=tests@localhost", "-c", "commit.gpgsign=false"]
    processes.run(["git", "-C", str(root), *own, *words], check=True, capture_output=True)


@pytest.mark.parametrize("name", OURS)
def test_runs_the_stock_script_from_either_place(megatron, name):
    git(megatron, "init", "-q")
    git(megatron, "add", "pretrain_gpt.py", "tasks")
    git(megatron, "commit", "-qm", "stock")
    here = megatron / "megatron_npu" / "tests_gpt" / name
    assert run(here).stdout == "__main__ --task LAMBADA\n"
    here.replace(megatron / name)  # as the guide's mv; one of the two is the stock script's own place
    done = run(megatron / name)
    assert done.stdout == "__main__ --task LAMBADA\n", done.stderr


def refused(script: Path) -> str:
    done = run(script)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    return done.stderr


def test_says_that_git_does_not_have_what_was_overwritten(megatron):
    moved = megatron / "pretrain_gpt.py"
    (megatron / "megatron_npu" / "tests_gpt" / "pretrain_gpt.py").replace(moved)
    said = refused(moved)
    assert (
        f"pretrain_gpt.py: error: {moved} was overwritten by the file of the same name from tests_gpt" in said
    )
    assert "Restore the stock pretrain_gpt.py, or set MEGATRON_LM_PATH" in said


def test_says_that_there_is_no_megatron(megatron):
    shutil.rmtree(megatron / "tasks")
    said = refused(megatron / "megatron_npu" / "tests_gpt" / "main.py")
    assert f"main.py: error: {megatron}/megatron_npu/tests_gpt or " in said
