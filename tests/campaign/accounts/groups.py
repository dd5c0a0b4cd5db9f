"""Two accounts of a group that share a folder; stacks on request; what a run says of itself."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterator

from tests.campaign.accounts import trials
from tests.campaign.accounts.rooms import Room
from tests.campaign.accounts.samples import Samples
from tests.campaign.accounts.trials import DONE, REFUSED, Try, Verdict

_PLACE = "groups, stacks, resuming, vocabularies"
_LONG = ["--train-iters", "100000", "--log-interval", "1"]


def tries(room: Room) -> Iterator[Verdict]:
    """Yield what each of these commands has said."""
    samples = Samples(room)
    yield from _locked(samples)
    yield from _stacks(samples)
    yield from _changed(samples)
    yield from _unknown(samples)


def _locked(samples: Samples) -> Iterator[Verdict]:
    """Start a run of the user in a folder of a group, then one of another account of the group."""
    room, group = samples.room, samples.room.stranger + 1
    folder = room.folder / "shared"
    folder.mkdir(exist_ok=True)
    (folder / "run").mkdir(exist_ok=True)
    for path in (folder, folder / "run"):
        os.chown(path, room.user, group)
        path.chmod(0o2775)
    words = [*samples.pretrain(), "--save", str(folder / "run")]
    first = Try(
        _PLACE, "lock: the run that has it", [*words, *_LONG, "--save-interval", "100000"], groups=(group,)
    )
    pid = trials.started(room, first)
    log = room.folder / "out.txt"
    is_there = _until(lambda: (folder / "run" / ".lock").exists() and "iteration" in log.read_text())
    kept = log.rename(room.folder / "first.txt")
    (room.folder / "err.txt").rename(room.folder / "first errors.txt")
    home = room.folder / "another home"
    home.mkdir(exist_ok=True)
    os.chown(home, room.stranger, room.stranger)
    variables = {"HOME": str(home), "TMPDIR": str(home)}
    cache = ["--data-cache-path", str(home / "cache")]
    given = Try(
        *(_PLACE, "lock: another account of the group", [*words, *cache], REFUSED),
        variables=variables,
        cwd=home,
        account=room.stranger,
        groups=(group,),
    )
    second_pid = trials.started(room, given)
    code, is_hung = trials.ended(second_pid, 150)
    told = (room.folder / "err.txt").read_text(errors="replace")
    os.kill(pid, signal.SIGKILL)
    trials.ended(pid, 60)
    room.sweep()
    verdict = "refused" if code == 2 and "another run is writing" in told and is_there else "silent"
    verdict = "hung" if is_hung else "traceback" if "Traceback" in told else verdict
    yield Verdict(_PLACE, given.what, verdict, code, 0.0, told[-600:] + kept.read_text()[-300:])


def _stacks(samples: Samples) -> Iterator[Verdict]:
    """Send SIGUSR1 to a running pretrain."""
    room = samples.room
    pid = trials.started(room, Try(_PLACE, "SIGUSR1", [*samples.pretrain(), *_LONG]))
    log, errors = room.folder / "out.txt", room.folder / "err.txt"
    is_there = _until(lambda: "iteration" in log.read_text())
    os.kill(pid, signal.SIGUSR1)
    has_printed = _until(lambda: "most recent call first" in errors.read_text(), 30)
    lines = log.read_text().count("iteration")
    goes_on = _until(lambda: log.read_text().count("iteration") > lines + 2, 60)
    os.kill(pid, signal.SIGKILL)
    code, _ = trials.ended(pid, 60)
    verdict = "done" if is_there and has_printed and goes_on else "silent"
    told = f"printed {has_printed}, goes on {goes_on}: {errors.read_text()[-500:]}"
    room.sweep()
    yield Verdict(_PLACE, "SIGUSR1 to pretrain", verdict, code, 0.0, told)


def _changed(samples: Samples) -> Iterator[Verdict]:
    """Resume with another seed, split and dropout."""
    room = samples.room
    changes = ["--seed", "4321", "--split", "80,20,0", "--clip-grad", "0.5", "--train-iters", "3"]
    changes.append("--override-opt_param-scheduler")
    words = [*samples.pretrain(), "--load", str(samples.checkpoint), *changes]
    yield _says(room, Try(_PLACE, "resume with changed flags", words, DONE), "changed since the checkpoint")


def _unknown(samples: Samples) -> Iterator[Verdict]:
    """Tokenize with a vocabulary that has none of the text's words."""
    room = samples.room
    text = samples.written("foreign.jsonl", '{"text":"hello world what is this"}\n' * 200)
    words = "\n".join(
        ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *(f"zz{number}" for number in range(50))]
    )
    vocabulary = samples.written("vocab.txt", f"{words}\n")
    flags = ["--tokenizer-type", "BertWordPieceLowerCase", "--vocab-file", str(vocabulary)]
    made = ["preprocess", "--input", str(text), "--output-prefix", str(room.temporary / "foreign")]
    yield _says(room, Try(_PLACE, "a vocabulary that does not fit", [*made, *flags], DONE), "unknown")


def _says(room: Room, given: Try, text: str) -> Verdict:
    found = trials.made(room, given)
    said = "".join((room.folder / name).read_text(errors="replace") for name in ("out.txt", "err.txt"))
    at = said.find(text)
    if found.verdict == "done" and at < 0:
        return found._replace(verdict="silent")
    return found._replace(told=said[max(at - 100, 0) : at + 600])


def _until(happens: Callable[[], bool], seconds: float = 150.0) -> bool:
    """Wait until a function returns True; return whether it did."""
    began = time.monotonic()
    while time.monotonic() - began < seconds * trials.slowness():
        with contextlib.suppress(OSError):
            if happens():
                return True
        time.sleep(0.1)
    return False
