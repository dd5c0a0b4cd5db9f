"""Define the attention flags that this package adds to Megatron, and a class that stores their values.

A flag is declared once, as a field of ``AttentionFlags``, and then exists in every command and script. The
object is passed from the command line through the layers to each call of ``ops.attention``, where a device's
plan reads it as ``spec.flags`` (docs/contributing/adding-a-flag.md).
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass, field, fields, replace
from typing import Any

from megatron_npu.base.arg_parser import whole


def _flag(*spellings: str, default: Any = None, **options: Any) -> Any:
    """Return a dataclass field that also declares a command-line flag.

    Args:
        spellings: the flag's spellings, the first of which is used in error messages.
        default: the default of the field and of the flag.
        options: options for ``argparse.ArgumentParser.add_argument``.
    """
    return field(default=default, metadata={"spellings": spellings, "options": options})


@dataclass(frozen=True)
class AttentionFlags:
    """The values of the attention flags. ``AttentionFlags()`` has the defaults.

    Attributes:
        pre_tokens: query i attends to key j only if j >= i - pre_tokens. None means no limit.
        next_tokens: query i attends to key j only if j <= i + next_tokens. None means no limit.
        shape_order: the layout passed to the fused attention, ``SBH`` or ``BSH``.
    """

    # both spellings: Megatron-LM's users write ``tockens``
    pre_tokens: int | None = _flag(
        "--pre-tockens",
        "--pre-tokens",
        type=whole,
        metavar="P",
        help="sliding window: query i attends to keys from i - P onward (default: all keys)",
    )
    next_tokens: int | None = _flag(
        "--next-tockens",
        "--next-tokens",
        type=whole,
        metavar="N",
        help="sliding window: query i attends to keys up to i + N, within the causal mask "
        "(default: all keys)",
    )
    shape_order: str = _flag(
        "--shape-order",
        choices=["SBH", "BSH"],
        default="SBH",
        help="tensor layout for the fused attention kernel; does not change the results",
    )

    @property
    def window(self) -> tuple[int | None, int | None]:
        """The attention window: how many keys before and after its own position a query attends to.

        None means no limit.
        """
        return self.pre_tokens, self.next_tokens

    def with_window(self, before: int | None, after: int | None) -> AttentionFlags:
        """Return a copy of the flags with another window."""
        return replace(self, pre_tokens=before, next_tokens=after)

    def without_window(self) -> AttentionFlags:
        """Return a copy of the flags without a window, for cross-attention."""
        return self.with_window(None, None)

    @classmethod
    def names(cls) -> tuple[str, ...]:
        """Return the names that the flags have in a namespace of parsed arguments."""
        return tuple(each.name for each in fields(cls))

    @classmethod
    def spellings(cls) -> tuple[str, ...]:
        """Return the primary name of each flag on the command line."""
        return tuple(each.metadata["spellings"][0] for each in fields(cls))

    @classmethod
    def from_args(cls, args: argparse.Namespace) -> AttentionFlags:
        """Read the values of the flags from a namespace of parsed arguments.

        A flag that is missing in the namespace keeps its default.
        """
        return cls(**{name: getattr(args, name) for name in cls.names() if hasattr(args, name)})


DEFAULTS = AttentionFlags()


def add_attention_flags(parser: argparse.ArgumentParser) -> None:
    """Add the attention flags to a parser as a separate group."""
    group = parser.add_argument_group(title="fused attention")
    for each in fields(AttentionFlags):
        spellings, options = each.metadata["spellings"], each.metadata["options"]
        group.add_argument(*spellings, dest=each.name, default=each.default, **options)
