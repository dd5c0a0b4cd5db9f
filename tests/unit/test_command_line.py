"""What ``megatron-npu`` answers where no command is run."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_npu.base import errors, files
from megatron_npu.commands import cli, inherited
from megatron_npu.commands.cli import main
from tests.support import processes


@pytest.mark.parametrize(
    ("argv", "code", "said"),
    [
        ([], 2, "pre-train a GPT"),
        (["help"], 0, "pre-train a GPT"),
        (["--help"], 0, "pre-train a GPT"),
        (["--version"], 0, "megatron_npu "),
        (["pretrian"], 2, "pretrain"),
    ],
    ids=["nothing", "help", "--help", "--version", "a typing error"],
)
def test_without_a_command_it_says_what_there_is(argv, code, said, capfd):
    assert main(argv) == code
    assert said in "".join(capfd.readouterr())


def test_a_removed_working_directory_is_named(tmp_path: Path) -> None:
    """Without the check, MKL ends ``lambada`` with an error about a library of torch."""
    program = (
        f"import os, sys; os.chdir({str(tmp_path)!r}); os.mkdir('x'); os.chdir('x'); os.rmdir('../x')\n"
        "from megatron_npu.commands.cli import main; sys.exit(main(['data', 'inspect', '/nowhere']))"
    )
    done = processes.run([sys.executable, "-P", "-c", program], capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr == (
        "megatron-npu data: error: the working directory has been removed. Change to a folder that exists.\n"
    )


def test_exit_codes_of_children_are_known_where_the_parent_ignored_them() -> None:
    """Otherwise ``plan`` fails with a traceback: its ranks have no exit codes."""
    before = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    try:
        inherited.settle()
        assert subprocess.run([sys.executable, "-c", "exit(3)"], check=False, timeout=60).returncode == 3
    finally:
        signal.signal(signal.SIGCHLD, before)


@pytest.mark.parametrize(("command", "is_told"), [("pretrain", True), ("run", False)])
def test_a_warning_as_an_error_is_one_line(command: str, is_told: bool) -> None:
    """As with PYTHONWARNINGS=error; a script keeps its traceback."""
    told = cli._ended_by(DeprecationWarning("old\nmore"), command)
    assert (told is not None) == is_told
    if told is not None:
        assert told[1] == 2
        assert told[0].startswith("a warning was raised as an error (DeprecationWarning: old). Change")


def test_a_log_that_torch_does_not_have_is_one_line(monkeypatch) -> None:
    """Found by the campaign: the import of torch ended with its traceback."""
    code = "from megatron_npu.commands import cli; import sys; sys.exit(cli.main(['lambada', '--load', 'x']))"
    monkeypatch.setenv("TORCH_LOGS", "evil")
    command = [sys.executable, "-P", "-c", code]
    done = processes.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2, done.stderr
    told = (
        "torch does not accept TORCH_LOGS=evil; expected names of its logs, separated by commas. Correct or"
    )
    assert done.stderr.startswith(f"megatron-npu lambada: error: {told}")
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize("name", ["taken", "a" * 300])
def test_an_output_that_cannot_be_is_one_line(tmp_path: Path, name: str) -> None:
    """A file in the place of a folder, as for ``checkpoint gather --into``, and a name that is too long."""
    (tmp_path / "taken").write_text("")
    with pytest.raises(OSError) as raised:  # noqa: PT011
        (tmp_path / name).mkdir(exist_ok=True)
    assert cli._ended_by(raised.value, "checkpoint") == (errors.told_of_files(raised.value), 1)


def test_an_empty_output_is_an_error_of_files() -> None:
    """As of ``plan --json ''``."""
    with pytest.raises(IsADirectoryError) as raised, files.writing(Path("")):
        pass
    assert cli._ended_by(raised.value, "plan") == (f"{raised.value}. Pass the path of a file.", 1)
