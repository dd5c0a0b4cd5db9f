"""Commands of one account on what belongs to another: numbers, files, data, caches, servers, signals.

    python -m tests.campaign.accounts [--only numbers,files] [--json trials.jsonl]   # as root

Prints each trial that went wrong, and a table with a row for each place.
The exit code is 1 if there was a fault. A round that was interrupted goes on with
``--json trials.jsonl --without trials.jsonl``.
"""

from __future__ import annotations

import argparse
import collections
import importlib
import itertools
import json
import random
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from tests.campaign.accounts import rooms, trials
from tests.campaign.accounts.trials import FAULTS, Later, Try, Verdict

# a row of the table: the module and the function that yields its trials
PLACES = {
    "numbers": ("flag_values", "numbers"),
    "files": ("flag_values", "files"),
    "outputs": ("flag_values", "outputs"),
    "models": ("hostile_models", "tries"),
    "texts": ("hostile_texts", "tries"),
    "datasets": ("hostile_checkpoints", "datasets"),
    "checkpoints": ("hostile_checkpoints", "checkpoints"),
    "surroundings": ("surroundings", "tries"),
    "serve": ("servers", "serve"),
    "dashboard": ("servers", "dashboard"),
    "signals": ("signals", "tries"),
    "stores": ("stores", "tries"),
    "groups": ("groups", "tries"),
    "evaluate": ("evaluations", "tries"),
    "caches": ("code_caches", "tries"),
    "machines": ("odd_machines", "tries"),
    "terminals": ("odd_texts", "terminals"),
    "pages": ("odd_texts", "pages"),
    "storages": ("odd_texts", "storages"),
    "hubs": ("odd_texts", "hubs"),
    "templates": ("templates", "tries"),
    "early": ("signals", "early"),
    "killed": ("signals", "killed"),
}


# what most commands import; a fork shares it
_SHARED = (
    "megatron_npu.commands.cli",
    "megatron_npu.pretrain.run.pretrain",
    "megatron_npu.generation.generate",
    "megatron_npu.evaluation.lambada",
    "megatron_npu.conversion.command",
    "megatron_npu.data.preprocessing.command",
)


def verdicts(room: rooms.Room, args: argparse.Namespace) -> Iterator[Verdict]:
    """Make the trials that are asked for, but not those that a file has."""
    known = {row for file in args.without for row in trials.recorded(file)}
    for name in args.only.split(",") if args.only else PLACES:
        module, function = PLACES[name]
        tries = getattr(importlib.import_module(f"tests.campaign.accounts.{module}"), function)(room)
        draw = random.Random(args.seed)
        named = (each for each in tries if (args.word or "") in each.what)
        chosen = (each for each in named if not trials.is_recorded(each, known))
        for each in itertools.islice(chosen, args.skip, args.first and args.skip + args.first):
            if draw.random() < args.share:
                yield _made(room, each)


def _made(room: rooms.Room, each: Try | Later | Verdict) -> Verdict:
    if isinstance(each, Later):
        return each.make()
    return trials.made(room, each) if isinstance(each, Try) else each


def table(found: list[Verdict]) -> str:
    """Return the number of faults of each kind and place, in Markdown."""
    kinds = [kind for kind in FAULTS if kind in FAULTS[:5] or any(each.verdict == kind for each in found)]
    rows = [f"| place | trials | {' | '.join(kinds)} |", "|---" * (len(kinds) + 2) + "|"]
    for place in (*dict.fromkeys(each.place for each in found), "total"):
        some = [each for each in found if place in (each.place, "total")]
        counts = collections.Counter(each.verdict for each in some)
        rows.append(f"| {' | '.join(map(str, (place, len(some), *(counts[kind] for kind in kinds))))} |")
    return "\n".join(rows)


def parsed(words: list[str] | None = None) -> argparse.Namespace:
    """Return the arguments of the command."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", help=f"places, with commas: {', '.join(PLACES)}")
    parser.add_argument("--first", type=int, help="only so many trials of each place")
    parser.add_argument(
        "--skip", type=int, default=0, help="without so many trials of each place before them"
    )
    parser.add_argument("--folder", type=Path, help="for all files, which stay there for the next call")
    parser.add_argument("--json", type=Path, help="append a line for each trial to this file")
    parser.add_argument("--share", type=float, default=1.0, help="a random part of the trials, such as 0.5")
    parser.add_argument("--seed", type=int, default=0, help="of the random part")
    parser.add_argument("--word", help="only trials whose description contains this word")
    parser.add_argument(
        "--without",
        type=Path,
        action="append",
        default=[],
        metavar="FILE",
        help="without the trials in this file of --json, or in the record; may be given again",
    )
    return parser.parse_args(words)


def main() -> int:
    """Be the command."""
    args = parsed()
    if reason := rooms.reason_against():
        raise SystemExit(reason)
    rooms.separate()
    for name in _SHARED:
        importlib.import_module(name)
    # not a TemporaryDirectory, which forks would remove at their end
    folder = args.folder or Path(tempfile.mkdtemp(prefix="accounts-"))
    room = rooms.Room(folder)
    try:
        found = [_told(each, args.json) for each in verdicts(room, args)]
    finally:
        room.sweep()
        if not args.folder:
            shutil.rmtree(folder, ignore_errors=True)
    faults = sum(each.verdict in FAULTS for each in found)
    print(f"{table(found)}\n\n{len(found)} trials, {faults or 'no'} faults")
    return 1 if faults else 0


def _told(found: Verdict, file: Path | None) -> Verdict:
    """Print a fault, and append any verdict to the file."""
    if found.verdict in FAULTS:
        print(f"{found.verdict}: {found.place}: {found.what} ({found.code}): {found.told}", flush=True)
    if file:
        with file.open("a") as stream:
            stream.write(json.dumps(found._asdict()) + "\n")
    return found


if __name__ == "__main__":
    sys.exit(main())
