"""Files that a user names: pipes are read, and what has no end is refused in one line."""

from __future__ import annotations

import argparse
import os
import threading
from pathlib import Path

import pytest

from megatron_npu.base import given_files
from megatron_npu.base.arg_parser import Parser
from megatron_npu.base.errors import UsageError
from megatron_npu.commands import cli
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


_GPT = (
    "--num-layers 1 --hidden-size 32 --num-attention-heads 2 --seq-length 32 --max-position-embeddings 32 "
    "--micro-batch-size 1 --mock-data"
)


def test_an_empty_value_is_refused() -> None:
    """As of a shell variable that is not set: Path would make it the working directory."""
    parser = Parser("megatron-npu x")
    parser.add_argument("--save", default=None)
    parser.add_argument("--name", default="")
    parser.add_argument("--prompt", metavar="TEXT")
    parser.add_argument("inputs", nargs="*")
    parser.add_argument("words", nargs=argparse.REMAINDER)
    for words, flag in ((["--save", ""], "--save"), (["a", ""], "inputs")):
        with pytest.raises(UsageError, match=f"^{flag} must not be empty. Pass a value. If"):
            parser.parse_args(words)
    assert parser.parse_args(["--name", "", "--prompt", "", "a"]).inputs == ["a"]


@pytest.mark.parametrize(
    ("argv", "flag"),
    [
        (f"pretrain {_GPT} --save", "--save"),
        (f"pretrain {_GPT} --load", "--load"),
        ("preprocess --input x --output-prefix", "--output-prefix"),
        ("data merge x --output-prefix", "--output-prefix"),
        ("train --user-script x --save", "--save"),
        ("checkpoint verify", "DIR"),
        ("generate --load", "--load"),
    ],
)
def test_a_command_refuses_an_empty_name(
    argv: str, flag: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.main([*argv.split(), ""]) == 2
    assert f"error: {flag} must not be empty. Pass a value." in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


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
