"""Declare the flags of all tasks, and check that the selected task uses every flag that is given."""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Callable, Collection
from typing import Any

from megatron_npu.base.arg_parser import Unfit
from megatron_npu.base.errors import UsageError
from megatron_npu.data.preprocessing import bad_rows
from megatron_npu.finetune import tasks
from megatron_npu.finetune.tasks.declaration import Flag

# what the provider of a user's script hands on to Megatron's data sets, and no task does
_OF_SCRIPTS = ("reset_position_ids", "reset_attention_mask", "eod_mask_loss")


def _role_and_name(text: str) -> tuple[str, str]:
    role, separator, name = text.partition("=")
    if not separator or not role or not name:
        raise Unfit(text, "ROLE=NAME, such as label=stars")
    return role, name


def add_data_flags(add: Callable[..., Any]) -> None:
    """Add ``--columns`` and the flags of all tasks to the parser."""
    add(
        "--columns",
        type=_role_and_name,
        nargs="+",
        action="extend",
        default=[],
        metavar="ROLE=NAME",
        help=(
            "column to use for each role, for data whose column names are not recognized; the roles are "
            f"{_roles()}"
        ),
    )
    bad_rows.add_flag(add)
    for flag in _flags():
        add(flag.name, **flag.options)


def _roles() -> str:
    """Return the column roles of all tasks, formatted for a help text."""
    *most, last = dict.fromkeys(role for task in tasks.every().values() for role in task.roles)
    return f"{', '.join(most)} and {last}"


def _flags() -> list[Flag]:
    """Return all flags that the tasks declare, without duplicates."""
    found: dict[str, Flag] = {}
    for task in tasks.every().values():
        for flag in task.all_flags():
            if found.setdefault(flag.name, flag) is not flag:
                raise ValueError(f"{task.__name__} declares {flag.name}, which another task already declares")
    return list(found.values())


def _readers() -> dict[str, list[str]]:
    """Return the values that only some tasks read, each with the tasks that read it."""
    reads = {name: task.all_reads() for name, task in tasks.every().items()}
    values = sorted(set().union(*reads.values()))
    return {value: [name for name, own in reads.items() if value in own] for value in [*values, *_OF_SCRIPTS]}


def refuse_repeated_columns(columns: Collection[tuple[str, str]]) -> None:
    """Check that ``--columns`` names each role at most once, and each column for at most one role.

    Without this check, if several columns were given for one role, the last one would silently be used.

    Args:
        columns: the (role, column name) pairs.

    Raises:
        UsageError: a role or a column is repeated.
    """
    for role, times in Counter(role for role, _ in columns).items():
        if times > 1:
            names = " ".join(f"{one}={name}" for one, name in columns if one == role)
            raise UsageError(
                f"--columns {names}: each role must be given only one column, but {role} has several. "
                "Remove the other columns."
            )
    for name, times in Counter(name for _, name in columns).items():
        if times > 1:
            roles = " ".join(f"{role}={one}" for role, one in columns if one == name)
            raise UsageError(
                f"--columns {roles}: each role must have a different column. Correct the column names."
            )


def refuse_others(args: argparse.Namespace, default: Callable[[str], Any]) -> None:
    """Check that the selected task uses every given flag, and run the task's own checks.

    User scripts may use any flag, so flags are not checked for them.

    Args:
        args: the flags, with the task in ``task``.
        default: returns the default of a flag.

    Raises:
        UsageError: the task does not use a flag, or two flags are mutually exclusive.
    """
    for name, readers in _readers().items():
        if args.task not in readers and getattr(args, name, None) != default(name):
            raise UsageError(
                f"--{name.replace('_', '-')} is not used by --task {args.task}; it applies only to "
                f"{' or '.join(f'--task {task}' for task in readers) if readers else 'a script'}. Remove "
                "it, or pass --user-script FILE."
            )
    tasks.every()[args.task].check(args)
