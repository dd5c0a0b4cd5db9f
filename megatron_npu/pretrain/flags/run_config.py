"""Implement ``--config FILE`` and ``--preset NAME``, which read flags from a file or set the sizes of a known
model.

``text_of`` writes such a file; each run saves its flags as ``<save>/config.yaml``.

The file is flat YAML: ``flag: value`` lines, lists in brackets, comments. The parser needs no package, and
nothing in it is executed. The command line takes precedence over the file, and the file over the preset.
"""

from __future__ import annotations

import argparse
import difflib
import re
import shlex
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

from megatron_npu.base import given_files
from megatron_npu.base.errors import UsageError, either

Add = Any
_LLAMA = (
    "--position-embedding-type rope --rotary-base 500000 --normalization RMSNorm --swiglu "
    "--disable-bias-linear --attention-dropout 0 --hidden-dropout 0 --group-query-attention "
    "--num-query-groups 8 "
)
PRESETS: dict[str, str] = {
    "gpt2-124m": "--num-layers 12 --hidden-size 768 --num-attention-heads 12 --seq-length 1024 "
    "--max-position-embeddings 1024",
    "gpt2-345m": "--num-layers 24 --hidden-size 1024 --num-attention-heads 16 --seq-length 1024 "
    "--max-position-embeddings 1024",
    # the shapes of Llama 3.2 1B and Llama 3.1 8B, at 2048 tokens
    "llama-1b": f"{_LLAMA}--num-layers 16 --hidden-size 2048 --ffn-hidden-size 8192 --num-attention-heads 32 "
    "--seq-length 2048 --max-position-embeddings 2048",
    "llama-8b": f"{_LLAMA}--num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 "
    "--num-attention-heads 32 --untie-embeddings-and-output-weights --seq-length 2048 "
    "--max-position-embeddings 2048",
}
_LINE = re.compile(r"(?:--)?(?P<name>[A-Za-z][\w-]*)\s*:(?:\s+(?P<value>.*))?$")


def add(group: Add) -> None:
    """Add --config and --preset to a parser.

    ``expanded`` removes them before the other flags are parsed.
    """
    group(
        "--config",
        metavar="FILE",
        default=argparse.SUPPRESS,
        help="read flags from a YAML file with lines of the form `flag: value`; flags on the "
        "command line take precedence (default: none)",
    )
    group(
        "--preset",
        choices=[*PRESETS],
        metavar="NAME",
        default=argparse.SUPPRESS,
        help=f"use a predefined model shape: {', '.join(PRESETS)}; explicit flags take precedence (default: "
        "none)",
    )


def expanded(argv: Sequence[str], parser: argparse.ArgumentParser) -> list[str]:
    """Return the command line with the flags from --preset and --config placed before the user's flags.

    Raises:
        UsageError: the preset or file does not exist, or a line does not set a flag to a valid value.
    """
    typed, files, presets = _taken_out(argv)
    of_file: list[str] = []
    for file in files:
        for name, words in _of_file(Path(file), parser):
            if name == "--preset":
                presets = presets or words
            else:
                of_file += [name, *words]
    shape = shlex.split(_preset(presets[-1])) if presets else []
    return [*shape, *of_file, *typed]


def text_of(typed: argparse.Namespace, resolved: argparse.Namespace, parser: argparse.ArgumentParser) -> str:
    """Return the text of a ``--config`` file that is equivalent to the flags of a command line.

    Args:
        typed: the result of ``arguments.parse``.
        resolved: the result of ``validation.check``; derived values are added as comments.
        parser: the parser that was used for both.
    """
    given: dict[str, str] = {}
    filled_in: dict[str, str] = {}
    for action in parser._actions:
        dest = action.dest
        if not action.option_strings or not hasattr(typed, dest) or dest in given:
            continue
        value = getattr(typed, dest)
        line = None if value == action.default else _line(action, value)
        if line is not None:
            given[dest] = line
        elif action.nargs != 0 and getattr(resolved, dest) not in (None, [], value):
            filled_in[dest] = f"# {_line(action, getattr(resolved, dest))}"
    left = [line for dest, line in filled_in.items() if dest not in given]
    return "\n".join([*given.values(), "# derived from these flags and from the machine:", *left, ""])


def _line(action: argparse.Action, value: Any) -> str | None:
    """Return the line of a configuration file for a flag, or None for a switch that is not set."""
    if isinstance(action, argparse.BooleanOptionalAction):
        return f"{action.option_strings[0 if value else -1].removeprefix('--')}: true"
    name = action.option_strings[0].removeprefix("--")
    if action.nargs == 0:
        return f"{name}: true" if value == action.const else None
    words = [str(each) for each in value] if isinstance(value, list | tuple) else [str(value)]
    if not all(map(_fits_a_line, words)):
        return (
            f"# {name}: its value contains a line break or both kinds of quotes; pass it on the command line"
        )
    text = ", ".join(map(_quoted, words))
    return f"{name}: [{text}]" if isinstance(value, list | tuple) else f"{name}: {text}"


def _fits_a_line(word: str) -> bool:
    return "\n" not in word and not {'"', "'"} <= set(word)


def _quoted(text: str) -> str:
    if re.fullmatch(r"[\w./:+-]+", text):
        return text
    return f"'{text}'" if '"' in text else f'"{text}"'


def _taken_out(argv: Sequence[str]) -> tuple[list[str], list[str], list[str]]:
    """Remove --config and --preset from a command line, and return it and the values of these two flags."""
    rest: list[str] = []
    values: dict[str, list[str]] = {"--config": [], "--preset": []}
    words = iter(argv)
    for word in words:
        flag, equals, value = word.partition("=")
        if flag not in values:
            rest.append(word)
            continue
        if not equals:
            value = next(words, "")
        if not value or value.startswith("--"):
            expected = "a file of flags" if flag == "--config" else either(PRESETS)
            raise UsageError(f"{flag} requires a value: {expected}", remedy=f"Write {flag} VALUE.")
        values[flag].append(value)
    return rest, values["--config"], values["--preset"]


def _preset(name: str) -> str:
    if name not in PRESETS:
        raise UsageError(
            f"--preset must be {either(PRESETS)}, but got {name}",
            remedy="Choose one of them, or pass the flags.",
        )
    return PRESETS[name]


def _of_file(path: Path, parser: argparse.ArgumentParser) -> Iterator[tuple[str, list[str]]]:
    """Yield each flag in a configuration file with its values.

    Switches with the value false are omitted.
    """
    flags = {flag: action for action in parser._actions for flag in action.option_strings}
    seen: set[str] = set()
    for where, line in _lines(path):
        given, value = _flag_and_value(line, where)
        name = _known_flag(given, flags, where)
        if name in seen:
            raise UsageError(
                f"{where}: {name} is set twice, but each flag may be set only once",
                remedy="Remove one of the lines.",
            )
        seen.add(name)
        values = _values(value, where)
        if flags[name].nargs != 0:
            yield name, values
        elif values not in (["true"], ["false"]):
            raise UsageError(
                f"{where}: {name} is a switch and must be true or false, but is set to {value}",
                remedy="Write true or false.",
            )
        elif values == ["true"]:
            yield name, []


def _lines(path: Path) -> Iterator[tuple[str, str]]:
    """Yield the location and the text of each line that is not empty, without comments."""
    try:
        content = given_files.text(path)
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(
            f"--config {path} cannot be read as a YAML file of flags: {error}", remedy="Check the path."
        ) from None
    for number, line in enumerate(content.splitlines(), 1):
        if "\0" in line:
            raise UsageError(
                f"{path}, line {number} contains a null byte, which no value may have",
                remedy="Remove the null byte.",
            )
        text = _without_comment(line)
        if text.strip() not in ("", "---"):
            yield f"{path}, line {number}", text


def _flag_and_value(line: str, where: str) -> tuple[str, str]:
    """Split a line of a configuration file at its colon.

    Raises:
        UsageError: the line is indented, or is not of the form ``flag: value``.
    """
    match = None if line[0].isspace() else _LINE.match(line)
    if match is None or not match["value"]:
        raise UsageError(
            f"{where} must have the form `flag: value`, but is {line.strip()}",
            remedy="Write one flag per line, and lists as [a, b].",
        )
    return match["name"], match["value"]


def _known_flag(given: str, flags: Collection[str], where: str) -> str:
    """Return the flag that a configuration line names.

    The name may be spelled with - or _, because Megatron has flags such as --override-opt_param-scheduler.
    """
    name = next((f"--{each}" for each in _spelt(given) if f"--{each}" in flags), "")
    if name and name not in ("--help", "--config"):
        return name
    near = difflib.get_close_matches(f"--{given}", flags, n=3)
    meant = f"Did you mean {either(near)}?" if near else "See `megatron-npu pretrain --help` for all flags."
    raise UsageError(f"{where}: unknown flag {given}", remedy=meant)


def _spelt(name: str) -> tuple[str, str]:
    return name, name.replace("_", "-")


def _without_comment(line: str) -> str:
    return re.sub(r"""(^|\s)#(?=(?:[^"']|"[^"]*"|'[^']*')*$).*""", "", line).rstrip()


def _values(text: str, where: str) -> list[str]:
    """Return the values in a configuration line as a list, from either a scalar or a list in brackets."""
    if text[0] in "{|>&*!":
        raise UsageError(
            f"{where}: the value must be a plain value or [a, b], but is {text}",
            remedy="Nested YAML is not supported.",
        )
    if not text.startswith("["):
        return [_scalar(text)]
    if not text.endswith("]"):
        raise UsageError(
            f"{where}: the list must begin and end on the same line, as in [a, b], but is {text}",
            remedy="Close the bracket.",
        )
    parts = re.findall(r"""\s*("[^"]*"|'[^']*'|[^,]+)\s*(?:,|$)""", text[1:-1])
    return [_scalar(part.strip()) for part in parts if part.strip()]


def _scalar(text: str) -> str:
    return text[1:-1] if len(text) > 1 and text[0] == text[-1] and text[0] in "\"'" else text
