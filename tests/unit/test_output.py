"""Output that cannot be written, or whose reader has gone: a line or nothing, never a traceback."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.support import processes, tiny

COMMAND = [sys.executable, "-m", "megatron_npu"]
ASCII = {"PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "LC_ALL": "C", "LANG": "C"}


@pytest.mark.parametrize("line", ["--help", "--version", "help train", "ledger --help"])
def test_a_reader_that_has_gone(line):
    """As ``head`` goes: nobody reads any more when the command writes."""
    script = '"$@" | true; exit ${PIPESTATUS[0]}'
    done = processes.run(
        ["bash", "-c", script, "bash", *COMMAND, *line.split()],
        env=tiny.environment(),
        capture_output=True,
        text=True,
    )
    assert done.stderr == ""
    assert done.returncode in (0, 1)


@pytest.mark.parametrize("line", ["--help", "--version"])
def test_a_full_disk_is_one_line(line):
    with open("/dev/full", "w", encoding="utf-8") as full:
        done = processes.run(
            [*COMMAND, line], env=tiny.environment(), stdout=full, stderr=subprocess.PIPE, text=True
        )
    assert done.returncode == 1
    assert done.stderr == "megatron-npu: error: [Errno 28] No space left on device\n"


def test_ascii_alone_ends_no_run(tmp_path):
    """The banner has a character that it does not know, and a path may have one."""
    script = tmp_path / "script.py"
    script.write_text("import megatron.core\nprint('caf\\u00e9')\n")
    done = processes.run(
        [*COMMAND, "run", str(script)], env=tiny.environment() | ASCII, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert "caf\\xe9" in done.stdout
