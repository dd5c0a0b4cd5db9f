"""``megatron.training.global_vars``: the arguments of the stock script that runs, if one does."""

from __future__ import annotations

import sys
from argparse import Namespace


def script_arguments() -> Namespace | None:
    """Return them; None where megatron-core is a library, or before the script has parsed them."""
    return getattr(sys.modules.get("megatron.training.global_vars"), "_GLOBAL_ARGS", None)
