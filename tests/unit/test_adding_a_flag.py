"""docs/contributing/adding-a-flag.md, done to a copy of the package."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

from tests.conftest import LONGEST, ROOT

PAGE = ROOT / "docs" / "contributing" / "adding-a-flag.md"
DIFF = re.compile(r"^```diff\n--- (?P<file>\S+)\n(?P<lines>.*?)^```$", re.DOTALL | re.MULTILINE)
CODE = re.compile(r"^```python\n(?P<code>.*?)^```$", re.DOTALL | re.MULTILINE)


def changed(text: str, lines: list[str]) -> str:
    """Return a file with the change of a diff whose last line is the beginning of one."""
    before = "\n".join(line[1:] for line in lines if not line.startswith("+"))
    after = "\n".join(line[1:] for line in lines if not line.startswith("-"))
    assert text.count(before) == 1, before
    return text.replace(before, after)


def run(folder: Path, *command: str) -> str:
    """Return what a command of Python says in the copy, which must succeed."""
    env = {**os.environ, "PYTHONPATH": str(folder), "MEGATRON_NPU_DEVICE": "cpu"}
    done = subprocess.run(
        [sys.executable, *command],
        env=env,
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=LONGEST,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_page_adds_a_flag(tmp_path: Path) -> None:
    page = PAGE.read_text(encoding="utf-8")
    shutil.copytree(
        ROOT / "megatron_npu", tmp_path / "megatron_npu", ignore=shutil.ignore_patterns("__pycache__")
    )
    diffs = list(DIFF.finditer(page))
    for diff in diffs:
        file = tmp_path / diff["file"]
        lines = diff["lines"].splitlines()
        file.write_text(changed(file.read_text(encoding="utf-8"), lines), encoding="utf-8")
    (code,) = CODE.findall(page)
    (tmp_path / "test_flag.py").write_text(code, encoding="utf-8")
    assert {diff["file"] for diff in diffs} == {
        "megatron_npu/options/attention_flags.py",
        "megatron_npu/ops/attention/npu.py",
    }
    assert "1 passed" in run(tmp_path, "-m", "pytest", "-q", "test_flag.py")
    for command in ("pretrain", "lambada"):
        assert "--attention-inner-precise {0,1}" in run(tmp_path, "-m", "megatron_npu", command, "--help")
