"""Errors of a user that come to the interpreter's end."""

from __future__ import annotations

import errno
import os
import subprocess
import sys

import pytest

from megatron_npu import cli, one_line_end
from megatron_npu.errors import UsageError


@pytest.fixture
def reached(monkeypatch) -> list[BaseException]:
    """The errors that the hook before ours was given, which is at work again after the test."""
    given: list[BaseException] = []
    monkeypatch.setattr(sys, "excepthook", lambda kind, error, trace: given.append(error))
    monkeypatch.setattr(one_line_end, "_former", None)
    return given


def test_a_mistake_is_one_line_and_other_errors_are_none_of_ours(reached, capsys) -> None:
    one_line_end.arm(UsageError)
    one_line_end.arm(UsageError)
    sys.excepthook(UsageError, UsageError("a flag", "another", "Change it."), None)
    assert capsys.readouterr().err == "megatron_npu: error: a flag; expected another. Change it.\n"
    other = ValueError("else")
    sys.excepthook(ValueError, other, None)
    assert reached == [other]


@pytest.mark.parametrize("command", ["convert", "run"])
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.ENOTCONN])
def test_a_full_disk_is_one_line_of_every_command(command, number, monkeypatch, capsys) -> None:
    """Found by the campaign: in ``generate --output`` and ``convert``. A stock script keeps its traceback."""

    def run(argv: list[str]) -> int:
        raise OSError(number, os.strerror(number), "model.safetensors")

    monkeypatch.setattr(cli, "_run", run)
    if command == "run" or number == errno.ENOTCONN:
        with pytest.raises(OSError, match="model"):
            cli.main([command])
    else:
        assert cli.main([command]) == 1
        told = "megatron-npu convert: error: [Errno 28] No space left on device: 'model.safetensors'\n"
        assert capsys.readouterr().err == told


def test_the_hook_before_comes_back(reached) -> None:
    before = sys.excepthook
    one_line_end.disarm()
    one_line_end.arm(UsageError)
    assert sys.excepthook is not before
    one_line_end.disarm()
    assert sys.excepthook is before


@pytest.mark.parametrize("unbuffered", [[], ["-u"]])
def test_a_line_is_written_in_one_piece(unbuffered: list[str]) -> None:
    """As ranks of ``torchrun`` do, which share the pipe and are started with -u."""
    code = """
import os
from megatron_npu import cli
cli.main(["sim"])
print("whole", "line", flush=True)
print("a part", end="")
os._exit(0)
"""
    done = subprocess.run(
        [sys.executable, *unbuffered, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.endswith("whole line\n")
