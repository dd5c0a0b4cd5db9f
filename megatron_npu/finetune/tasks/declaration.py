"""Define how a task is declared, which determines its flags, checks, help texts and model card.

A task's file is also imported for help texts and by the process that starts the ranks, so it imports
Transformers and ``datasets`` inside functions.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar, Literal


class Flag:
    """A flag that a task declares.

    Args:
        name: the flag as typed, such as ``--doc-stride``.
        options: options of argparse's ``add_argument``.
    """

    def __init__(self, name: str, **options: Any) -> None:
        self.name, self.options = name, options

    @property
    def attribute(self) -> str:
        """The name of the flag's value in the parsed arguments."""
        return self.name.removeprefix("--").replace("-", "_")


class Declaration:
    """Base class of the tasks, which defines how a task is declared.

    ``tasks.every`` finds the subclasses that have a name.

    Attributes:
        name: value of ``--task``.
        template: which of the two templates it implements.
        head: the Transformers Auto class to train. If None, the class depends on the model.
        pipeline: the Transformers pipeline for the trained model, or None.
        roles: roles of its columns, each with its usual names, most likely first.
        flags: its own flags; those of its base classes are added.
        reads: values of other flags (``micro_batch_size``) that not every task uses; inherited like
            ``flags``.
    """

    name: ClassVar[str]
    template: ClassVar[Literal["Finetuner", "PreTrainer"]] = "Finetuner"
    head: ClassVar[str | None] = None
    pipeline: ClassVar[str | None] = None
    roles: ClassVar[Mapping[str, tuple[str, ...]]] = {}
    flags: ClassVar[tuple[Flag, ...]] = ()
    reads: ClassVar[tuple[str, ...]] = ()

    @classmethod
    def check(cls, args: Namespace) -> None:
        """Check that the flags are consistent, before anything is loaded.

        Raises:
            UsageError: two flags are mutually exclusive, or a value is invalid for the task.
        """

    @classmethod
    def all_flags(cls) -> Iterator[Flag]:
        """Yield the flags of the task's base classes, and then the task's own flags."""
        for kind in reversed(cls.__mro__):
            yield from vars(kind).get("flags", ())

    @classmethod
    def all_reads(cls) -> set[str]:
        """Return the names of the values that this task uses but that other tasks may not use."""
        of_classes = {name for kind in cls.__mro__ for name in vars(kind).get("reads", ())}
        return of_classes | {flag.attribute for flag in cls.all_flags()}
