"""Implement ``--skip-bad-rows N``, which skips malformed rows, counts them, and lists them in a file."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from megatron_npu.base import files
from megatron_npu.base.arg_parser import whole
from megatron_npu.base.errors import UsageError
from megatron_npu.data.preprocessing.jsonl import BadRow

FLAG = "--skip-bad-rows"


def add_flag(add: Callable[..., Any]) -> None:
    """Add the flag ``--skip-bad-rows`` to the parser."""
    add(
        FLAG,
        type=whole,
        default=0,
        metavar="N",
        help="skip up to N malformed rows and list them in a file; with 0, stop at the first one",
    )


class Skipped:
    """The rows that have been skipped so far.

    Args:
        prefix: the prefix of the dataset. The list of skipped rows is written next to the dataset, to a file
            whose name ends in ``.skipped.jsonl``.
        most: the maximum number of rows that may be skipped.
    """

    def __init__(self, prefix: str, most: int) -> None:
        self.path, self._most = Path(f"{prefix}.skipped.jsonl"), most
        self._rows: list[BadRow] = []

    def add(self, rows: Sequence[BadRow]) -> None:
        """Add the skipped rows of a batch to the record.

        Raises:
            UsageError: the maximum number of skipped rows is exceeded.
        """
        self._rows += rows
        if len(self._rows) > self._most:
            last = self._rows[self._most]
            raise UsageError(
                f"{last.file}:{last.line}: {last.why}; this is malformed row number {self._most + 1}, but "
                f"{FLAG} allows at most {self._most}. Correct the files, or pass a larger number; nothing "
                "was written."
            )

    def publish(self) -> None:
        """Write the list of skipped rows to a file, and log it.

        If no row was skipped, remove an earlier list.
        """
        if not self._rows:
            self.path.unlink(missing_ok=True)
            return
        files.write(self.path, "".join(json.dumps(asdict(row)) + "\n" for row in self._rows))
        print(
            f"megatron-npu preprocess: skipped {len(self._rows)} malformed rows: {self.path}", file=sys.stderr
        )
