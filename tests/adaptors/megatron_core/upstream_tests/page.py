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

Megatron-LM has unit tests of its own (`tests/unit_tests`), and so has deepspeedai's Megatron-DeepSpeed. They
know nothing of this plug-in, so they judge it: the same files, unmodified, on a device that they were not
written for. This page is generated from the
baselines in `tests/adaptors/megatron_core/upstream_tests/` by

```bash
python tests/adaptors/megatron_core/run_upstream_tests.py --page
```

A run compares with the baseline and names the tests that passed when it was recorded and do not now
(`REGRESSION`), and those that fail unexplained and are not recorded (`new failure`); either makes the exit
status 1. `--record` writes a new baseline, `--resume --scratch FOLDER` goes on where a run ended. Other
versions of the [versions page](../how-to/megatron-core.md) than those recorded here can be tried; nobody has
judged their failures. Checkouts come from `scripts/get_megatron.sh`; nothing is written into them.

```bash
python tests/adaptors/megatron_core/run_upstream_tests.py CHECKOUT --device cpu --record
python tests/adaptors/megatron_core/run_upstream_tests.py CHECKOUT --device npu --folder tensor_parallel
```

`npu` is the [simulated Ascend](../explanation/simulator.md) on a machine without NPUs. The baselines were
taken with what upstream's tests import: pytest-mock, pytest-asyncio, mock, wrapt, msgpack, nltk, nvtx,
requests, httpx, pyzmq, flask, fastapi and nvidia-resiliency-ext; that of core_v0.19.0 with the version
0.6.0 of the last, which its package pins, emerging-optimizers 0.3.0, omegaconf and aiohttp. A test that
lacks one of them is not judged; the run says so.

## How they are run

- **Worlds.** Upstream's CI runs every file with 8 ranks on 8 GPUs; so do we, with 8 processes, each with
  the environment that torchrun would give it. One process runs a file where eight would do the same eight
  times: it has no word of torch.distributed or Megatron's groups, or only layouts of one rank. Exceptions,
  with reasons: `upstream_tests/worlds.json`. Files of one process run several at a time (`--jobs`).
- **A test passes** if it passes in all its ranks. When it fails in some only, or hangs, the world is
  replaced, and the next one goes on with the next test.
- **What the tests are told.** That there is an accelerator (`torch.cuda.is_available()` is true in the test
  files: many skip themselves otherwise), and of tensors what Megatron is told (`is_cuda`). That there is no
  network: what they would download is absent.
- **Experimental.** A test that upstream marks so is run with `--experimental`, the others without, as the two
  sessions of its CI do.
- **Memory.** A world that would leave the machine less than a tenth of its memory is stopped, and the test
  that it was in does not count.
- **Groups** of a model-parallel layout that a test has destroyed are released, from megatron-core 0.9 on;
  upstream leaves them to the end.
- **Megatron-DeepSpeed.** Of deepspeedai's tree all of `tests` is run, with the extra `[deepspeed]`, but for
  its functional tests, which judge the logs of a cluster. Its conftest asks for the rank before there is a
  process group, which no test would survive: it is told 1. Bigscience's tests start their ranks themselves;
  what they did is on [the page of that tree](megatron-deepspeed.md#the-checkouts-own-tests).

- **TransformerEngine** is not there. A test that fails for want of it runs a second time, with
  [our layers under its names](../explanation/without-transformer-engine.md#layers-under-its-names); that
  counts then:

  ```bash
  MEGATRON_NPU_TE=local python tests/adaptors/megatron_core/run_upstream_tests.py CHECKOUT --record
  ```

  The second pass takes its tests from the first one's baseline, and has a baseline of its own
  (`…-te-local.json`).

## What counts

*Excluded* is a test that failed for a reason which has nothing to do with the plug-in; each rule and its
reason are in `upstream_tests/exclusions.json`. A rule never turns a pass into anything else, and a test that
passed once and fails now is a regression whatever the rules say. A few tests are not even started: those
that fill the device's memory, where it is the machine's, and five that
[never end](#tests-that-never-end). *Skipped* is what upstream's own marks skip. The quota is
passed / (passed + failed). A file that cannot be imported counts as one test.

A file that is not recorded was not run to its end where the baseline was taken; the tables say how many
are. Of a test that is not recorded nothing is known.

## Tests that never end

In core_v0.18.2 twelve tests of two files once had no result on a CPU. Five of them hang; the other seven were
not run, because the runner gives up a file in which three tests hang. The rules now leave the five out.

- `test_single_encoder_8gpu` and `test_dual_encoder_8gpu` of `test_multimodule_schedules.py` hang while gloo
  connects a group: ranks of different groups wait for each other. Some ranks alone call `new_group`; torch
  numbers groups by these calls, so two groups get the same name. NCCL connects a group only at its first use.
- The three of `TestMimoCheckpoint` hang with some ranks in the barrier of `_cleanup_tmpdir` and the others in
  `optimizer.step()`. TransformerEngine's layers are mocks here: the ranks that build the projection raise
  `StopIteration` at the second model and go to the barrier.
- The seven of `TestOptimizerCheckpointHelpers` in `test_mimo_checkpoint.py` pass: they use no collective.
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
        f"{versions}; {len(one.files)} of {one.there} files, in {minutes:.0f} minutes.\n",
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
