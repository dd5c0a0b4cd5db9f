"""SIGTERM, SIGKILL, SIGINT and SIGHUP to commands in the middle of their work; then the command goes on."""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import psutil

from tests.campaign.accounts import odd_machines, surroundings, trials
from tests.campaign.accounts.rooms import Room
from tests.campaign.accounts.samples import Samples
from tests.campaign.accounts.trials import DONE, Ended, Later, Try, Verdict

_PLACE = "signals in mid-run"
_STARTING, _KILLED = "signals at the start", "SIGKILL to commands with children"
_EARLY = (0.03, 0.15, 0.5, 1.2, 3.0)  # seconds
_TIMES = 4  # of each signal and command
_SIGNALS = (signal.SIGTERM, signal.SIGKILL, signal.SIGINT, signal.SIGHUP)
_LONGEST = 120.0  # seconds until a command is in the middle of its work


class Job(NamedTuple):
    """A command, what says that it is in the middle of its work, and its results.

    Attributes:
        words: the command.
        is_busy: called with its process.
        results: their final names, of which none may be there if it did not end by itself.
    """

    words: list[str]
    is_busy: Callable[[psutil.Process], object]
    results: tuple[Path, ...]


def tries(room: Room) -> Iterator[Later]:
    """Yield each command and signal, and the run after them."""
    for name, job in jobs(Samples(room)).items():
        for number in _SIGNALS:
            for time_ in range(_TIMES):
                yield _harm(room, name, job, number, 0.1 + 0.3 * time_)
        yield Later(f"{name}: the run after a SIGKILL", functools.partial(_next_run, room, name, job))


def _next_run(room: Room, name: str, job: Job) -> Verdict:
    """Kill a command in the middle of its work, and run it again to its end, over what was left."""
    harmed = _harmed(room, name, job, signal.SIGKILL, 0.5)
    before = [path.name for path in _around(job)]
    found = trials.made(room, Try(_PLACE, f"{name}: the run after a SIGKILL", job.words, DONE, limit=400))
    missing = [path.name for path in job.results if not path.exists()]
    left = [path.name for path in _around(job) if path not in job.results and _is_temporary(path)]
    _remove(job)
    verdict = "silent" if found.verdict == "done" and (missing or left) else found.verdict
    text = f"{harmed.what}; before {before}, missing {missing}, left {left}; {found.told}"
    return found._replace(verdict=verdict, told=text)


def early(room: Room) -> Iterator[Later]:
    """Yield commands that get a signal while they start."""
    found = odd_machines.commands(Samples(room))
    for name in ("generate", "doctor", "preprocess", "pretrain", "plan", "convert", "train on 2"):
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            for pause in _EARLY:
                surroundings.remove_results(room)
                job = Job(found[name], lambda process: True, (room.temporary / "no result",))
                yield _harm(room, name, job, number, pause, _STARTING)


def killed(room: Room) -> Iterator[Later]:
    """Yield commands whose children must end when they get SIGKILL."""
    found = odd_machines.commands(Samples(room))
    for name in ("plan", "doctor", "bench graph", "pretrain", "train on 2", "preprocess", "sim"):
        for pause in (0.0, 1.0, 3.0):
            surroundings.remove_results(room)
            job = Job(found[name], lambda process: process.children(), (room.temporary / "no result",))
            yield _harm(room, name, job, signal.SIGKILL, pause, _KILLED)


def jobs(samples: Samples) -> dict[str, Job]:
    """Return the commands."""
    room, made = samples.room, samples.room.temporary
    big = samples.written("big.jsonl", '{"text":"1 2 3 4 5 6 7 8 9 10 11 12"}\n' * 400_000)
    lots = samples.written("lots.jsonl", '{"text":"1 2 3 4 5 6"}\n' * 300_000)
    large = _large(samples)
    prefix, results, folder = made / "of signals", made / "of signals.jsonl", made / "of signals hf"
    written = tuple(Path(f"{prefix}_text_document.{end}") for end in ("bin", "idx"))
    null = ["--tokenizer-type", "NullTokenizer", "--vocab-size", "255"]
    tokens = ["preprocess", *null, "--input", str(big), "--output-prefix", str(prefix), "--workers", "3"]
    scores = [*samples.lambada(), "--valid-data", str(lots), "--results", str(results)]
    return {
        "preprocess": Job(tokens, lambda process: len(process.children()) >= 3, written),
        "lambada": Job(scores, _has_computed(room, 6.0), (results,)),
        "convert": Job(
            ["convert", "--from", "megatron", "--to", "hf", str(large), str(folder)],
            lambda process: [path for path in made.iterdir() if folder.name in path.name],
            (folder,),
        ),
    }


def _large(samples: Samples) -> Path:
    """Return a checkpoint of which the conversion takes a while."""
    path = samples.room.temporary / "large"
    if path.exists():
        return path
    sizes = "--num-layers 8 --hidden-size 512 --num-attention-heads 8 --save".split()
    made = trials.made(
        samples.room,
        Try("setup", "a large checkpoint", [*samples.pretrain(), *sizes, str(path)], DONE, limit=400),
    )
    if made.verdict != "done":
        raise RuntimeError(f"no checkpoint: {made}")
    return path


def _has_computed(room: Room, seconds: float) -> Callable[[psutil.Process], bool]:
    return lambda process: sum(process.cpu_times()[:2]) > seconds


def _harm(
    room: Room, name: str, job: Job, number: signal.Signals, pause: float, place: str = _PLACE
) -> Later:
    """Return the trial that sends a signal to a command."""
    make = functools.partial(_harmed, room, name, job, number, pause, place)
    return Later(f"{name}: {number.name} after {pause:.1f} s", make)


def _harmed(
    room: Room, name: str, job: Job, number: signal.Signals, pause: float, place: str = _PLACE
) -> Verdict:
    """Send a signal to a command in the middle of its work."""
    _remove(job)
    pid = trials.started(room, Try(_PLACE, name, job.words))
    process = psutil.Process(pid)
    is_busy = _until_busy(process, job)
    time.sleep(pause)
    is_there = is_busy and process.status() != psutil.STATUS_ZOMBIE
    with contextlib.suppress(OSError):
        os.kill(pid, number)
    began = time.monotonic()
    code, is_hung = trials.ended(pid, 60)
    left = trials.left(room)
    file = room.folder / "err.txt"
    told = file.read_text(errors="replace") if file.exists() else ""  # it may end before it opens the file
    room.sweep()
    ended = Ended(code, "", told, is_hung, bool(left))
    final = [path.name for path in job.results if path.exists()]
    partial = [path.name for path in _around(job) if _is_temporary(path)]
    verdict = _judged(ended, number, final, partial)
    how = trials.IN_THE_MIDDLE if is_there else trials.BEFORE
    what = f"{name}: {number.name} after {pause:.1f} s{how}"
    text = f"{told[-500:]} left {left}, final {final}, temporary {partial}"
    return Verdict(place, what, verdict, code, round(time.monotonic() - began, 1), text)


def _judged(ended: Ended, number: int, final: list[str], partial: list[str]) -> str:
    """Return the verdict; after SIGKILL, temporary files may stay, which the next run removes."""
    found = trials.verdict_on(ended._replace(code=1), DONE, [])
    if found in ("hung", "traceback", "orphan"):
        return found
    if ended.code and (final or (partial and number != signal.SIGKILL)):
        return "silent"
    return "refused" if ended.code else "done"


def _until_busy(process: psutil.Process, job: Job) -> bool:
    began = time.monotonic()
    with contextlib.suppress(psutil.Error):
        while time.monotonic() - began < _LONGEST * trials.slowness():
            if process.status() == psutil.STATUS_ZOMBIE:
                return False
            if job.is_busy(process):
                return True
            time.sleep(0.01)
    return False


def _around(job: Job) -> list[Path]:
    """Return what lies beside the results, under names of theirs."""
    folder = job.results[0].parent
    return [path for path in folder.iterdir() if "of signals" in path.name]


def _is_temporary(path: Path) -> bool:
    return path.name.endswith((".partial", ".replaced", ".tmp")) or path.name.startswith(".")


def _remove(job: Job) -> None:
    for path in _around(job):
        shutil.rmtree(path) if path.is_dir() else path.unlink()
