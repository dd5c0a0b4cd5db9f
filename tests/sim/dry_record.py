"""Writes docs/records/plan.md from what ``tests.sim.dry_grid`` and ``tests.sim.dry_mistakes`` have written.

python -m tests.sim.dry_record
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from benchmarks import plan_devices
from megatron_npu.base import files
from tests.sim.dry_layouts import LAYOUTS

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "records" / "plan.md"
RESULTS = ROOT / "benchmarks" / "results" / "plan"
_HEAD = """# Full simulated runs against dry runs

For reviewers who want to know in which layouts a dry run of `megatron-npu plan` matches a full simulated
run.

```bash
make plan-grid     # or: python -m tests.sim.dry_grid --layout gpt-tp2 --output FILE
```

This command trains small models for two iterations in full on simulated NPUs, and runs each kind of their
ranks alone and dry (nothing above 16 KiB is computed). "Equal" means that torch_npu's allocator reports the
same peak and the same reserved memory, to the byte, for every rank and its representative. If a
representative has other memory, the rank itself is also run dry: in `experts-ep2-uneven`, the experts of
rank 0 get 1.5 times and those of rank 1 half an even share. The commit is the last one that changed what a
comparison depends on. In `experts-free`, no capacity is padded, and in both runs each expert gets an even
share of the tokens. All bytes are in `benchmarks/results/plan/grid.json`.

"""


def lines(found: dict[str, dict[str, Any]], repeated: dict[str, dict[str, Any]] | None = None) -> list[str]:
    """Return the page below its head.

    Args:
        found: the rows of the table.
        repeated: the rows of layouts that were compared again later.
    """
    equal = sum(all(rank.get("equal") for rank in row["ranks"]) for row in found.values())
    said = [
        f"{_when(found)}, torch 2.13: {equal} of {len(found)} layouts are equal on all ranks.",
        "",
        "Equal layouts, with the peak of each kind of rank in MiB:",
        "",
    ]
    same = {
        name: row["ranks"] for name, row in found.items() if all(_is_equal(rank) for rank in row["ranks"])
    }
    trees: dict[str, list[str]] = {}
    for name, ranks in same.items():
        tree, _, layout = name.rpartition("/")
        trees.setdefault(tree, []).append(f"`{layout}` {_peaks(ranks)}")
    equal_trees: dict[str, list[str]] = {}
    for tree, layouts in trees.items():
        equal_trees.setdefault(", ".join(layouts), []).append(_title(tree))
    said += [f"- {'; '.join(titles)}: {layouts}" for layouts, titles in equal_trees.items()]
    others = [_line(name, row["ranks"]) for name, row in found.items() if name not in same]
    if others:
        said += [
            "",
            "| layout | ranks | peak, bytes | reserved, bytes | dry |",
            "|---|---|---|---|---|",
            *others,
        ]
    if repeated:
        said[1:1] = again(found, repeated)
    left = [f"`{name}`" for name in LAYOUTS if name not in found]
    return [*said, "", f"Not run: {', '.join(left)}."] if left else said


def again(found: dict[str, dict[str, Any]], repeated: dict[str, dict[str, Any]]) -> list[str]:
    """Return what a later comparison of some layouts found, by commit."""
    said = []
    for day, commit in dict.fromkeys((row["day"], row["commit"]) for row in repeated.values()):
        own = {name: row["ranks"] for name, row in repeated.items() if row["commit"] == commit}
        equal = [name for name, ranks in own.items() if all(rank.get("equal") for rank in ranks)]
        same = [name for name in equal if _bytes(own[name]) == _bytes(found[name]["ranks"])]
        said.append(
            f"Run again: {day}, commit {commit}: {len(equal)} of {len(own)} layouts are equal on all ranks, "
            f"{len(same)} of them with the bytes of the table."
        )
        others = ", ".join(f"`{name}`" for name in own if name not in same)
        said += [f"Not equal, or with other bytes: {others}."] if others else []
    return ["", *said]


def _bytes(ranks: list[dict[str, Any]]) -> list[tuple[int, int]]:
    return [(rank["full"]["peak"], rank["full"]["reserved"]) for rank in ranks]


def _when(found: dict[str, dict[str, Any]]) -> str:
    """Return the days and the commits of the rows."""
    commits: dict[str, list[str]] = {}
    for day, commit in dict.fromkeys((row["day"], row["commit"]) for row in found.values()):
        commits.setdefault(day, []).append(commit)
    return "; ".join(
        f"{day}, commit{'s' if len(own) > 1 else ''} {', '.join(own)}" for day, own in commits.items()
    )


def mistakes(found: dict[str, dict[str, Any]]) -> list[str]:
    """Return the part of the page about mistakes."""
    right = sum(row["right"] for row in found.values())
    said = [
        "## Mistakes",
        "",
        "`python -m tests.sim.dry_mistakes` plans jobs of two devices with one mistake each (`right`: none).",
        "The table shows the first sentence of the last line of each job of the built-in trainer. Other",
        "programs ran on the machine, so the seconds are upper bounds.",
        f"{_when(found)}: {right} of {len(found)} as expected.",
        "",
        "| job | exit code | seconds | said |",
        "|---|---|---|---|",
    ]
    for name, row in found.items():
        if name.startswith("driver/") or not row["right"]:
            last = row["said"][-1].replace("|", "/") if row["said"] else ""
            last = last.removeprefix("megatron-npu pretrain: error: ").partition(". ")[0][:160]
            wrong = "" if row["right"] else " (not as expected)"
            said.append(f"| {name} | {row['code']}{wrong} | {row['seconds']} | {last} |")
    others: dict[str, list[str]] = {}
    for name, row in found.items():
        tree, _, job = name.rpartition("/")
        if row["right"] and tree != "driver":
            others.setdefault(f"`{job}`", []).append(tree)
    told = "; ".join(f"{job} ({', '.join(trees)})" for job, trees in sorted(others.items()))
    said += ["", f"Also as expected: {told}."] if told else []
    return said


def commands(found: dict[str, dict[str, Any]]) -> list[str]:
    """Return the part of the page about jobs that were planned one at a time."""
    said = [
        "## Single jobs",
        "",
        f"Single jobs, planned with `megatron-npu plan` and read. {_when(found)}.",
        "Other programs ran on the machine, so the seconds are upper bounds.",
        "",
        "| job | exit code | seconds | seen |",
        "|---|---|---|---|",
    ]
    return said + [
        f"| {name} | {row['code']} | {row['seconds']} | {row['seen'].replace('|', '/')} |"
        for name, row in found.items()
    ]


def _is_equal(rank: dict[str, Any]) -> bool:
    """Return whether the dry run of the rank's representative has its memory."""
    return bool(rank.get("equal")) and "representative" not in rank


def _peaks(ranks: list[dict[str, Any]]) -> str:
    return "/".join(dict.fromkeys(f"{rank['full']['peak'] / 2**20:.1f}" for rank in ranks))


def _title(tree: str) -> str:
    """Return a description of the program that trains the layouts of a tree."""
    if tree.startswith("megatron_core-") or not tree:
        return f"built-in trainer, megatron-core {tree.removeprefix('megatron_core-') or '0.16.1'}"
    return "`megatron-npu train`" if tree == "train" else f"stock `pretrain_gpt.py` of {tree}"


def _line(name: str, rows: list[dict[str, Any]]) -> str:
    failed = next((row["failed"] for row in rows if "failed" in row), None)
    if failed is not None:
        last = str(failed).strip().splitlines()[-1].replace("|", "/")
        return f"| {name} | {len(rows)} | | | did not run: {last[:120]} |"
    columns = [" and ".join(_numbers(row["full"][key] for row in rows)) for key in ("peak", "reserved")]
    wrong = [
        f"rank {row['rank']} has {row['full']['peak'] - row['dry']['peak']:+,} peak and "
        f"{row['full']['reserved'] - row['dry']['reserved']:+,} reserved"
        for row in rows
        if not row["equal"]
    ]
    verdict = f"differs: {'; '.join(wrong)}" if wrong else "equal, all ranks"
    if others := [row["rank"] for row in rows if "representative" in row and row["equal"]]:
        verdict += f"; {others} in a dry run of their own"
    return f"| {name} | {len(rows)} | {columns[0]} | {columns[1]} | {verdict} |"


def _numbers(values: Any) -> list[str]:
    return [f"{value:,}" for value in dict.fromkeys(values)]


def main() -> None:
    found = json.loads((RESULTS / "grid.json").read_text())
    path = RESULTS / "grid_again.json"
    repeated = json.loads(path.read_text()) if path.exists() else {}
    repeated = {name: repeated[name] for name in LAYOUTS if name in repeated}
    said = lines({name: found[name] for name in LAYOUTS if name in found}, repeated)
    path = RESULTS / "mistakes.json"
    if path.exists():
        said += ["", *mistakes(json.loads(path.read_text()))]
    path = RESULTS / "devices.json"
    if path.exists():
        said += ["", *plan_devices.lines(json.loads(path.read_text()))]
    path = RESULTS / "commands.json"
    if path.exists():
        said += ["", *commands(json.loads(path.read_text()))]
    files.write(PAGE, _HEAD + "\n".join(said) + "\n")


if __name__ == "__main__":
    main()
