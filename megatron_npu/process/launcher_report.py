"""Write a rank's error line to the file that torchrun shows as the root cause.

torchrun names a file per rank in ``TORCHELASTIC_ERROR_FILE``. It prints its content, normally written by
torch's ``record`` decorator, under "Root Cause". Without it, torchrun prints a link to its documentation,
forty lines below the rank's own message.
"""

from __future__ import annotations

import contextlib
import json
import os
import time

_FILE = "TORCHELASTIC_ERROR_FILE"


def tell(line: str) -> None:
    """Write the line for torchrun if it started this process; an existing file is kept."""
    file = os.environ.get(_FILE)
    if not file:
        return
    content = {"message": {"message": line, "extraInfo": {"timestamp": str(int(time.time()))}}}
    with contextlib.suppress(OSError), open(file, "x", encoding="utf-8") as stream:  # it was printed anyway
        json.dump(content, stream)
