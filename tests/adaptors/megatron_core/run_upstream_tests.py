"""Run an upstream's own unit tests under the plug-in and compare with what was recorded.

    python tests/adaptors/megatron_core/run_upstream_tests.py CHECKOUT --device cpu
    python tests/adaptors/megatron_core/run_upstream_tests.py CHECKOUT --device npu --folder tensor_parallel
    python tests/adaptors/megatron_core/run_upstream_tests.py CHECKOUT --device cpu --record

CHECKOUT is a Megatron-LM tree with ``tests/unit_tests``, or one of Megatron-DeepSpeed with ``tests``.
With MEGATRON_NPU_TE=local only those tests run that are recorded as excluded for want of TransformerEngine.
npu is the simulated Ascend where no real one is there. docs/records/upstream-tests.md says what is judged.
Exit status: 0, or 1 with the names of the tests that passed when the baseline was recorded and do not now
(regressions), and of those that fail unexplained and are not recorded (new failures).
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import chain
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[2]
sys.path[:0] = [path for path in (str(ROOT), str(HERE)) if path not in sys.path]

from upstream_tests import baseline, exclusions, page, prepare, trees, world, worlds  # noqa: E402
from upstream_tests.results import FAILED, PASSED, SKIPPED, FileResult, Result  # noqa: E402

import megatron_npu  # noqa: E402, F401  spawned children (checkpoint writers) import this file: patched, too
from megatron_npu.base import settings  # noqa: E402
from megatron_npu.base.errors import UsageError  # noqa: E402


def main(argv: list[str]) -> int:
    """Run, compare or record; return the exit status.

    Raises:
        UsageError: ``CHECKOUT`` has no unit tests, or a folder in it does not exist.
    """
    options = arguments(argv)
    if options.page:
        page.write()
        return 0
    if options.device == "npu" and not settings.SIM.enabled() and not Path("/dev/davinci0").exists():
        return simulated(argv)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # ends the ranks, too
    checkout = options.checkout.resolve()
    tree = trees.name_of(checkout)
    te = "local" if settings.TE.get() == "local" else "absent"
    chosen: dict[str, list[str] | None] = dict.fromkeys(trees.files(checkout, options.folder))
    if te == "local":
        wanting = baseline.Baseline.load(tree, options.device).wanting(
            exclusions.wanting_layers(exclusions.load())
        )
        chosen = {file: names for file, names in wanting.items() if file in chosen}
    rules = exclusions.load(te=te)
    before = changes(checkout)
    with tempfile.TemporaryDirectory(prefix="upstream-") as folder:
        scratch = Path(folder) if options.scratch is None else options.scratch.resolve()
        results = gather(options, checkout, scratch, chosen, rules)
    if changes(checkout) != before:
        print(f"the tests changed {checkout}:\n{changes(checkout)}", file=sys.stderr)
        return 1
    recorded = baseline.Baseline.load(tree, options.device, te)
    if not options.record:
        return report(recorded, results, rules)
    there = trees.files(checkout, None)
    recorded.there, recorded.folders = len(there), dict(Counter(map(trees.folder_of, there)))
    return record(recorded, results, rules)


def arguments(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "checkout", type=Path, nargs="?", help="the upstream's tree; nothing is written into it"
    )
    parser.add_argument("--device", choices=("cpu", "npu", "cuda"), default="cpu")
    parser.add_argument("--world-size", type=int, help="the most ranks of a file (default: all it needs)")
    parser.add_argument(
        "--jobs", type=int, default=os.cpu_count(), help="files of one rank at a time (default: the cores)"
    )
    parser.add_argument("--folder", action="append", help="a folder or file below its tests; repeat")
    parser.add_argument("--limit", type=float, default=120, help="seconds for one test (default: 120)")
    parser.add_argument("--scratch", type=Path, help="keep logs, results and temporary files here")
    parser.add_argument("--again", action="store_true", help="judge what lies in SCRATCH again, run nothing")
    parser.add_argument(
        "--resume", action="store_true", help="run only files without a result in SCRATCH, and judge all"
    )
    parser.add_argument("--record", action="store_true", help="write the baseline, compare nothing")
    parser.add_argument("--page", action="store_true", help="only write docs/records/upstream-tests.md again")
    options = parser.parse_args(argv)
    if options.checkout is None and not options.page:
        parser.error("CHECKOUT is missing")
    if (options.again or options.resume) and options.scratch is None:
        parser.error(f"{'--again' if options.again else '--resume'} needs --scratch")
    return options


def simulated(argv: list[str]) -> int:
    """Run this program again, on simulated NPUs."""
    command = [
        sys.executable,
        "-m",
        "megatron_npu",
        "sim",
        "--",
        sys.executable,
        str(Path(__file__).resolve()),
    ]
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, "PYTHONPATH": path}  # hours are nothing unusual
    return subprocess.run([*command, *argv], env=environment, check=False, timeout=None).returncode


def changes(checkout: Path) -> str:
    """Return what git sees as changed in the checkout, ignored files too."""
    command = ["git", "-C", str(checkout), "status", "--porcelain", "--ignored"]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=300).stdout


def gather(
    options: argparse.Namespace,
    checkout: Path,
    scratch: Path,
    chosen: dict[str, list[str] | None],
    rules: list[exclusions.Rule],
) -> list[FileResult]:
    """Return the results of the chosen files, of each the named tests (None: all), stored ones first."""
    results = list(stored(scratch, chosen)) if options.again or options.resume else []
    there = {result.file for result in results}
    left = {file: names for file, names in chosen.items() if file not in there}
    if left and not options.again:
        results += run(options, checkout, scratch, left, rules)
    return results


def run(
    options: argparse.Namespace,
    checkout: Path,
    scratch: Path,
    chosen: dict[str, list[str] | None],
    rules: list[exclusions.Rule],
) -> Iterator[FileResult]:
    """Run the files, of each the named tests (None: all); keep results in ``scratch``.

    Those of one rank come first, several at a time; the others one after the other.
    """
    prepare.environment(options.device, checkout, scratch)
    fork = options.device != "cuda"  # a CUDA context does not survive a fork
    if fork:
        prepare.preload(checkout, scratch)
    barred = functools.partial(exclusions.barred, rules, device=options.device)
    arguments = prepare.pytest_arguments(checkout)
    setting = world.Setting(checkout, scratch, options.limit, arguments, fork, barred)
    most = options.world_size or worlds.UPSTREAM
    ranks = {file: min(worlds.size_for(checkout, file), most) for file in chosen}
    alone = {file: names for file, names in chosen.items() if ranks[file] == 1}
    together = {file: names for file, names in chosen.items() if ranks[file] > 1}
    results = chain(
        world.run_alone(setting, alone, options.jobs if fork else 1),
        (world.run_file(setting, file, ranks[file], names) for file, names in together.items()),
    )
    for result in results:
        result_path(scratch, result.file).write_text(json.dumps(dataclasses.asdict(result)))
        describe(result)
        yield result


def result_path(scratch: Path, file: str) -> Path:
    return scratch / "results" / f"{file.removesuffix('.py').replace('/', '.')}.json"


def stored(scratch: Path, chosen: Iterable[str]) -> Iterator[FileResult]:
    """Yield the results that an earlier run left in ``scratch``."""
    for file in chosen:
        if result_path(scratch, file).is_file():
            values = json.loads(result_path(scratch, file).read_text())
            tests = {name: Result(**test) for name, test in values.pop("tests").items()}
            yield FileResult(**values, tests=tests)


def describe(result: FileResult) -> None:
    counts = ", ".join(f"{result.count(outcome)} {outcome}" for outcome in (PASSED, FAILED, SKIPPED))
    print(f"{result.file}: {counts}; {result.world} ranks, {result.seconds} s", flush=True)
    for name, test in result.tests.items():
        if test.outcome == FAILED:
            print(f"    {name}: {test.text}")


def record(recorded: baseline.Baseline, results: list[FileResult], rules: list[exclusions.Rule]) -> int:
    """Put the results in place of what was recorded for their files, and write the page."""
    recorded.versions = {"python": platform.python_version(), "torch": prepare.torch_version()}
    recorded.files |= {result.file: baseline.entry(result, rules, recorded.device) for result in results}
    recorded.save()
    page.write()
    print(f"{recorded.tree} on {recorded.device}: {page.sentence(recorded.totals())}")
    return 0


def report(recorded: baseline.Baseline, results: list[FileResult], rules: list[exclusions.Rule]) -> int:
    """Print how the results differ from what was recorded; return 1 if something got worse."""
    found = baseline.compare(recorded, results, rules)
    titles = {
        "cannot be judged here": found.incomparable,
        "new failure": found.new_failures,
        "REGRESSION": found.regressions,
    }
    for title, tests in titles.items():
        for test, why in tests.items():
            print(f"{title}: {test}: {why}")
    for test in found.gains:
        print(f"passes now (record it): {test}")
    ran = sum(len(result.tests) for result in results)
    counts = [f"{len(found.regressions)} regressions", f"{len(found.new_failures)} new failures"]
    print(f"{ran} tests, {', '.join(counts)}, {len(found.gains)} gains")
    if not recorded.files:
        print(f"nothing is recorded of {recorded.tree} on {recorded.device}: --record writes a baseline")
    return 1 if found.regressions or found.new_failures else 0


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except UsageError as error:
        print(error, file=sys.stderr)
        sys.exit(2)
