"""What is done to a run. Each harm returns when the run has gone on, unharmed, to its end."""

from __future__ import annotations

import contextlib
import pickle
import re
import resource
import shutil
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import psutil

from megatron_npu.checkpoint_files import checksums
from megatron_npu.pretrain.checkpoint import checkpoint_files
from tests.campaign.trial import FaultError, Trial
from tests.campaign.ways import EVALUATION, INTERVAL, ITERATIONS
from tests.support.payload import Runs

PHASES = ("starting", "training", "saving", "evaluating", "going on")
_DEAD = (
    r"rank {0} \([^)]*\) exited without an error message|\({0}, -9\)"  # said by the others, or by the agent
)


def until(trial: Trial, phase: str) -> bool:
    """Wait for a phase, and for a random moment in it; return whether the run is still there."""
    rng = trial.rng
    if phase == "going on":  # a second run, which loads what the first has saved
        trial.until(lambda: trial.way.newest(trial.folder) >= INTERVAL)
        trial.kill_all()
        trial.end()
        trial.start()
    if trial.way.progress is None or phase in ("starting", "going on"):
        time.sleep(rng.random() ** 2 * trial.early)
    elif phase == "saving":
        after = max(rng.choice((0, INTERVAL, 2 * INTERVAL)), trial.way.newest(trial.folder))
        trial.until(lambda: trial.way.newest(trial.folder) >= after and trial.is_saving(), 0.001)
        time.sleep(rng.random() * 0.05)
    elif phase == "evaluating":
        trial.until(trial.iterations(EVALUATION), 0.001)
        time.sleep(rng.random() * 0.05)
    else:
        trial.until(trial.iterations(rng.randrange(1, ITERATIONS - 4)))
        time.sleep(rng.random() * 0.1)
    assert trial.process is not None
    return trial.process.poll() is None


def kill(trial: Trial, phase: str) -> None:
    """SIGKILL of a rank; the others must name it, and end."""
    rank = -1

    def strike() -> bool:
        nonlocal rank
        rank = trial.rng.randrange(trial.way.ranks)
        return _kill_rank(trial, rank)

    def judge() -> None:
        if trial.way.ranks > 1:
            _require_named(trial, rank)

    _again_and_again(trial, phase, strike, judge)


def kill_launcher(trial: Trial, phase: str) -> None:
    """SIGKILL of the agent that has started the ranks, which must end with it."""

    def strike() -> bool:
        launcher = trial.launcher()
        return launcher is not None and trial.send(signal.SIGKILL, launcher)

    _again_and_again(trial, phase, strike)


def kill_worker(trial: Trial, phase: str) -> None:
    """SIGKILL of a process that prepares data, as for want of memory: the run must name it, and end."""

    def strike() -> bool:
        trial.until(lambda: bool(_workers(trial)), 0.001)  # a tool has them for a moment only
        found = _workers(trial)
        return bool(found) and trial.send(signal.SIGKILL, trial.rng.choice(found))

    def judge() -> None:
        ended = trial.process and trial.process.returncode
        if ended and not re.search(r"DataLoader worker|a worker process was killed", trial.told()):
            raise FaultError("unnamed", f"a worker: {trial.told()[-1000:]}")

    _again_and_again(trial, "training" if phase == "starting" else phase, strike, judge)


def _workers(trial: Trial) -> list[psutil.Process]:
    """Return the processes that prepare data."""
    found = [child for rank in trial.ranks() for child in _children(rank)]
    return found if trial.way.progress is None else [each for each in found if _loads(each)]


def _children(process: psutil.Process) -> list[psutil.Process]:
    with contextlib.suppress(psutil.Error):
        return process.children()
    return []


def _loads(process: psutil.Process) -> bool:
    """Return whether it is a worker of a loader, by the name that torch gives it."""
    with contextlib.suppress(psutil.Error):
        return process.name() == "pt_data_worker"
    return False


def _again_and_again(
    trial: Trial, phase: str, strike: Callable[[], bool], judge: Callable[[], None] = lambda: None
) -> None:
    """Strike a run in a phase, let it go on and strike again; then let it come to its end.

    Args:
        strike: harms the run; returns whether it did.
        judge: looks at how a run that was harmed has ended.
    """
    for _ in range(_times(trial, phase)):
        trial.start()
        harmed = until(trial, phase) and strike()
        trial.end()
        if harmed:
            judge()
        trial.check()
        if trial.is_over():
            break
    trial.untraced()
    trial.finish()


def _times(trial: Trial, phase: str) -> int:
    """Draw how often it happens: again where the run has gone on and comes to that phase again."""
    return trial.rng.randint(1, trial.most) if phase in ("starting", "training", "saving", "anywhere") else 1


def _kill_rank(trial: Trial, rank: int) -> bool:
    found = trial.ranks()
    if rank >= len(found):
        return False
    return trial.send(signal.SIGKILL, found[rank])


def _require_named(trial: Trial, rank: int) -> None:
    if not re.search(_DEAD.format(rank), trial.told()) and trial.process and trial.process.returncode:
        raise FaultError("unnamed", f"rank {rank}: {trial.told()[-1000:]}")


def kill_writer(trial: Trial, phase: str) -> None:
    """SIGKILL of a process that writes a checkpoint, as for want of memory: the run must say so and end."""
    trial.start()
    killed = []

    def writes() -> bool:
        found = [child for rank in trial.ranks() for child in _children(rank) if not _loads(child)]
        killed.extend(child for child in found if trial.send(signal.SIGKILL, child))
        return bool(killed)

    trial.until(lambda: trial.way.newest(trial.folder) >= trial.rng.choice((0, INTERVAL)))
    trial.until(writes, 0.0005)
    code = trial.end()
    if killed and not code and trial.way.newest(trial.folder) < ITERATIONS:
        raise FaultError("unnamed", "a killed writer")
    if trial.way.own:
        trial.untraced()
    trial.finish()


def restart(trial: Trial, phase: str) -> None:
    """SIGKILL of a rank under --max-restarts: the agent starts all again, and the run ends as it should."""
    trial.start(restarts=3)
    for _ in range(trial.rng.randint(1, 2)):
        if until(trial, phase):
            _kill_rank(trial, trial.rng.randrange(trial.way.ranks))
            time.sleep(0.5)
    if code := trial.end():
        raise FaultError("lost", f"not restarted: exit code {code}: {trial.told()[-2000:]}")
    trial.judge()


def signals(trial: Trial, phase: str) -> None:
    """SIGINT, SIGTERM or SIGHUP, to everything, as a terminal sends it, or to the first process alone."""
    number = trial.rng.choice((signal.SIGINT, signal.SIGTERM, signal.SIGHUP))
    saves = trial.way.progress is not None and trial.way.own and trial.rng.random() < 0.4
    _signal(trial, phase, number, ["--exit-signal-handler"] if saves else [])


def terminate(trial: Trial, phase: str) -> None:
    """SIGTERM, as a batch system sends it."""
    _signal(trial, phase, signal.SIGTERM)


def hang_up(trial: Trial, phase: str) -> None:
    """SIGHUP, as a terminal that is closed sends it."""
    _signal(trial, phase, signal.SIGHUP)


def _signal(trial: Trial, phase: str, number: signal.Signals, more: Sequence[str] = ()) -> None:
    trial.start(*more)
    if until(trial, phase):
        first = trial.launcher()
        for each in trial.processes() if trial.rng.random() < 0.5 else [first] if first else []:
            trial.send(number, each)
    trial.end()
    trial.untraced()
    trial.finish()


def freeze(trial: Trial, phase: str) -> None:
    """SIGSTOP of everything for seconds, as a machine that is put to sleep; then it goes on."""
    trial.start()
    if until(trial, phase):
        stopped = trial.processes()
        for number in (signal.SIGSTOP, signal.SIGCONT):
            for each in stopped:
                trial.send(number, each)
            time.sleep(trial.rng.uniform(0.5, 3))
    _require_unharmed(trial)


def full_disk(trial: Trial, phase: str) -> None:
    """From a write on, any of them, every write fails: no space left on device."""
    trial.start(FAULT_FULL_AT=str(round(trial.rng.uniform(1, 18) ** 2)))
    code = trial.end()
    if code == 0 and trial.way.progress and trial.way.newest(trial.folder) < ITERATIONS:
        raise FaultError("unnamed", "a disk that is full")
    if trial.way.own:
        trial.untraced()
    trial.finish()


def slow_disk(trial: Trial, phase: str) -> None:
    """Each write takes up to 30 ms longer."""
    trial.start(FAULT_SLOW_US=str(trial.rng.randint(1_000, 30_000)))
    _require_unharmed(trial)


def clock(trial: Trial, phase: str) -> None:
    """The wall clock jumps by minutes to years, forwards or back."""
    seconds = trial.rng.choice((60, 3600, 86_400, 400 * 86_400)) * trial.rng.choice((-1, 1))
    trial.start(FAULT_CLOCK_S=str(seconds), FAULT_AFTER_MS=str(trial.rng.randint(1, 3000)))
    _require_unharmed(trial)


def _require_unharmed(trial: Trial) -> None:
    if code := trial.end():
        raise FaultError("lost", f"exit code {code}: {trial.told()[-2000:]}")
    trial.untraced()
    trial.judge()


def starve(trial: Trial, phase: str) -> None:
    """Few open files, from the start on or later: what cannot be opened ends the run, in whatever place."""
    trial.start()
    early = trial.rng.random() < 0.5
    trial.until((lambda: trial.launcher() is not None) if early else trial.iterations(1), 0.0005)
    limit = trial.rng.randint(12, 60)
    for each in trial.processes():
        with contextlib.suppress(psutil.Error):
            each.rlimit(resource.RLIMIT_NOFILE, (limit, limit))
    trial.end()
    trial.finish()


def corrupt(trial: Trial, phase: str) -> None:
    """The newest checkpoint spoilt: refused, then passed over on demand."""
    trial.start("--exit-interval", str(2 * INTERVAL + 1))
    trial.end()
    save = trial.folder / "save"
    newest = checkpoint_files.directory(save, checkpoint_files.iterations(save)[-1])
    told = _spoil(trial, newest, ("flip", "cut", "remove"))
    trial.start()
    if trial.end() == 0:
        raise FaultError("lost", f"loaded after {told}")
    trial.untraced()
    if trial.way.name == "train":  # its line says what to do
        (save / checkpoint_files.TRACKER).write_text(str(checkpoint_files.iterations(save)[-2]))
        trial.start()
    else:
        trial.start("--load-last-good")
    if code := trial.end():
        raise FaultError("lost", f"not from the one before: exit code {code}: {trial.told()[-2000:]}")
    if newest.exists() and checksums.damaged(newest):
        shutil.rmtree(newest)  # not saved anew
    trial.judge()


def corrupt_source(trial: Trial, phase: str) -> None:
    """A checkpoint that a command reads spoilt, or a stranger's pickle in it: refused in one line."""
    trial.way.command(trial.folder)  # puts it there
    source = trial.folder / "source"
    place = checkpoint_files.newest(source)
    assert place is not None
    whole = trial.folder / "whole"
    shutil.copytree(place, whole)
    told = _spoil(trial, place, ("flip", "cut", "remove", "pickle"))
    trial.start()
    code = trial.end()
    if (trial.folder / "mark").exists():
        raise FaultError("executed", told)
    trial.untraced()
    if code != 2:
        raise FaultError("lost", f"exit code {code} after {told}: {trial.told()[-2000:]}")
    shutil.rmtree(place)
    whole.rename(place)
    trial.finish()


def _spoil(trial: Trial, place: Path, ways: Sequence[str]) -> str:
    """Spoil a file of a checkpoint, and return which one and how.

    A stranger's pickle has no checksums beside it.
    """
    rng = trial.rng
    files = sorted(path for path in place.rglob("*") if path.is_file() and path.name != checksums.NAME)
    path, how = rng.choice(files), rng.choice(ways)
    content = bytearray(path.read_bytes())
    if how == "flip":
        content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
        path.write_bytes(content)
    elif how == "cut":
        path.write_bytes(content[: rng.randrange(len(content))])
    elif how == "remove":
        path.unlink()
    else:
        (place / checksums.NAME).unlink()
        path.write_bytes(pickle.dumps(Runs(trial.folder / "mark"), rng.randrange(6)))
    return f"{how} of {path.name}"


def second(trial: Trial, phase: str) -> None:
    """A second run into the same folder: refused in one line; the first does not notice."""
    trial.start()
    trial.until(trial.iterations(1))
    other = trial.start(aside="second-")
    code = trial.wait(other)
    told = (trial.folder / "second-errors.txt").read_text() + (trial.folder / "second-log.txt").read_text()
    unharmed = trial.process is not None and trial.process.poll() is None
    if "another run is writing to --save" not in told and unharmed:
        raise FaultError("unnamed", f"a second run: exit code {code}: {told[-1500:]}")
    _require_unharmed(trial)


Harm = Callable[[Trial, str], None]
KILLS: tuple[Harm, ...] = (kill, kill_launcher, kill_writer, kill_worker, restart)
BY_SIGNAL: tuple[Harm, ...] = (signals, terminate, hang_up, freeze)
AT_A_PHASE: tuple[Harm, ...] = (kill, kill_launcher, kill_worker, restart, signals, freeze)
EVERYWHERE: tuple[Harm, ...] = (kill, kill_worker, signals, full_disk, freeze)
OTHERS: tuple[Harm, ...] = (
    *(signals, freeze, full_disk, slow_disk, clock, starve, corrupt, corrupt_source, second),
)
