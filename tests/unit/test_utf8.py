"""Files are read and written as UTF-8, whatever LC_ALL says (row 001-87 of the requirements)."""

from __future__ import annotations

import sys

from tests.conftest import ROOT
from tests.support import processes


def test_no_file_is_opened_in_the_encoding_of_the_locale() -> None:
    command = [sys.executable, "-m", "ruff", "check", "--select", "PLW1514", "--preview", "--isolated"]
    done = processes.run([*command, str(ROOT / "megatron_npu")], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
