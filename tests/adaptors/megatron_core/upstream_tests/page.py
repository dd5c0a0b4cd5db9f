"""Write docs/records/upstream-tests.md from the baselines."""

from __future__ import annotations

import json
from pathlib import Path

from megatron_npu.base import files

from .baseline import FOLDER, Baseline
from .results import EXCLUDED, FAILED, PASSED, SKIPPED

PAGE = Path(__file__).resolve().parents[4] / "docs" / "records" / "upstream-tests.md"
_UNRECORDED = FOLDER / "unrecorded.json"
_MOST = 8  # causes of failures that are listed

_INTRODUCTION = """# Upstream's unit tests as judge

For maintainers, and for reviewers who want to know which of upstream's own tests pass with this package.

Megatron-LM has its own unit tests (`tests/unit_tests`), and so does deepspeedai's Megatron-DeepSpeed. These
tests were written without knowledge of this plug-in, and are run without modification, on devices for which
they were not written. This page is generated from the baselines in
`tests/adaptors/megatron_core/upstream_tests/`, which also have the results of each file:

```bash
python tests/adaptors/megatron_core/run_upstream_tests.py CHECKOUT --device cpu --record
python tests/adaptors/megatron_core/run_upstream_tests.py CHECKOUT --device npu --folder tensor_parallel
python tests/adaptors/megatron_core/run_upstream_tests.py --page
```

A run compares its results with the baseline. It lists the tests that passed when the baseline was recorded
and fail now (`REGRESSION`), and the tests that fail without an explanation and are not in the baseline
(`new failure`); in both cases the exit code is 1. On a machine without NPUs, `npu` is the [simulated
Ascend](../explanation/simulator.md). A test whose packages are not installed does not count, and the run
reports this.

## How they are run

- **Worlds.** Upstream's CI runs every file with 8 ranks on 8 GPUs. This runner starts 8 processes, or a
  single one if eight processes would all do the same. `upstream_tests/worlds.json` lists the exceptions
  with their reasons.
- **A test passes** if it passes on all its ranks.
- **The environment of the tests.** The tests find an accelerator (`torch.cuda.is_available()` is true in
  the test files), and `is_cuda` of tensors has the same value as for Megatron. They find no network.
- **Experimental tests.** A test that upstream marks as experimental is run with `--experimental`, and the
  others without, like in the two sessions of upstream's CI.
- **Memory.** A test that would leave less than a tenth of the machine's memory free does not count.
- **Megatron-DeepSpeed.** For deepspeedai's checkout, all tests in `tests` are run with the extra
  `[deepspeed]`, except its functional tests. bigscience's results are on [another
  page](megatron-deepspeed.md#the-checkouts-own-tests).
- **TransformerEngine** is not installed. A test that fails for this reason is run a second time, with
  `MEGATRON_NPU_TE=local` ([our layers under its
  names](../explanation/without-transformer-engine.md#layers-under-its-names)), and this result counts.

## What counts

A test is *excluded* if it failed for a reason that is unrelated to the plug-in;
`upstream_tests/exclusions.json` contains each rule with its reason. A rule never changes the result of a
test that passes. *Skipped* tests are those that upstream's own marks skip. The quota is passed / (passed +
failed). A file that cannot be imported counts as one test. Files that are not recorded were not run to
their end, and their results are unknown.

Five tests in core_v0.18.2 never end on a CPU, and are excluded. Two in `test_multimodule_schedules.py` hang
while gloo connects a group, because torch gives two groups the same name. Three in `TestMimoCheckpoint`
hang because TransformerEngine's layers are mocks.
"""


def write() -> None:
    """Replace the page."""
    files.write(PAGE, text())


def text() -> str:
    """Return the page for all baselines that are there."""
    found = _recorded()
    rows = [
        f"| {one.tree} | {one.device} | {len(one.files)} of {one.there} | {_cells(one.totals())} |"
        for one in found
    ]
    head = ["| tree | device | files | passed | failed | excluded | skipped | quota |", "|---" * 8 + "|"]
    parts = [_INTRODUCTION, "## Totals\n", "\n".join(head + rows) + "\n", *map(_section, found)]
    return "\n".join(parts)


def _recorded() -> list[Baseline]:
    """Return what is recorded of each tree on each device, both passes in one."""
    names = [path.stem.split("-") for path in sorted(FOLDER.glob("*-*.json"))]
    pairs = [(name[0], name[1]) for name in names if len(name) == 2]
    return [Baseline.load(*pair).with_second_pass(Baseline.load(*pair, "local")) for pair in pairs]


def sentence(totals: dict[str, int]) -> str:
    """Return the totals in one line."""
    counts = ", ".join(f"{number} {outcome}" for outcome, number in totals.items())
    return f"{counts}; {_quota(totals)} of those that count pass"


def _quota(totals: dict[str, int]) -> str:
    judged = totals[PASSED] + totals[FAILED]
    return f"{100 * totals[PASSED] / judged:.1f} %" if judged else "-"


def _cells(totals: dict[str, int]) -> str:
    numbers = [totals[outcome] for outcome in (PASSED, FAILED, EXCLUDED, SKIPPED)]
    return " | ".join([*map(str, numbers), _quota(totals)])


def _section(one: Baseline) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in one.versions.items())
    minutes = sum(entry["seconds"] for entry in one.files.values()) / 60
    lines = [
        f"## {one.tree} on {one.device}\n",
        f"Recorded up to {one.recorded}; {versions}; {len(one.files)} of {one.there} files, in {minutes:.0f} "
        "minutes.\n",
    ]
    for title, outcome in (("Excluded", EXCLUDED), ("Remaining failures", FAILED)):
        reasons = one.reasons(outcome)
        if not reasons:
            continue
        lines += ["", f"{title}:\n", "| tests | reason |", "|---|---|"]
        lines += [f"| {number} | {_cell(reason)} |" for reason, number in list(reasons.items())[:_MOST]]
        if len(reasons) > _MOST:
            rest = sum(list(reasons.values())[_MOST:])
            lines.append(f"| {rest} | {len(reasons) - _MOST} other reasons: see the baseline |")
    if left := unrecorded(one):
        lines += ["", "Not recorded:\n", "| file in `tests/unit_tests` | reason |", "|---|---|"]
        names = {file.removeprefix("tests/unit_tests/"): reason for file, reason in left.items()}
        lines += [f"| {_cell(name)} | {reason} |" for name, reason in names.items()]
    return "\n".join(lines) + "\n"


def unrecorded(one: Baseline) -> dict[str, str]:
    """Return why files of a tree are not recorded on its device, by path; empty if nobody has noted it."""
    noted: dict[str, dict[str, str]] = json.loads(_UNRECORDED.read_text(encoding="utf-8"))
    return noted.get(f"{one.tree} on {one.device}", {})


def _cell(reason: str) -> str:
    return "`" + reason.replace("|", "\\|").replace("`", "'") + "`"
