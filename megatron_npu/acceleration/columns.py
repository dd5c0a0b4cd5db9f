"""Which column is what: by their usual names, or as ``--columns ROLE=NAME`` says."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from megatron_npu.errors import UsageError

# the usual names of each role, the likeliest first
_USUAL = {
    "label": ("label", "labels", "target", "class", "category", "sentiment", "score"),
    "tokens": ("tokens", "words"),
    "tags": ("ner_tags", "tags", "labels", "pos_tags", "chunk_tags"),
    "question": ("question",),
    "context": ("context", "passage"),
    "answers": ("answers", "answer"),
    "source": ("source", "input", "article", "document", "dialogue", "question", "text", "en"),
    "target": ("target", "output", "highlights", "summary", "answer", "label"),
    "text": ("text", "content", "sentence", "document", "body"),
}
# a text with the one that it is compared with: of GLUE, and of data sets like it
_PAIRS = (
    ("sentence1", "sentence2"),
    ("question1", "question2"),
    ("premise", "hypothesis"),
    ("question", "sentence"),
    ("text1", "text2"),
)
_SINGLE = ("sentence", "text", "review", "content", "body", "title", "question", "comment")


def find(
    there: Mapping[str, Collection[str]], roles: Collection[str], said: Collection[tuple[str, str]]
) -> dict[str, str]:
    """Return the column of each role.

    Args:
        there: the columns of each part.
        roles: what the task needs.
        said: the roles and names of ``--columns``.

    Raises:
        UsageError: a column is missing from a part, or a role is none of the task's.
    """
    columns = _said(said, roles)
    for role in roles:
        if role not in columns:
            taken = set(columns.values())
            columns[role] = _first(role, [name for name in _USUAL[role] if name not in taken], there["train"])
    _refuse_missing(there, columns)
    return columns


def find_texts(
    there: Mapping[str, Collection[str]], label: str, said: Collection[tuple[str, str]]
) -> tuple[str, str | None]:
    """Return the column of the text to classify, and that of its pair, or None.

    Raises:
        UsageError: as ``find``.
    """
    named = {role: name for role, name in said if role != "label"}
    columns = _said(list(named.items()), ("text", "pair"))
    if "pair" in columns and "text" not in columns:
        raise UsageError("--columns pair=… alone", "text=… too", "Name the text that it is the pair of.")
    if not columns:
        for one, other in _PAIRS:
            if one in there["train"] and other in there["train"] and label not in (one, other):
                columns = {"text": one, "pair": other}
                break
        else:
            columns = {"text": _first("text", [name for name in _SINGLE if name != label], there["train"])}
    _refuse_missing(there, columns)
    if label in columns.values():
        raise UsageError(
            f"the column {label!r} as the text and as its label", "a column for each", "Correct --columns."
        )
    return columns["text"], columns.get("pair")


def _said(said: Collection[tuple[str, str]], roles: Collection[str]) -> dict[str, str]:
    for role, name in said:
        if role not in roles:
            raise UsageError(
                f"--columns {role}={name}",
                f"roles of this task: {', '.join(roles)}",
                "Correct the role, or leave it out.",
            )
    return dict(said)


def _first(role: str, names: Collection[str], there: Collection[str]) -> str:
    for name in names:
        if name in there:
            return name
    raise UsageError(
        f"no column for the {role} (the data have {', '.join(map(repr, there))})",
        f"one of {', '.join(map(repr, names))}",
        f"Name it: --columns {role}=NAME.",
    )


def _refuse_missing(there: Mapping[str, Collection[str]], columns: Mapping[str, str]) -> None:
    for part, names in there.items():
        for role, name in columns.items():
            if name not in names:
                raise UsageError(
                    f"no column {name!r} in the part {part!r} (it has {', '.join(map(repr, names))})",
                    f"the {role} under the same name in every part",
                    f"Name it: --columns {role}=NAME.",
                )
