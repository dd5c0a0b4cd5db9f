"""The flags that the plug-in adds to the parsers of both Megatrons."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

from megatron_npu import attention_flags


def add_attention_flags(original: Callable[..., Any], parser: argparse.ArgumentParser) -> Any:
    """Add ``--pre-tockens``, ``--next-tockens`` and ``--shape-order`` after upstream's own flags."""
    parser = original(parser)
    attention_flags.add_attention_flags(parser)
    return parser
