"""The campaign: runs are killed, stopped, starved and spoilt in a loop, and what is left is looked at.

    python tests/campaign/run.py --minutes 10 [--kills 200] [--seed 0] [--only kill,signals] [--ways pretrain]
    python tests/campaign/run.py --replay 17,23

Each trial has a seed, which decides what runs, what happens to it and when: a training of the driver, of
``train`` or of a stock script, by one process or two; or a tool. After the harm nothing may be left running;
the run then goes on, unharmed, and must end with the results of one that was never harmed, to the bit.
Nothing may be left of it: no process, no partial or temporary file, no shared memory. A fault is printed with
its seed, and what the trial has printed is kept under --keep. The exit code is 1 if there was any.
"""

from __future__ import annotations

import argparse
import collections
import ctypes
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.campaign import harms, ways
from tests.campaign.trial import FaultError, Trial
from tests.campaign.ways import Way

HERE = Path(__file__).resolve().parent
FAULTS = ("lost", "executed", "hung", "left behind", "traceback", "unnamed")
_CLONE_NEWNS = 0x00020000


@dataclass
class Tally:
    """What was seen: trials, faults and lines of errors by harm, phase and way."""

    trials: collections.Counter[tuple[str, str, str]] = field(default_factory=collections.Counter)
    faults: collections.Counter[tuple[str, str, str, str]] = field(default_factory=collections.Counter)
    kills: int = 0
    lines: dict[tuple[str, str, str], int] = field(default_factory=dict)

    def table(self) -> str:
        """Return it in Markdown."""
        head = ["harm", "phase", "way in", "trials", "as if unharmed", *FAULTS, "lines of errors at most"]
        rows = [f"| {' | '.join(head)} |", f"|{'---|' * len(head)}"]
        for label, count in sorted(self.trials.items()):
            found = [self.faults[(*label, fault)] for fault in FAULTS]
            cells = [*label, count, count - sum(found), *found, self.lines.get(label, 0)]
            rows.append(f"| {' | '.join(map(str, cells))} |")
        return "\n".join(rows)


class Campaign:
    """All trials of one call.

    Args:
        folder: for all files; removed by the caller.
        keep: where the files of trials with faults are kept.
        only: names of harms; None: all.
        names: of ways; None: all.
        ranks: of ways; None: any number.
        variables: of the environment of all runs.
    """

    def __init__(
        self,
        folder: Path,
        keep: Path,
        only: set[str] | None = None,
        names: set[str] | None = None,
        ranks: int | None = None,
        variables: dict[str, str] | None = None,
    ) -> None:
        self.folder, self.keep, self.only = folder, keep, only
        self.tally = Tally()
        self.most = 6  # times that a run is struck
        self._calm: dict[str, object] = {}
        self._lasts: dict[str, float] = {}  # seconds of an unharmed run
        self._variables = variables or {}
        trainings = ways.trainings(folder, HERE.parents[1] / "checkouts")
        self._sources: dict[str, Path] = {}
        self.ways = [
            way
            for way in (*trainings, *ways.tools(folder, self._saved, trainings))
            if (names is None or way.name in names) and ranks in (None, way.ranks)
        ]

    def _saved(self, way: Way) -> Path:
        """Return the checkpoints of an unharmed training."""
        if way.label not in self._sources:
            self._sources[way.label] = self._unharmed(way, keep=True) / "save"
        return self._sources[way.label]

    def _unharmed(self, way: Way, keep: bool = False) -> Path:
        """Run a way without harm, and remember what it has made; what it leaves is a fault, too."""
        place = self.folder / f"calm {way.label}{' kept' * keep}".replace(" ", "-").replace(",", "")
        trial = Trial(way, place, random.Random(0), None, self._variables)
        trial.start()
        begun = time.monotonic()
        try:
            code = trial.end()
        except FaultError as error:
            raise SystemExit(f"{way.label}, unharmed: {': '.join(error.args)}") from None
        if code:
            raise SystemExit(f"{way.label}, unharmed: {trial.told()[-5000:]}")
        self._lasts[way.label] = time.monotonic() - begun
        self._calm[way.label] = way.outcome(place)
        label = ("none", "unharmed", way.label)
        self.tally.trials[label] += 1
        try:
            trial.judge()
        except FaultError as error:
            self._found(trial, label, place.name, error)
        trial.sweep()
        if not keep:
            trial.remove()
        return place

    def _found(self, trial: Trial, label: tuple[str, str, str], name: str, error: FaultError) -> str:
        """Count a fault, keep what there is of it, and return it in words."""
        said = ": ".join(error.args)
        self.tally.faults[(*label, error.args[0])] += 1
        self._keep(trial, name, said)
        print(f"{name}: {', '.join(label)}: {said.splitlines()[0][:300]}", flush=True)
        return said

    def drawn(self, rng: random.Random) -> tuple[Way, harms.Harm, str] | None:
        """Draw what runs, what is done to it and when; None: no such harm for it."""
        weights = [1 if "stock" in way.name else 3 for way in self.ways]  # those take five times as long
        [way] = rng.choices(self.ways, weights)
        harm = rng.choice(harms.KILLS if rng.random() < 0.75 else harms.OTHERS)
        phase = rng.choice(harms.PHASES)
        if not self._fits(way, harm) or (self.only and harm.__name__ not in self.only):
            return None
        if harm is harms.restart and phase == "going on":
            phase = "training"
        if way.progress is None:
            phase = "anywhere"
        elif harm not in harms.AT_A_PHASE:
            phase = "saving" if harm is harms.kill_writer else "anywhere"
        return way, harm, phase

    def _fits(self, way: Way, harm: harms.Harm) -> bool:
        if way.progress is None:
            if harm is harms.corrupt_source:
                return way.reads
            return harm in harms.EVERYWHERE and (way.workers or harm is not harms.kill_worker)
        return {
            harms.kill_launcher: way.ranks > 1,
            harms.restart: way.ranks > 1,
            harms.kill_writer: way.writes,
            harms.kill_worker: way.workers,
            harms.starve: way.own,
            harms.corrupt_source: False,
        }.get(harm, True)

    def try_(self, seed: int) -> bool | None:
        """Make the trial of a seed; return whether all was well, None where there is none."""
        rng = random.Random(seed)
        drawn = self.drawn(rng)
        if drawn is None:
            return None
        return self.make(seed, rng, *drawn) is None

    def make(self, seed: int, rng: random.Random, way: Way, harm: harms.Harm, phase: str) -> str | None:
        """Make one trial; print and count what was found; return the fault, None: all was well."""
        if way.label not in self._calm:
            self._unharmed(way)
        label = (harm.__name__, phase, way.label)
        trial = Trial(way, self.folder / f"trial{seed}", rng, self._calm[way.label], self._variables)
        trial.early = min(trial.early, self._lasts[way.label])
        trial.most = self.most
        found = None
        begun = time.monotonic()
        try:
            harm(trial, phase)
        except FaultError as error:
            found = self._found(trial, label, f"seed{seed}", error)
        by_signal = harm in (*harms.KILLS, *harms.BY_SIGNAL)
        if found is None and by_signal and not trial.hits:
            trial.remove()
            print(f"seed {seed}: {', '.join(label)}: it had ended before", flush=True)
            return None
        self.tally.kills += trial.kills
        self.tally.trials[label] += 1
        self.tally.lines[label] = max(self.tally.lines.get(label, 0), len(trial.errors_told()))
        trial.remove()
        took = f"{time.monotonic() - begun:.1f} s, {trial.kills} kills"
        print(f"seed {seed}: {', '.join(label)}: {'a fault' if found else 'ok'} ({took})", flush=True)
        return found

    def _keep(self, trial: Trial, name: str, what: str) -> None:
        trial.kill_all()
        place = self.keep / name
        shutil.rmtree(place, ignore_errors=True)
        place.mkdir(parents=True)
        (place / "fault.txt").write_text(what)
        for path in trial.folder.glob("*.txt"):
            shutil.copy(path, place)
        listing = sorted(str(path.relative_to(trial.folder)) for path in trial.folder.rglob("*"))
        (place / "files.txt").write_text("\n".join(listing))


def preloaded(folder: Path) -> dict[str, str]:
    """Compile ``faults.c``; return the environment that has it preloaded, empty without a compiler."""
    library = folder / "faults.so"
    command = ["cc", "-shared", "-fPIC", "-O1", "-o", str(library), str(HERE / "faults.c"), "-ldl"]
    try:
        subprocess.run(command, check=True, timeout=60)
    except (OSError, subprocess.CalledProcessError) as error:
        raise SystemExit(f"the campaign needs a C compiler for faults of disk and clock: {error}") from None
    return {"LD_PRELOAD": str(library)}


def own_shared_memory() -> None:
    """Have a /dev/shm that nobody else uses, where this may be done: what lies in it is the trials' then."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(_CLONE_NEWNS):
        print("not the superuser: shared memory that is left behind is not looked for")
        return
    for command in ("mount --make-rprivate /", "mount -t tmpfs tmpfs /dev/shm"):
        subprocess.run(command.split(), check=True, timeout=60)
    os.environ["CAMPAIGN_NAMESPACE"] = "1"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--minutes", type=float, default=5)
    parser.add_argument("--kills", type=int, help="end after so many SIGKILLs")
    parser.add_argument("--seed", type=int, default=0, help="of the first trial; each one has the next")
    parser.add_argument("--replay", help="these seeds alone, with commas, with the same --only and --ways")
    parser.add_argument("--only", help="harms, with commas")
    parser.add_argument("--ranks", type=int, help="only ways of so many processes")
    parser.add_argument("--ways", help="ways in, with commas: pretrain, train, …")
    parser.add_argument(
        "--keep", type=Path, default=Path("campaign-faults"), help="for what faults have printed"
    )
    parser.add_argument("--json", type=Path, help="write the counts there")
    args = parser.parse_args()
    own_shared_memory()
    chosen = [set(text.split(",")) if text else None for text in (args.only, args.ways)]
    with tempfile.TemporaryDirectory(prefix="campaign-") as folder:
        campaign = Campaign(Path(folder), args.keep, *chosen, args.ranks, preloaded(Path(folder)))
        begun = time.monotonic()
        seeds = map(int, args.replay.split(",")) if args.replay else iter(range(args.seed, sys.maxsize))
        failed = []
        for seed in seeds:
            if campaign.try_(seed) is False:
                failed.append(seed)
            late = time.monotonic() - begun > 60 * args.minutes
            if not args.replay and (late or (args.kills and campaign.tally.kills >= args.kills)):
                break
    tally = campaign.tally
    print(f"\n{tally.table()}\n\n{sum(tally.trials.values())} trials, {tally.kills} times SIGKILL")
    again = f": --replay {','.join(map(str, failed))}" if failed else ""
    print(f"{sum(tally.faults.values()) or 'no'} faults{again}")
    if args.json:
        rows = [[*label, count] for label, count in tally.trials.items()]
        faults = [[*label, count] for label, count in tally.faults.items()]
        args.json.write_text(
            json.dumps({"trials": rows, "faults": faults, "failed": failed}, indent=1) + "\n"
        )
    return 1 if tally.faults else 0


if __name__ == "__main__":
    sys.exit(main())
