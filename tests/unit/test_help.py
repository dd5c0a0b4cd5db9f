"""What ``--help`` offers beside the flags: examples, exit codes, a keyword, versions, completion."""

from __future__ import annotations

import argparse
import re
import shlex
import shutil
import subprocess

import pytest

from megatron_npu import __version__
from megatron_npu.base import arg_parser
from megatron_npu.base.command_examples import EXAMPLES, EXIT_CODES
from megatron_npu.base.errors import UsageError
from megatron_npu.commands import cli
from tests.support import processes

# behind what these parse comes another program's command line
_OF_OTHERS = {"run": r"^[^-]", "sim": r"^--$", "evaluate": "^"}


@pytest.fixture
def parsers(monkeypatch):
    """Return a function: the parser that a command makes, taken as it prints its help."""
    found: list[arg_parser.Parser] = []

    def noting(self: arg_parser.Parser, *_: object) -> None:
        found.append(self)
        raise SystemExit(0)

    monkeypatch.setattr(arg_parser.Parser, "print_help", noting)

    def of(*command: str) -> arg_parser.Parser:
        with pytest.raises(SystemExit):
            cli.main([*command, "--help"])
        return found.pop()

    return of


def test_every_command_has_examples():
    names = [*cli.COMMANDS, "patches list", "patches check", "patches pin"]
    assert {f"megatron-npu {name}" for name in names} == set(EXAMPLES)


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_examples_are_command_lines_that_the_command_takes(name, parsers):
    parser = parsers(name)
    for line in EXAMPLES[f"megatron-npu {name}"]:
        words = shlex.split(re.sub(r"^torchrun --nproc-per-node \d+ -m megatron_npu", "megatron-npu", line))
        assert words[:2] == ["megatron-npu", name], line
        words = words[2:]
        if name == "patches":
            parser = parsers(name, words.pop(0))
        if name in _OF_OTHERS:
            end = next(i for i, word in enumerate(words) if re.match(_OF_OTHERS[name], word))
            words = words[:end]
        if any(word.startswith(("--help=", "--config")) for word in words):
            continue  # ends, or reads a file that is not here
        if name == "pretrain":
            from megatron_npu.pretrain.flags import arguments

            assert arguments.parse(words).micro_batch_size
        else:
            assert isinstance(parser.parse_args(words), argparse.Namespace), line


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_help_ends_with_examples_and_has_exit_codes(name, capsys):
    with pytest.raises(SystemExit):
        cli.main([name, "--help"])
    text = capsys.readouterr().out
    assert "\nexamples:\n" in text
    for line in EXAMPLES[f"megatron-npu {name}"]:
        assert f"\n  {line}\n" in text
    assert text.count("exit code") == 1
    assert EXIT_CODES in text or re.search(r"exit code: 0", text)


@pytest.mark.parametrize("name", [*cli.COMMANDS, "patches list", "patches check", "patches pin"])
def test_a_description_says_what_the_command_does(name, parsers):
    parser = parsers(*name.split())
    assert parser.description[:1].isupper(), parser.description
    assert not parser.description.startswith(("The flags", "Run list"))
    assert f"megatron-npu {name}:" not in parser.description


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_a_placeholder_is_short_and_does_not_repeat_the_flag(name, parsers):
    for action in parsers(name)._actions:
        if action.option_strings and action.nargs != 0 and not action.choices:
            assert action.metavar or "_" not in arg_parser.metavar_of(action), action.option_strings
            assert "Default:" not in (action.help or ""), action.option_strings


def test_a_keyword_finds_flags_by_name_help_and_group(capsys):
    for keyword, there in (
        ("optimizer", ["--adam-beta1", "--use-distributed-optimizer"]),  # a group and a name
        ("sliding window", ["--pre-tockens", "--next-tockens"]),  # a help text
        ("MUON", ["--muon-momentum"]),
    ):
        with pytest.raises(SystemExit) as end:
            cli.main(["pretrain", f"--help={keyword}"])
        assert not end.value.code
        text = capsys.readouterr().out
        for flag in there:
            assert re.search(rf"^  {flag}\b", text, re.M), keyword
        assert "--tokenizer-type" not in text


@pytest.mark.parametrize("word", ["no-such-thing", ""])
def test_a_keyword_of_nothing_names_the_groups(word, capsys):
    assert cli.main(["pretrain", f"--help={word}"]) == 2
    err = capsys.readouterr().err
    assert err.startswith(f"megatron-npu pretrain: error: --help={word} matches no flag")
    assert "optimizer" in err
    assert err.count("\n") == 1


def test_a_keyword_behind_a_script_is_the_scripts():
    parser = arg_parser.Parser("megatron-npu try")
    parser.add_argument("--deep", action="store_true")
    parser.add_argument("command", nargs=argparse.REMAINDER)
    assert parser.parse_args(["train.py", "--help=deep"]).command == ["train.py", "--help=deep"]
    with pytest.raises(UsageError, match="--help=zzz"):
        parser.parse_args(["--help=zzz", "train.py"])


@pytest.mark.parametrize(
    "argv",
    [["-V"], ["--version"], *([name, flag] for name in ("generate", "run") for flag in ("-V", "--version"))],
)
def test_the_version_is_told_everywhere(argv, capsys):
    assert cli.main(argv) == 0
    assert capsys.readouterr().out == f"megatron_npu {__version__}\n"


def test_the_list_has_every_command_once_and_doctor_first(capsys):
    assert cli.main(["--help"]) == 0
    listed = re.findall(r"^    ([a-z]+)  ", capsys.readouterr().out, re.M)
    assert sorted(listed) == sorted(cli.COMMANDS)
    assert listed[0] == "doctor"


def test_bash_completes_commands_and_flags(tmp_path, capsys):
    bash = shutil.which("bash")
    if bash is None:
        pytest.skip("the case: no bash, which completes, is here")
    assert cli.main(["--completion"]) == 0
    program = tmp_path / "megatron-npu"
    program.write_text('#!/bin/sh\n[ "$1" = pretrain ] && echo "  --moe-router-fusion  --moe-other  --lr"\n')
    program.chmod(0o700)
    script = capsys.readouterr().out + (
        "\nCOMP_WORDS=(megatron-npu pre); COMP_CWORD=1; _megatron_npu; echo ${COMPREPLY[@]}"
        "\nCOMP_WORDS=(megatron-npu pretrain --moe); COMP_CWORD=2; _megatron_npu; echo ${COMPREPLY[@]}"
    )
    done = processes.run(
        [bash, "-c", script],
        env={"PATH": f"{tmp_path}:/usr/bin:/bin"},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert done.stdout == "pretrain preprocess\n--moe-other --moe-router-fusion\n"
