"""``megatron-npu run``: what the script finds."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = """
import multiprocessing
import os
import sys


def tell() -> None:
    package = sys.modules.get("megatron_npu")
    print(package is not None and package.installed(), os.environ.get("MEGATRON_NPU_AUTOLOAD"), flush=True)


if __name__ == "__main__":
    tell()
    child = multiprocessing.get_context("spawn").Process(target=tell)
    child.start()
    child.join()
"""


@pytest.mark.parametrize("value", [None, "0"])
def test_the_script_and_its_children_are_armed_and_the_user_s_choice_stands(
    tmp_path: Path, value: str | None
) -> None:
    """What other programs the script starts is the user's business."""
    (tmp_path / "script.py").write_text(SCRIPT)
    environment = {name: text for name, text in os.environ.items() if name != "MEGATRON_NPU_AUTOLOAD"}
    environment |= {"PYTHONPATH": str(ROOT)} | ({} if value is None else {"MEGATRON_NPU_AUTOLOAD": value})
    done = subprocess.run(
        [sys.executable, "-m", "megatron_npu", "run", str(tmp_path / "script.py")],
        env=environment,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.stdout.splitlines() == [f"True {value}"] * 2, done.stderr
