"""Writes docs/records/plan.md from what ``tests.sim.dry_grid --output`` has written.

    python -m tests.sim.dry_record COMMIT FILE [FILE ...]

COMMIT is the one that was run; of a layout in several files the last one counts.
"""

from __future__ import annotations

import datetime
import json
import sys
from pathlib import Path
from typing import Any

from megatron_npu.base import files
from tests.sim.dry_layouts import LAYOUTS

PAGE = Path(__file__).resolve().parents[2] / "docs" / "records" / "plan.md"
_HEAD = """# Full simulated runs against dry runs

For reviewers: in which layouts a dry run of `megatron-npu plan` has the memory of a full simulated run.

```bash
make plan-grid                            # or: python -m tests.sim.dry_grid --layout gpt-tp2 core_v0.16.1/gpt
```

trains small models for two iterations in full on simulated NPUs, and each kind of their ranks alone and dry
(nothing above 16 KiB computed). "Equal" means that torch_npu's allocator has told the same peak and the same
reserve, to the byte, for every rank and the one that stands for it. Names without a `/` are of the driver
(megatron-core 0.16.1), the others of the stock pretrain_gpt.py of that tree.

"""


def lines(found: dict[str, list[dict[str, Any]]], commit: str, day: str) -> list[str]:
    """Return the page below its head."""
    equal = sum(all(row.get("equal") for row in rows) for rows in found.values())
    said = [
        f"{day}, commit {commit}, torch 2.13: {equal} of {len(found)} layouts are equal on all ranks.",
        "",
        "| layout | ranks | peak, bytes | reserved, bytes | dry |",
        "|---|---|---|---|---|",
    ]
    said += [_line(name, rows) for name, rows in found.items()]
    left = [f"`{name}`" for name in LAYOUTS if name not in found]
    return [*said, "", f"Not run on that day: {', '.join(left)}."] if left else said


def _line(name: str, rows: list[dict[str, Any]]) -> str:
    failed = next((row["failed"] for row in rows if "failed" in row), None)
    if failed is not None:
        last = str(failed).strip().splitlines()[-1].replace("|", "/")
        return f"| {name} | {len(rows)} | | | did not run: {last[:120]} |"
    columns = [" and ".join(_numbers(row["full"][key] for row in rows)) for key in ("peak", "reserved")]
    wrong = [row["rank"] for row in rows if not row["equal"]]
    verdict = f"differs on ranks {wrong}" if wrong else "equal, all ranks"
    return f"| {name} | {len(rows)} | {columns[0]} | {columns[1]} | {verdict} |"


def _numbers(values: Any) -> list[str]:
    return [f"{value:,}" for value in dict.fromkeys(values)]


def main(commit: str, *paths: str) -> None:
    found: dict[str, list[dict[str, Any]]] = {}
    for path in paths:
        found |= json.loads(Path(path).read_text())
    known = {name: found[name] for name in LAYOUTS if name in found}
    day = datetime.datetime.now(datetime.timezone.utc).date().isoformat()
    files.write(PAGE, _HEAD + "\n".join(lines(known, commit, day)) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
