"""Files that a user names: pipes are read, and what has no end is refused in one line."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from megatron_npu.base import given_files
from megatron_npu.base.arg_parser import Parser
from megatron_npu.base.errors import UsageError
from tests.support import tiny


@pytest.mark.parametrize("path", ["/dev/zero", "/dev/urandom", "/"])
def test_what_has_no_end_is_not_read(path: str) -> None:
    with pytest.raises(OSError, match=path):
        given_files.opened(path)


def test_a_pipe_is_read(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    writer = threading.Thread(target=pipe.write_text, args=("one\ntwo",))
    writer.start()
    assert given_files.lines(pipe) == ["one", "two"]
    writer.join()


def test_a_pipe_that_nobody_writes_to_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    monkeypatch.setattr(given_files, "PIPE_WAIT_S", 0.1)
    with pytest.raises(OSError, match="nothing has been written"):
        given_files.text(pipe)


def test_a_flag_that_names_a_device_is_refused(tmp_path: Path) -> None:
    parser = Parser("megatron-npu x")
    parser.add_argument("--file", nargs="+", type=Path)
    parser.add_argument("--prompt", metavar="TEXT")
    link = tmp_path / "link"
    link.symlink_to("/dev/zero")
    for name in ("/dev/zero", "/dev/urandom", str(link)):
        with pytest.raises(UsageError, match=f"--file must name a file or a folder, but {name} is a device"):
            parser.parse_args(["--file", str(tmp_path), name])
    assert parser.parse_args(["--file", "/dev/null", "/dev/stdin", "--prompt", "/dev/zero"]).prompt


@pytest.mark.parametrize(
    "argv",
    [
        ["pretrain", "--config", "/dev/zero"],
        ["lambada", "--load", ".", "--valid-data", "/dev/zero"],
        ["preprocess", "--input", "/dev/zero", "--output-prefix", "x"],
        ["plan", "--devices", "2", "--bench", "/dev/zero", "--", "pretrain"],
    ],
)
def test_a_command_says_so_in_one_line(argv: list[str]) -> None:
    done = tiny.run(*argv)
    assert done.returncode == 2
    assert "/dev/zero" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_table_that_plan_would_not_use_is_refused(tmp_path: Path) -> None:
    done = tiny.run("plan", "--devices", "2", "--bench", str(tmp_path / "table"), "--", "pretrain")
    assert done.returncode == 2
    assert (
        "requires --search, because it calibrates the times that --search estimates. Add --search"
        in done.stderr
    )
