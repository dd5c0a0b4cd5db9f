"""Write docs/records/house.md from measured shapes of the code: house_page.py [--check] [--measure]

With --measure the shape of this tree is stored first. With --check nothing is written; the exit code is 1 if
the page is not up to date.
"""

from __future__ import annotations

import json
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import shape
from marked import finish, inserted

from megatron_npu.base import files

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "records" / "house.md"
RESULT = ROOT / "benchmarks" / "results" / "house" / "shape.json"
BEGIN = "<!-- table: written by scripts/house_page.py -->"
END = "<!-- end of the table -->"


def measured() -> dict[str, Any]:
    """Return the measured shape of this tree, with its commit and the date."""
    command = ["git", "-C", str(ROOT), "rev-parse", "--short=8", "HEAD"]
    commit = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout.strip()
    return {"commit": commit, "date": f"{datetime.now(UTC):%Y-%m-%d}", "shape": shape.table()}


def table(before: dict[str, Any], after: dict[str, Any]) -> str:
    """Return the table rows of both measurements."""
    rows = [f"| {what} | {before['shape'][what]} | {number} |" for what, number in after["shape"].items()]
    heads = (f"{each['date']}, {each['commit']}" for each in (before, after))
    return "\n".join([f"| what | {' | '.join(heads)} |", "|---|---|---|", *rows])


def main() -> int:
    """Write or check the page."""
    record = json.loads(RESULT.read_text(encoding="utf-8"))
    if "--measure" in sys.argv[1:]:
        record["after"] = measured()
        files.write(RESULT, json.dumps(record, indent=1) + "\n")
    page = inserted(PAGE.read_text(encoding="utf-8"), BEGIN, table(record["before"], record["after"]), END)
    return finish({PAGE: page}, check="--check" in sys.argv[1:])


if __name__ == "__main__":
    sys.exit(main())
