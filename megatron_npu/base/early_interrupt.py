"""Report Ctrl-C in one line while a command of this package is imported, before it can handle it itself."""

from __future__ import annotations

import os
import sys
from types import TracebackType

_PROGRAMS = ("megatron-npu", "rapidformer")
_INTERRUPTED = 130


def arm() -> None:
    """Install an exception hook for KeyboardInterrupt if this process was started as a command."""
    program = sys.argv[0] if getattr(sys, "argv", None) else ""  # -m: its module has not been found yet
    is_module = program == "-m" and "megatron_npu" in sys.orig_argv
    if not is_module and os.path.basename(program) not in _PROGRAMS:
        return
    former = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if not issubclass(kind, KeyboardInterrupt):
            former(kind, error, trace)
            return
        if os.environ.get("RANK", "0") == "0":
            print("megatron-npu: interrupted", file=sys.stderr, flush=True)
        raise SystemExit(_INTERRUPTED)

    sys.excepthook = hook
