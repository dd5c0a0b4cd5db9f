"""Write docs/records/upstream-tests.md from the baselines."""

from __future__ import annotations

from pathlib import Path

from megatron_npu.base import files

from . import trees
from .baseline import FOLDER, Baseline
from .results import EXCLUDED, FAILED, PASSED, SKIPPED

PAGE = Path(__file__).resolve().parents[4] / "docs" / "records" / "upstream-tests.md"
_MOST = 15  # causes of failures that are listed

_INTRODUCTION = """# Upstream's unit tests as judge

For maintainers, and for reviewers who want to know which of upstream's own tests pass with this package.

Megatron-LM has its own unit tests (`tests/unit_tests`), and so does deepspeedai's Megatron-DeepSpeed. These
tests were written without knowledge of this plug-in, so they are an independent check: the same files are
run without modification, on devices for which they were not written. This page is generated from the
baselines in `tests/adaptors/megatron_core/upstream_tests/` by

```bash
python tests/adaptors/megatron_core/run_upstream_tests.py --page
```

A run compares its results with the baseline. It lists the tests that passed when the baseline was recorded
and fail now (`REGRESSION`), and the tests that fail without an explanation and are not in the baseline
(`new failure`); in both cases the exit code is 1. `--record` writes a new baseline, and `--resume --scratch
FOLDER` continues an interrupted run. Versions on the [versions
page](../reference/versions.md#megatron-core) that are not recorded here can also be run, but their failures
have not been examined. The checkouts come from `scripts/get_megatron.sh`; nothing is written into them.

```bash
python tests/adaptors/megatron_core/run_upstream_tests.py CHECKOUT --device cpu --record
python tests/adaptors/megatron_core/run_upstream_tests.py CHECKOUT --device npu --folder tensor_parallel
```

On a machine without NPUs, `npu` is the [simulated Ascend](../explanation/simulator.md). The baselines were
recorded with the packages that upstream's tests import: pytest-mock, pytest-asyncio, mock, wrapt, msgpack,
nltk, nvtx, requests, httpx, pyzmq, flask, fastapi and nvidia-resiliency-ext. The baseline of core_v0.19.0
was recorded with nvidia-resiliency-ext 0.6.0, the version that it pins, and with emerging-optimizers 0.3.0,
omegaconf and aiohttp. core_v0.18.2, which requires nvidia-resiliency-ext 0.6.0 too and cannot be imported
with 0.4.1, was recorded from file 212 on without this package, and with emerging-optimizers 0.3.0, omegaconf
and aiohttp. A test whose packages are not installed does not count; the run reports this.

## How they are run

- **Worlds.** Upstream's CI runs every file with 8 ranks on 8 GPUs. This runner starts 8 processes, each
  with the environment that torchrun would set. A file is run in a single process if eight processes would
  all do the same, that is, if the file does not use torch.distributed or Megatron's groups, or uses only
  layouts of one rank. `upstream_tests/worlds.json` lists the exceptions with their reasons. Several files
  that need one process are run at the same time (`--jobs`).
- **A test passes** if it passes on all its ranks. If it fails only on some ranks, or hangs, all processes are
  replaced, and the new processes continue with the next test.
- **The environment of the tests.** The tests find an accelerator (`torch.cuda.is_available()` is true in
  the test files, because many tests skip themselves otherwise), and `is_cuda` of tensors has the same value
  as for Megatron. They find no network: files that they would download are missing.
- **Experimental tests.** A test that upstream marks as experimental is run with `--experimental`, and the
  others without, like in the two sessions of upstream's CI.
- **Memory.** If the processes of a test would leave less than a tenth of the machine's memory free, they are
  stopped, and the test does not count.
- **Groups** of a model-parallel layout that a test has destroyed are released, from megatron-core 0.9 on;
  upstream keeps them until the end.
- **Megatron-DeepSpeed.** For deepspeedai's checkout, all tests in `tests` are run with the extra
  `[deepspeed]`, except its functional tests, which evaluate the logs of a cluster. Its conftest queries the
  rank before a process group exists, which would make every test fail; it receives 1. bigscience's tests
  start their ranks themselves; their results are on [the page of that
  checkout](megatron-deepspeed.md#the-checkouts-own-tests).

- **TransformerEngine** is not installed. A test that fails for this reason is run a second time, with [our
  layers under its names](../explanation/without-transformer-engine.md#layers-under-its-names), and the
  result of the second run counts:

  ```bash
  MEGATRON_NPU_TE=local python tests/adaptors/megatron_core/run_upstream_tests.py CHECKOUT --record
  ```

  The second pass takes its list of tests from the baseline of the first pass, and has its own baseline
  (`…-te-local.json`).

## What counts

A test is *excluded* if it failed for a reason that is unrelated to the plug-in;
`upstream_tests/exclusions.json` contains each rule with its reason. A rule never changes the result of a
test that passes, and a test that passed before and fails now is a regression regardless of the rules. A few
tests are not started at all: tests that fill the device's memory, if the device's memory is the machine's
memory, and five tests that [never end](#tests-that-never-end). *Skipped* tests are those that upstream's
own marks skip. The quota is passed / (passed + failed). A file that cannot be imported counts as one test.

A file that is not recorded was not run to its end when the baseline was recorded; the tables give the
number of recorded files. The results of tests that are not recorded are unknown.

## Tests that never end

In core_v0.18.2, twelve tests in two files once had no result on a CPU. Five of them hang; the other seven
were not run, because the runner gives up a file in which three tests hang. The rules now exclude the five
tests.

- `test_single_encoder_8gpu` and `test_dual_encoder_8gpu` in `test_multimodule_schedules.py` hang while gloo
  connects a group, because ranks of different groups wait for each other. Only some ranks call `new_group`;
  torch numbers groups by these calls, so two groups get the same name. NCCL connects a group only when it
  is used for the first time.
- The three tests in `TestMimoCheckpoint` hang with some ranks in the barrier of `_cleanup_tmpdir` and the
  others in `optimizer.step()`. TransformerEngine's layers are mocks here: the ranks that build the
  projection raise `StopIteration` at the second model and proceed to the barrier.
- The seven tests in `TestOptimizerCheckpointHelpers` in `test_mimo_checkpoint.py` pass; they use no
  collective.
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
    lines += ["| folder | files | passed | failed | excluded | skipped | quota |", "|---" * 7 + "|"]
    for folder, recorded in _folders(one).items():
        covered = f"{len(recorded)} of {one.folders[folder]}" if one.folders else f"{len(recorded)}"
        lines.append(f"| {folder} | {covered} | {_cells(one.totals(recorded))} |")
    for title, outcome in (("Excluded", EXCLUDED), ("Remaining failures", FAILED)):
        reasons = one.reasons(outcome)
        if not reasons:
            continue
        lines += ["", f"{title}:\n", "| tests | reason |", "|---|---|"]
        lines += [f"| {number} | {_cell(reason)} |" for reason, number in list(reasons.items())[:_MOST]]
        if len(reasons) > _MOST:
            rest = sum(list(reasons.values())[_MOST:])
            lines.append(f"| {rest} | {len(reasons) - _MOST} other reasons: see the baseline |")
    return "\n".join(lines) + "\n"


def _folders(one: Baseline) -> dict[str, list[str]]:
    folders: dict[str, list[str]] = {}
    for file in one.files:
        folders.setdefault(trees.folder_of(file), []).append(file)
    return folders


def _cell(reason: str) -> str:
    return "`" + reason.replace("|", "\\|").replace("`", "'") + "`"
