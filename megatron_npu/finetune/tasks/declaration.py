"""Declaration of a task, from which its flags, checks, help texts and model card are derived.

A task's file is imported for a help text too, and by the process that starts the ranks: it imports
Transformers and ``datasets`` inside the functions that need them.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar, Literal


class Flag:
    """A flag that a task declares.

    Args:
        name: as it is typed, ``--doc-stride``.
        options: of argparse's ``add_argument``.
    """

    def __init__(self, name: str, **options: Any) -> None:
        self.name, self.options = name, options

    @property
    def attribute(self) -> str:
        """The name of its value among the arguments."""
        return self.name.removeprefix("--").replace("-", "_")


class Declaration:
    """A task. Classes that name one are found by ``tasks.every``; what none of them names is inherited.

    Attributes:
        name: as ``--task`` has it.
        template: which of the two that a user fills in too, it fills in.
        head: the Auto class of Transformers that it trains; None: that depends on the model.
        pipeline: of Transformers, that runs the trained model; None: there is none.
        roles: of its columns, each with the names that it usually has, the likeliest first.
        flags: its own; those of the classes that it inherits from are added.
        reads: flags that are declared elsewhere (``micro_batch_size``) and that not every task reads; added
            as ``flags``.
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
        """Compare the flags with each other, before anything is loaded.

        Raises:
            UsageError: two that do not go together, or a value that the task cannot have.
        """

    @classmethod
    def all_flags(cls) -> Iterator[Flag]:
        """Yield the flags of the classes that it inherits from, then its own."""
        for kind in reversed(cls.__mro__):
            yield from vars(kind).get("flags", ())

    @classmethod
    def all_reads(cls) -> set[str]:
        """Return the names of the values that it reads and not every task does."""
        of_classes = {name for kind in cls.__mro__ for name in vars(kind).get("reads", ())}
        return of_classes | {flag.attribute for flag in cls.all_flags()}
