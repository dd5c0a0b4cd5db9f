"""The shared parser: one line that says what was expected, and help that says every default."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import re
import sys

import pytest

from megatron_npu.adaptors.shared.arguments import add_attention_flags
from megatron_npu.base.arg_parser import Parser, default_of, integer, number, positive, whole
from megatron_npu.base.errors import UsageError
from megatron_npu.base.flag_names import flags_of_others, instead_of
from megatron_npu.commands import cli
from tests.conftest import ROOT


@pytest.fixture
def parser():
    result = Parser("megatron-npu try", description="``try``: a command.", hint="Ask again.")
    result.add_argument("--layers", type=positive, default=12, help="how many")
    result.add_argument("--steps", type=whole, help="how often (default: as often as it takes)")
    result.add_argument("--rate", "--speed", type=number, default=1e-5, help="100% of it")
    result.add_argument("--seed", type=integer)
    result.add_argument("--form", choices=["long", "short"])
    result.add_argument("--keys", nargs="+", default=["text", "title"], help="names")
    result.add_argument("--quiet", action="store_true", help="say nothing")
    return result


@pytest.mark.parametrize(
    ("argv", "told"),
    [
        (["--layers", "abc"], "--layers must be a positive integer, but got abc. See"),
        (["--layers", f"{10**20}"], f"--layers must be a positive integer, but got {10**20}. See"),
        (["--layers", "0"], "--layers must be a positive integer, but got 0. See"),
        (["--steps", "-1"], "--steps must be a non-negative integer, but got -1. See"),
        (["--seed", "1.5"], "--seed must be an integer, but got 1.5. See"),
        (["--speed", "nan"], "--rate/--speed must be a number, but got nan. See"),
        (["--form", "wide"], "--form must be long or short, but got 'wide'. See"),
        (["--layer", "3"], "unknown flag --layer. Did you mean --layers?"),
        (["--layers"], "--layers: expected one argument"),
        (["stray"], "unexpected argument stray"),
    ],
)
def test_what_is_wrong_is_said_in_one_line_of_words(parser, argv, told):
    with pytest.raises(UsageError) as caught:
        parser.parse_args(argv)
    assert str(caught.value).startswith(told)
    assert str(caught.value).endswith("See `megatron-npu try --help`. Ask again.")
    assert "\n" not in str(caught.value)


def test_a_missing_flag_is_named():
    parser = Parser("megatron-npu try")
    parser.add_argument("--layers", required=True)
    with pytest.raises(UsageError, match=r"^the following arguments are required: --layers\. See "):
        parser.parse_args([])


def test_a_misspelt_flag_is_told_before_the_required_one_that_it_was_to_be():
    parser = Parser("megatron-npu try")
    parser.add_argument("--layers", required=True)
    either = parser.add_mutually_exclusive_group(required=True)
    either.add_argument("--short", action="store_true")
    with pytest.raises(UsageError, match=r"^unknown flag --layer\. Did you mean --layers\? "):
        parser.parse_args(["--layer", "3"])
    with pytest.raises(UsageError, match=r"^one of the arguments --short is required"):
        parser.parse_args(["--layers", "3"])
    assert parser.parse_args(["--layers", "3", "--short"]).layers == "3"


def test_a_misspelt_flag_of_an_action_is_told_first_too():
    parser = Parser("megatron-npu try")
    action = parser.add_subparsers(dest="action", required=True).add_parser("prune")
    action.add_argument("--keep", required=True)
    with pytest.raises(
        UsageError, match=r"^unknown flag --kep\. Did you mean --keep .*\? See `megatron-npu try prune "
    ):
        parser.parse_args(["prune", "--kep", "3"])
    with pytest.raises(UsageError, match=r"^the following arguments are required: --keep"):
        parser.parse_args(["prune"])
    with pytest.raises(UsageError, match=r"^unknown flag --other"):
        parser.parse_args(["prune", "--keep", "3", "--other"])
    assert parser.parse_args(["prune", "--keep", "3"]).keep == "3"


def test_a_value_that_is_unfit_is_told_beside_a_misspelt_flag(parser):
    with pytest.raises(UsageError, match=r"^--layers must be a positive integer, but got abc"):
        parser.parse_args(["--layers", "abc", "--sed", "3"])


def test_help_says_defaults_once_and_short_metavars(parser):
    text = " ".join(parser.format_help().split())
    assert "Try: a command." in text
    assert "--layers N how many (default: 12)" in text
    assert "--steps N how often (default: as often as it takes)" in text
    names = "--rate, --speed X" if sys.version_info >= (3, 13) else "--rate X, --speed X"
    assert f"{names} 100% of it (default: 1e-05)" in text
    assert "names (default: text title)" in text
    assert "--quiet say nothing --" not in text
    assert "say nothing (" not in text


# `run` hands its flags to the script, `evaluate` to lm-eval.
OURS = [name for name in cli.COMMANDS if name not in ("run", "evaluate")]


@pytest.mark.parametrize("name", OURS)
def test_every_command_complains_in_one_line(name, capsys):
    assert cli.main([name, "--no-such-flag-anywhere"]) == 2
    out, err = capsys.readouterr()
    assert not out
    assert err.startswith(f"megatron-npu {name}: error: ")
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    "name",
    [
        "pretrain.flags.arguments",
        "data.preprocessing.command",
        "generation.generate",
        "evaluation.lambada",
        "conversion.command",
    ],
)
def test_every_flag_has_a_help_text(name):
    parser = importlib.import_module(f"megatron_npu.{name}").parser()
    for action in parser._actions:
        assert action.help, f"{'/'.join(action.option_strings)} has no help text"
    text = " ".join(parser.format_help().split())
    assert "``" not in text
    assert len([action for action in parser._actions if default_of(action)]) <= text.count("default: ")


@pytest.fixture
def required(monkeypatch):
    """Return a list to which each flag comes that a parser is told to require."""
    found: list[str] = []
    add = argparse._ActionsContainer.add_argument

    def noting(container, *names, **options):
        found.extend(names[:1] if options.get("required") else [])
        return add(container, *names, **options)

    monkeypatch.setattr(argparse._ActionsContainer, "add_argument", noting)
    return found


HELPS = [name for name in OURS if name not in ("checkpoint", "data")] + ["checkpoint prune", "data merge"]
REQUIRED = {
    "pretrain": 6,
    "preprocess": 1,
    "generate": 1,
    "serve": 1,
    "convert": 2,
    "lambada": 2,
    "bench": 1,
    "plan": 1,
    "checkpoint prune": 1,
    "data merge": 1,
}


@pytest.mark.parametrize("words", HELPS)
def test_help_says_which_flags_are_required(words, required, capsys):
    with contextlib.suppress(SystemExit):
        cli.main([*words.split(), "--help"])
    usage, _, listed = capsys.readouterr().out.partition("\noptions:")
    required = [flag for flag in required if (words, flag) != ("checkpoint prune", "--into")]  # gather's
    assert len(required) == REQUIRED.get(words, 0)
    assert listed.count("(required)") == len(required)
    for flag in required:
        assert re.search(rf"\s{flag}\s", usage), flag
        entry = re.search(rf"^  {flag}\s.*?(?=^  -|^$|\Z)", listed, re.MULTILINE | re.DOTALL)
        assert entry, flag
        assert entry[0].rstrip().endswith("(required)")


@pytest.mark.parametrize("words", HELPS)
def test_a_misspelt_flag_is_told_before_what_a_command_requires(words, capsys):
    assert cli.main([*words.split(), "--no-such-flag-anywhere"]) == 2
    assert "unknown flag --no-such-flag-anywhere. " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "told"),
    [
        (["preproces"], "unknown command 'preproces'. Did you mean preprocess?"),
        (["hlep"], "unknown command 'hlep'. Did you mean help?"),
        (["version"], "unknown command 'version'. Did you mean --version?"),
        (["zzz"], "unknown command 'zzz'. The commands are run, pretrain, "),
        (["help", "lamdba"], "unknown command 'lamdba'. Did you mean lambada?"),
    ],
)
def test_a_misspelt_command_gets_the_nearest_one(argv, told, capsys):
    assert cli.main(argv) == 2
    out, err = capsys.readouterr()
    assert not out
    assert err.startswith(f"megatron-npu: error: {told}")
    assert err.count("\n") == 1


@pytest.mark.parametrize("argv", [["help"], ["--help"], ["-h"]])
def test_help_names_commands_variables_and_torchrun(argv, capsys):
    assert cli.main(argv) == 0
    out = capsys.readouterr().out
    for name in (
        *cli.COMMANDS,
        "--version",
        "docs/reference/flags.md",
        "torchrun --nproc-per-node N -m megatron_npu",
    ):
        assert name in out


def test_help_of_a_command_is_its_own(capsys):
    texts = []
    for argv in (["help", "generate"], ["generate", "--help"]):
        with pytest.raises(SystemExit):
            cli.main(argv)
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1]
    assert texts[0].startswith("usage: megatron-npu generate")


@pytest.mark.parametrize(
    ("command", "flag", "told"),
    [
        ("pretrain", "--window-size=64,0", "Use --pre-tockens LEFT --next-tockens RIGHT."),
        ("pretrain", "--sliding-window", "Use --pre-tockens N, where N is one less than"),
        (
            "pretrain",
            "--use-fused-rmsnorm",
            "Remove this flag, because fused operations are always on.",
        ),
        ("pretrain", "--npu-deterministic", "Use --deterministic-mode."),
        ("train", "--use-fused-rmsnorm", "Use --fused-ops, which replaces all operations"),
    ],
)
def test_a_flag_of_another_project_is_answered_with_ours(command, flag, told, capsys):
    assert cli.main([command, flag]) == 2
    assert f"unknown flag {flag}. {told}" in capsys.readouterr().err


def test_the_answers_are_those_of_the_page_for_users_of_mindspeed():
    page = (ROOT / "docs/how-to/switch-from-mindspeed.md").read_text(encoding="utf-8")
    for flag in flags_of_others():
        row = next((line for line in page.splitlines() if re.match(rf"\| .*`{flag}\b", line)), "")
        text = instead_of(flag, _Everything()) or ""
        names = re.findall(r"--[a-z][\w-]*", text)
        assert row, flag
        assert [name for name in names or ["remove"] if name not in row] == [], flag


def test_a_flag_for_the_device_gets_the_variable(capsys):
    assert cli.main(["generate", "--load", "gpt", "--device", "npu"]) == 2
    told = (
        "unknown flag --device. Use the environment variable MEGATRON_NPU_DEVICE, such as MEGATRON_NPU_DEVICE"
    )
    assert told in capsys.readouterr().err
    assert instead_of("--device", ["--help"]) is None


def test_a_stock_script_s_parser_answers_with_ours(capsys):
    stock = argparse.ArgumentParser("pretrain_gpt.py")
    parser = add_attention_flags(lambda parser: parser, stock)
    with pytest.raises(SystemExit, match=r"^2$"):
        parser.parse_args(["--use-fused-rmsnorm", "--bogus", "--sliding-window=8"])
    end = capsys.readouterr().err.partition("unrecognized arguments: ")[2].splitlines()
    assert end == [
        "--use-fused-rmsnorm --bogus --sliding-window=8",
        "megatron_npu: --use-fused-rmsnorm: remove this flag, because fused operations are always on.",
        "megatron_npu: --sliding-window: use --pre-tockens N, where N is one less than Transformers' "
        "sliding_window.",
    ]


def test_a_stock_script_s_parser_names_the_nearest_flag(capsys, tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    stock = argparse.ArgumentParser("pretrain_gpt.py", allow_abbrev=False)
    stock.add_argument("--tensor-model-parallel-size")
    parser = add_attention_flags(lambda parser: parser, stock)
    with pytest.raises(SystemExit, match=r"^2$"):
        parser.parse_args(["--tensor-model-paralel-size", "2"])
    hint = "megatron_npu: --tensor-model-paralel-size: did you mean --tensor-model-parallel-size?"
    assert capsys.readouterr().err.splitlines() == [
        "usage: pretrain_gpt.py [FLAG ...]; --help lists all flags",
        "pretrain_gpt.py: error: unrecognized arguments: --tensor-model-paralel-size 2",
        hint,
    ]
    assert hint in (tmp_path / "error.json").read_text()  # torchrun's root cause


class _Everything:
    """The flags of a command that has all flags."""

    def __contains__(self, flag):
        return True
