"""The flags that the plug-in adds to Megatron's own, and their values."""

from __future__ import annotations

import argparse
from dataclasses import dataclass

from megatron_npu.arg_parser import whole


@dataclass(frozen=True)
class AttentionFlags:
    """The values of the flags that ``add_attention_flags`` declares; ``AttentionFlags()`` are the defaults.

    Attributes:
        pre_tokens: ``--pre-tockens``: query i sees key j only if j >= i - pre_tokens. None: no limit.
        next_tokens: ``--next-tockens``: query i sees key j only if j <= i + next_tokens. None: no limit.
        shape_order: ``--shape-order``: layout handed to the fused attention, ``SBH`` or ``BSH``.
    """

    pre_tokens: int | None = None
    next_tokens: int | None = None
    shape_order: str = "SBH"

    @property
    def window(self) -> tuple[int | None, int | None]:
        """How many keys before and after its own position a query sees; None is all of them."""
        return self.pre_tokens, self.next_tokens

    @classmethod
    def from_args(cls, args: argparse.Namespace) -> AttentionFlags:
        """Return the values in a namespace of parsed flags."""
        return cls(args.pre_tokens, args.next_tokens, args.shape_order)


def add_attention_flags(parser: argparse.ArgumentParser) -> None:
    """Declare the extra flags: both spellings, Megatron-LM's users write ``tockens``."""
    add = parser.add_argument_group(title="fused attention").add_argument
    add(
        "--pre-tockens",
        "--pre-tokens",
        type=whole,
        dest="pre_tokens",
        metavar="P",
        help="query i sees keys from i - P on (default: all)",
    )
    add(
        "--next-tockens",
        "--next-tokens",
        type=whole,
        dest="next_tokens",
        metavar="N",
        help="query i sees keys up to i + N, the causal mask still holding (default: all)",
    )
    add(
        "--shape-order",
        choices=["SBH", "BSH"],
        default="SBH",
        help="layout given to the fused attention; the results are the same",
    )
