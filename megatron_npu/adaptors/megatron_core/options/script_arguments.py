"""Access the arguments of the running stock script, if there is one."""

from __future__ import annotations

import sys
from argparse import Namespace


def script_arguments() -> Namespace | None:
    """Return the arguments of the running script.

    Return None outside of scripts and before the arguments are parsed.
    """
    return getattr(sys.modules.get("megatron.training.global_vars"), "_GLOBAL_ARGS", None)
