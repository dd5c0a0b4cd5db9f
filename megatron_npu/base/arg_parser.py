"""Define the argument parser of all commands, with one-line errors and with defaults in ``--help``."""

from __future__ import annotations

import argparse
import contextlib
import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from megatron_npu.base import digits, given_files
from megatron_npu.base.command_examples import end_of_help
from megatron_npu.base.errors import UsageError, either
from megatron_npu.base.flag_names import instead_of, nearest


class Unfit(argparse.ArgumentTypeError):
    """Raised when a flag does not accept the given value.

    The message describes the accepted values.
    """

    def __init__(self, given: str, expected: str) -> None:
        self.given, self.expected = given, expected
        super().__init__(f"must be {expected}, but got {given}")


_INT64 = 1 << 63


@dataclass(frozen=True)
class Number:
    """A ``type`` for ``add_argument`` that parses a number, and that describes which values are accepted.

    Attributes:
        expected: the accepted values, as named in an error message.
        kind: the type that parses the string.
        least: the smallest accepted number; -inf accepts any finite number.
        most: the largest accepted number; inf accepts any finite number.
        metavar: the placeholder for the number in ``--help``.
    """

    expected: str
    kind: type[int] | type[float]
    least: float = -math.inf
    most: float = math.inf
    metavar: str = "N"

    def __call__(self, text: str) -> int | float:
        """Convert a text to a number, and check that the number is in the accepted range.

        Raises:
            Unfit: the string is not an accepted number.
        """
        try:
            value = self.kind(text)
        except ValueError:
            raise Unfit(text, self.expected) from None
        if not self.holds(value):
            raise Unfit(text, self.expected)
        return value

    def holds(self, value: float) -> bool:
        """Return True if a number is in the accepted range. An integer must fit into 64 bits."""
        finite = -_INT64 <= value < _INT64 if isinstance(value, int) else math.isfinite(value)
        return finite and self.least <= value <= self.most


positive = Number("a positive integer", int, 1)
whole = Number("a non-negative integer", int, 0)
integer = Number("an integer", int)
number = Number("a number", float, metavar="X")
beta = Number("a number of at least 0 and less than 1", float, 0.0, math.nextafter(1.0, 0.0), metavar="X")
seed = Number("an integer from 0 to 2^32 - 1, as numpy requires", int, 0, 2**32 - 1)

_BYTES_OF = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


def byte_size_or_0(text: str) -> int:
    """Parse a number of bytes, which may be 0.

    0 is accepted and means "none".
    """
    return 0 if text.strip() == "0" else byte_size(text)


def byte_size(text: str) -> int:
    """Parse a number of bytes such as ``65536``, ``512M`` or ``64GB``.

    This parser can be passed as ``type`` to ``add_argument``.

    Raises:
        Unfit: the string is not a positive number of bytes.
    """
    amount = text.upper().removesuffix("B")
    count = amount.rstrip("KMG")
    unit, number = amount[len(count) :], digits.number(count)
    if unit not in _BYTES_OF or not number:
        raise Unfit(text, "a positive number of bytes, optionally with the suffix K, M or G")
    return number * _BYTES_OF[unit]


class _Help(argparse.HelpFormatter):
    """Help formatter that uses short metavars, and that appends "required" or the default value where it
    is missing.
    """

    def _get_default_metavar_for_optional(self, action: argparse.Action) -> str:
        return metavar_of(action)

    def _get_help_string(self, action: argparse.Action) -> str:
        text = action.help or ""
        if action.required and action.option_strings:
            return f"{text} (required)"
        default = default_of(action)
        return text if "default" in text or not default else f"{text} (default: {default})".replace("%", "%%")


def metavar_of(action: argparse.Action) -> str:
    """Return the placeholder for a flag's value in ``--help`` if the flag does not define one itself."""
    if action.type in (byte_size, byte_size_or_0):
        return "BYTES"
    return action.type.metavar if isinstance(action.type, Number) else action.dest.upper()


def default_of(action: argparse.Action) -> str:
    """Return the default of a flag in the form in which a user would type it.

    The result is empty for a switch and for a flag without a default.
    """
    default = action.default
    if action.nargs == 0 or default in (None, argparse.SUPPRESS) or isinstance(default, bool):
        return ""
    if isinstance(default, list | tuple):
        return " ".join(map(str, default))
    return f"{default:g}" if isinstance(default, float) and abs(default) < 1e6 else str(default)


def _check_name(flag: str, given: str | Path) -> None:
    """Raise an error if the value of a flag is empty or the path of a device."""
    if given == "":
        raise UsageError(
            f"{flag} must not be empty",
            remedy="Pass a value. If the command contains a shell variable, check that it is set.",
        )
    if given_files.is_device(given):
        raise UsageError(
            f"{flag} must name a file or a folder, but {given} is a device or a socket",
            remedy="Correct the path.",
        )


def _sentence(prog: str, description: str) -> str:
    """Return the description of a command without the leading name of the command.

    The description may be a module's docstring.
    """
    text = description.replace("``", "").removeprefix(f"{prog}: ")
    return text[:1].upper() + text[1:]


class Parser(argparse.ArgumentParser):
    """Argument parser that raises ``UsageError`` instead of exiting, and that suggests known flags for
    unknown ones.

    Args:
        prog: the command as typed by the user.
        description: what the command does; double backquotes, and the command before a colon, are removed.
        hint: a sentence appended to each error.
        options: passed to ``argparse.ArgumentParser``.
    """

    def __init__(self, prog: str, description: str | None = None, hint: str = "", **options: Any) -> None:
        self._hint = hint
        defaults: dict[str, Any] = {"formatter_class": _Help, "allow_abbrev": False, "exit_on_error": False}
        super().__init__(prog, description=_sentence(prog, description or ""), **(defaults | options))

    def error(self, message: str) -> NoReturn:
        raise UsageError(message, remedy=self._remedy())

    def format_help(self) -> str:
        """Return the help text, which ends with examples and exit codes."""
        return super().format_help() + end_of_help(self.prog, self.epilog)

    def help_about(self, keyword: str) -> str:
        """Return the help for all flags whose name, help text or group title contains a keyword.

        Raises:
            UsageError: no flag contains the keyword.
        """
        formatter, word, found = self._get_formatter(), keyword.casefold(), False
        for group in self._action_groups:
            title = str(group.title)
            actions = [
                action
                for action in group._group_actions
                if action.help != argparse.SUPPRESS
                and word in f"{title} {' '.join(action.option_strings)} {action.help}".casefold()
            ]
            found = found or bool(actions)
            formatter.start_section(title)
            formatter.add_arguments(actions)
            formatter.end_section()
        if not word or not found:
            titles = ", ".join(str(group.title) for group in self._action_groups if group._group_actions)
            raise UsageError(
                f"--help={keyword} matches no flag, help text or group; the groups are: {titles}",
                remedy=f"See `{self.prog} --help` for all flags.",
            )
        return formatter.format_help()

    def _answer_keyword(self, args: Any) -> None:
        """Print the help for a keyword, and exit, if the arguments contain ``--help=KEYWORD``."""
        words = sys.argv[1:] if args is None else list(args)
        words = words[: words.index("--")] if "--" in words else words
        if any(action.nargs == argparse.REMAINDER for action in self._actions):
            words = words[:1]  # what comes behind is another program's
        for word in words:
            if word.startswith("--help="):
                self._print_message(self.help_about(word.partition("=")[2]), sys.stdout)
                self.exit()

    def parse_args(  # type: ignore[override]  # argparse declares one overload for each kind of namespace
        self, args: Any = None, namespace: Any = None
    ) -> argparse.Namespace:
        """Parse the command line, and return the values.

        Raises:
            UsageError: a flag is unknown, a required flag is missing, or a value has the wrong type.
        """
        self._answer_keyword(args)
        try:
            values, unknown = self.parse_known_args(args, namespace)
        except argparse.ArgumentError as error:
            self._refuse_misspelt(args)
            raise self._refusal(error) from None
        except UsageError:
            self._refuse_misspelt(args)
            raise
        asked = self._asked(values)
        asked._refuse_unknown(unknown)
        asked._check_names(values)
        return values

    def _check_names(self, values: argparse.Namespace) -> None:
        """Raise an error if a flag names a device such as /dev/zero, whose content has no end, or if its
        value is empty, as that of an unset shell variable.
        """
        for action in self._actions:
            value = getattr(values, action.dest, None)
            if action.metavar == "TEXT" or action.nargs == argparse.REMAINDER or value is action.default:
                continue
            for each in value if isinstance(value, list | tuple) else [value]:
                if isinstance(each, str | Path):
                    _check_name("/".join(action.option_strings) or str(action.metavar or action.dest), each)

    def _refuse_misspelt(self, args: Any) -> None:
        """Raise an error if the command line contains an unknown flag.

        An unknown flag is likely a misspelt required flag.

        This is called only after parsing has failed. If ``--help`` was given, the help has already been
        printed.
        """
        with self._nothing_required(), contextlib.suppress(argparse.ArgumentError):
            values, unknown = self.parse_known_args(args)
            self._asked(values)._refuse_unknown(unknown)

    @contextlib.contextmanager
    def _nothing_required(self) -> Iterator[None]:
        of_actions = [parser for each in self._parsers_of_actions().values() for parser in each.values()]
        every: list[Any] = []
        for parser in (self, *of_actions):
            every += [*parser._actions, *parser._mutually_exclusive_groups]
        required = [one for one in every if one.required]
        for one in required:
            one.required = False
        try:
            yield
        finally:
            for one in required:
                one.required = True

    def _asked(self, values: argparse.Namespace) -> Parser:
        """Return the parser that parsed the flags, which may be that of a subcommand (``checkpoint
        prune``).
        """
        for dest, parsers in self._parsers_of_actions().items():
            return parsers.get(getattr(values, dest), self)
        return self

    def _parsers_of_actions(self) -> dict[str, dict[str, Parser]]:
        choosers = [one for one in self._actions if isinstance(one, argparse._SubParsersAction)]
        return {one.dest: one.choices for one in choosers}

    def _refuse_unknown(self, unknown: Sequence[str]) -> None:
        """Raise an error if the command line has unknown flags, and suggest replacements for the first."""
        flags = [word for word in unknown if word.startswith("--")]
        if flags:
            first, known = flags[0].partition("=")[0], self._option_string_actions
            near = nearest(first, known)
            meant = f"Did you mean {either(near)}? " if near else ""
            if instead := instead_of(first, known):
                meant = f"{instead[0].upper()}{instead[1:]}. "
            raise UsageError(f"unknown flag {' '.join(flags)}", remedy=meant + self._remedy())
        if unknown:
            self.error(f"unexpected argument {' '.join(unknown)}")

    def _refusal(self, error: argparse.ArgumentError) -> UsageError:
        if isinstance(error.__context__, Unfit):
            return UsageError(f"{error.argument_name} {error.__context__}", remedy=self._remedy())
        other = error.message.partition("not allowed with argument ")[2]
        if other:
            return UsageError(
                f"{other} and {error.argument_name} are mutually exclusive", remedy="Remove one of them."
            )
        # from Python 3.13 on a missing flag comes here too, and belongs to no argument
        about = f"{error.argument_name}: " if error.argument_name else ""
        return UsageError(f"{about}{error.message}", remedy=self._remedy())

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        """Reject a value that is not one of the choices, with this project's error message instead of
        argparse's.
        """
        if action.choices is not None and value not in action.choices:
            name = "/".join(action.option_strings) or action.metavar or action.dest
            raise UsageError(
                f"{name} must be {either(action.choices)}, but got {value!r}",
                remedy=self._remedy(),
            )

    def _remedy(self) -> str:
        return f"See `{self.prog} --help`. {self._hint}".rstrip()
