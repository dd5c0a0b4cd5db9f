"""Map the roles in a task to dataset columns, by the columns' usual names or by ``--columns ROLE=NAME``."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from megatron_npu.base.errors import UsageError


def find(
    there: Mapping[str, Collection[str]],
    roles: Mapping[str, Collection[str]],
    said: Collection[tuple[str, str]],
) -> dict[str, str]:
    """Return a mapping from each role of a task to a dataset column.

    Args:
        there: the columns of each split.
        roles: the task's roles with their usual column names, most likely first; a role without usual names
            is used only if ``--columns`` names a column for it.
        said: the (role, column name) pairs given with ``--columns``.

    Raises:
        UsageError: a column is missing from a split, or the task has no such role.
    """
    columns = _said(said, roles)
    for role, usual in roles.items():
        if usual and role not in columns:
            taken = set(columns.values())
            columns[role] = _first(role, [name for name in usual if name not in taken], there["train"])
    _refuse_missing(there, columns)
    return columns


def _said(said: Collection[tuple[str, str]], roles: Collection[str]) -> dict[str, str]:
    for role, name in said:
        if role not in roles:
            raise UsageError(
                f"--columns {role}={name}: the task has no role {role}; the roles of the task are "
                f"{', '.join(roles)}. Correct the role, or remove it."
            )
    return dict(said)


def _first(role: str, names: Collection[str], there: Collection[str]) -> str:
    for name in names:
        if name in there:
            return name
    raise UsageError(
        f"the data has only the columns {', '.join(map(repr, there))}, but a column for the "
        f"{role} is required, such as {', '.join(map(repr, names))}. Name the column with "
        f"--columns {role}=NAME."
    )


def _refuse_missing(there: Mapping[str, Collection[str]], columns: Mapping[str, str]) -> None:
    for part, names in there.items():
        for role, name in columns.items():
            if name not in names:
                raise UsageError(
                    f"the split {part!r} has no column {name!r} (the columns of this split are "
                    f"{', '.join(map(repr, names))}). The {role} must have the same column name "
                    f"in every split. Name the column with --columns {role}=NAME."
                )
