"""Write the error of a rank to the file from which torchrun reports the root cause.

torchrun names one file per rank in ``TORCHELASTIC_ERROR_FILE``. torchrun prints the content of the file,
normally written by torch's ``record`` decorator, under "Root Cause". Without the file, torchrun prints a link
to its documentation, forty lines below the rank's own message. A script whose main function has that
decorator (bigscience's) has already written the same error with its traceback, fifty lines for each rank; the
line replaces it.
"""

from __future__ import annotations

import contextlib
import json
import os
import time

_FILE = "TORCHELASTIC_ERROR_FILE"


def tell(line: str) -> None:
    """Write the error line to torchrun's file if torchrun started this process.

    A file that already contains another error is not changed.
    """
    file = os.environ.get(_FILE)
    if not file or (os.path.exists(file) and not _is_of(line, file)):
        return
    content = {"message": {"message": line, "extraInfo": {"timestamp": str(int(time.time()))}}}
    with contextlib.suppress(OSError), open(file, "w", encoding="utf-8") as stream:  # it was printed anyway
        json.dump(content, stream)


def _is_of(line: str, file: str) -> bool:
    """Return True if torchrun's decorator has already written this error, in the form ``Kind: message``."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        with open(file, encoding="utf-8") as stream:
            told = json.load(stream)["message"]["message"].partition(": ")[2]
        return bool(told) and told in line
    return False
