"""The line that a rank ends with, in the file that torchrun shows as its root cause.

torchrun names for each rank a file in ``TORCHELASTIC_ERROR_FILE``; what torch's ``record`` decorator would
write there, an exception of the main function, it prints below "Root Cause". Without one it prints a hint to
its documentation, forty lines below what the rank has said.
"""

from __future__ import annotations

import contextlib
import json
import os
import time

_FILE = "TORCHELASTIC_ERROR_FILE"


def tell(line: str) -> None:
    """Leave the line for torchrun, where it has started this process; what is there already stays."""
    file = os.environ.get(_FILE)
    if not file:
        return
    content = {"message": {"message": line, "extraInfo": {"timestamp": str(int(time.time()))}}}
    with contextlib.suppress(OSError), open(file, "x", encoding="utf-8") as stream:  # it was printed anyway
        json.dump(content, stream)
