"""Errors of a user that come to the interpreter's end."""

from __future__ import annotations

import errno
import json
import os
import sys
import tempfile
from collections.abc import Callable

import pytest
from torch._inductor import exc
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure, record

from megatron_npu.base import errors
from megatron_npu.base.errors import UsageError
from megatron_npu.commands import cli
from megatron_npu.pretrain.run import last_words
from megatron_npu.process import one_line_end
from tests.support import processes, tiny, warm


@pytest.fixture
def reached(monkeypatch) -> list[BaseException]:
    """The errors that the hook before ours was given, which is at work again after the test."""
    given: list[BaseException] = []
    monkeypatch.setattr(sys, "excepthook", lambda kind, error, trace: given.append(error))
    return given


def test_a_mistake_is_one_line_and_other_errors_are_none_of_ours(reached, capsys) -> None:
    one_line_end.arm(UsageError)
    one_line_end.arm(UsageError)
    with pytest.raises(SystemExit, match="2"):
        sys.excepthook(UsageError, UsageError("a flag", "another", "Change it."), None)
    assert capsys.readouterr().err == "megatron_npu: error: a flag; expected another. Change it.\n"
    other = ValueError("else")
    sys.excepthook(ValueError, other, None)
    assert reached == [other]


def test_what_a_user_needs_the_traceback_of_goes_to_the_former_hook(reached, capsys) -> None:
    error = UsageError("Megatron rejects these options")
    one_line_end.arm(UsageError, traced=lambda given: given is error)
    sys.excepthook(UsageError, error, None)
    assert reached == [error]
    assert capsys.readouterr().err == ""


def test_torchrun_finds_the_line_as_its_root_cause(reached, capsys, tmp_path, monkeypatch) -> None:
    file = tmp_path / "error.json"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(file))
    one_line_end.arm(UsageError, KeyError)
    sys.excepthook(KeyError, KeyError("drift"), None)
    failure = ProcessFailure(local_rank=0, pid=1, exitcode=2, error_file=str(file))
    assert failure.message["message"] == "megatron_npu: error: 'drift'"
    assert "megatron_npu: error: 'drift'" in ChildFailedError("it", {0: failure}).format_msg()
    assert cli.main(["convert", "--no-such-flag"]) == 2  # the first that was said stays
    assert json.loads(file.read_text())["message"]["message"] == "megatron_npu: error: 'drift'"


def test_the_line_replaces_the_traceback_that_record_has_left_of_the_same_error(
    reached, tmp_path, monkeypatch
) -> None:
    """bigscience's pretrain_gpt.py has torch's ``record`` on its main function: fifty lines of each rank."""
    file = tmp_path / "error.json"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(file))
    one_line_end.arm(UsageError)
    error = UsageError("--lr 0", "a rate above 0", "Change it.")
    with pytest.raises(UsageError):
        record(raising(error))()
    assert "py_callstack" in file.read_text()
    with pytest.raises(SystemExit):
        sys.excepthook(UsageError, error, None)
    failure = ProcessFailure(local_rank=0, pid=1, exitcode=2, error_file=str(file))
    shown = ChildFailedError("it", {0: failure}).format_msg()
    assert f"megatron_npu: error: {error}" in shown
    assert "Traceback" not in shown
    with pytest.raises(SystemExit):  # of another error nothing is replaced
        sys.excepthook(UsageError, UsageError("--tp 0", "1", "Change it."), None)
    assert json.loads(file.read_text())["message"]["message"] == f"megatron_npu: error: {error}"


def raising(error: Exception) -> Callable[[], None]:
    def main() -> None:
        raise error

    return main


def test_of_other_kinds_and_at_a_prompt_the_process_goes_on(reached, capsys, monkeypatch) -> None:
    one_line_end.arm(UsageError, KeyError)
    sys.excepthook(KeyError, KeyError("drift"), None)
    monkeypatch.setattr(sys, "ps1", ">>> ", raising=False)
    sys.excepthook(UsageError, UsageError("a flag", "another", "Change it."), None)
    assert [line.split(": ")[1] for line in capsys.readouterr().err.splitlines()] == ["error", "error"]
    assert reached == []


def test_the_exit_code_of_a_mistake_is_2_also_behind_the_hook_of_torchs_ranks() -> None:
    code = """
import atexit
import torch.distributed as dist
from megatron_npu.process import one_line_end
from megatron_npu.base.errors import UsageError
one_line_end.arm(UsageError)
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
atexit.register(print, "the end of a process")
raise UsageError("a flag", "another", "Change it.")
"""
    command, env = warm.ready([sys.executable, "-c", code], tiny.environment())
    done = processes.run(command, env=env, capture_output=True, text=True, check=False, timeout=60)
    assert (done.returncode, done.stdout) == (2, "the end of a process\n")
    assert done.stderr.splitlines()[-1] == "megatron_npu: error: a flag; expected another. Change it."
    assert "Traceback" not in done.stderr


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
        told = "megatron-npu convert: error: [Errno 28] No space left on device: 'model.safetensors'. "
        assert capsys.readouterr().err == f"{told}Free space there, or use another disk.\n"


@pytest.mark.parametrize(
    ("number", "path", "remedy"),
    [
        (errno.ENOENT, "/proc/meminfo", "Mount /proc (mount -t proc proc /proc)."),
        (errno.ENOENT, "a path", "Check the path."),
        (errno.ENAMETOOLONG, "x", "Use a shorter path: at most 255 bytes for each name, and 4,095 in all."),
        (errno.EACCES, ".", "Give this account access to it, or use another path."),
        (errno.EROFS, "x", "Use a path on a disk that is not read-only."),
    ],
)
def test_an_error_of_a_file_system_says_what_to_do(number, path, remedy, monkeypatch, capsys) -> None:
    def run(argv: list[str]) -> int:
        raise OSError(number, os.strerror(number), path)

    monkeypatch.setattr(cli, "_run", run)
    assert cli.main(["data"]) == 1
    told = f"error: [Errno {number}] {os.strerror(number)}: {path!r}. {remedy}\n"
    assert capsys.readouterr().err == f"megatron-npu data: {told}"
    assert last_words.tell("pretrain", OSError(number, os.strerror(number), path)) == 1
    assert capsys.readouterr().err == f"megatron-npu pretrain: {told}"


def test_without_a_folder_for_temporary_files_the_variable_is_named() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tempfile, "tempdir", None)
        patch.setattr(tempfile, "_candidate_tempdir_list", lambda: ["/proc/nothing"])
        with pytest.raises(FileNotFoundError) as found:
            tempfile.gettempdir()
    assert errors.is_of_files(found.value)
    assert errors.told_of_files(found.value).endswith(
        "Set TMPDIR to a folder that this account can write to."
    )


@pytest.mark.parametrize(
    "error",
    [MemoryError(), RuntimeError("DefaultCPUAllocator: can't allocate memory: 8 bytes"), OSError(12, "")],
)
def test_memory_that_is_used_up_is_one_line(error, monkeypatch, capsys) -> None:
    def run(argv: list[str]) -> int:
        raise error

    monkeypatch.setattr(cli, "_run", run)
    assert cli.main(["lambada"]) == 1
    told = capsys.readouterr().err
    assert told.startswith("megatron-npu lambada: error: this process ran out of memory (")
    assert told.count("\n") == 1
    with pytest.raises(type(error)):
        cli.main(["run"])


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
from megatron_npu.commands import cli
cli.main(["sim"])
print("whole", "line", flush=True)
print("a part", end="")
os._exit(0)
"""
    done = processes.run(
        [sys.executable, *unbuffered, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.endswith("whole line\n")


def test_a_compiler_that_finds_the_disk_full_is_told_in_one_line() -> None:
    line = "main.cpp:128:1: fatal error: writing to /t/c.s: No space left on device"
    full = exc.InductorError(exc.CppCompileError(["g++", "main.cpp"], f"error\n\n{line}\n"), None)
    told, code = cli._ended_by(full, "train") or ("", 0)
    assert told.startswith(f"torch.compile's C++ compiler failed: {line}. Free space in the folder")
    assert code == 1
    other = exc.InductorError(exc.CppCompileError(["g++", "main.cpp"], "undefined symbol"), None)
    assert cli._ended_by(other, "train") is None
    assert cli._ended_by(RuntimeError("No space left on device"), "train") is None  # no compiler's
