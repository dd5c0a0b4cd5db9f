"""One trial: a command of the user, and what became of it."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from tests.campaign.accounts.rooms import Room

REFUSED, DONE, EITHER = "refused", "done", "either"
FAULTS = ("executed", "silent", "orphan", "traceback", "hung", "unnamed", "crash", "denied", "control")
_CONTROL = ("\x1b", "\x07", "\x9b")  # characters on which a terminal acts
# a report may show a stack without its first line; that of SIGUSR1 has no comma behind the file
_STACK = re.compile(r"Traceback \(most recent|^\s*File \".+\", line \d+, in ", re.MULTILINE)
# of a launcher whose rank has crashed
_CRASHES = [
    128 + each for each in (signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGABRT)
]
_COUNTS = re.compile(
    r"number of skipped iterations|\d+ skipped \(for |^\d{4}-\d\d-\d\d:[\d:]+ +warning .*$", re.MULTILINE
)  # and warnings of lm-eval, which has one in most logs
_SETTLING = 8.0  # seconds in which children may end behind their parents, with a core for each process
_TOLD = 1500  # characters of what was said
# how the description of a signal ends when its trial has been made
IN_THE_MIDDLE, BEFORE = ", in the middle", ", it had ended before"


@dataclass(frozen=True)
class Try:
    """What is typed.

    Attributes:
        place: where the attack comes in, a row of the table.
        what: the attack.
        words: the arguments of ``megatron-npu``.
        expected: REFUSED: an error, DONE: success, EITHER.
        cwd: the working directory; None: the user's folder for temporary files.
        variables: of the environment, in addition; None removes one.
        prepare: what is done in the child, as the superuser.
        closed: descriptors that are closed.
        starts: whether the installed command is started; otherwise a fork that has imported the package.
        program: what is started in place of ``megatron-npu``.
        limit: seconds after which it counts as hung, on a machine with a core for each process.
        standard_input: a file.
        account: whose the command is; None: the user.
        groups: of the command.
    """

    place: str
    what: str
    words: list[str]
    expected: str = REFUSED
    cwd: Path | None = None
    variables: Mapping[str, str | None] = field(default_factory=dict)
    prepare: Callable[[], object] | None = None
    closed: tuple[int, ...] = ()
    starts: bool = True
    program: tuple[str, ...] = ()
    limit: float = 150.0
    standard_input: Path | None = None
    account: int | None = None
    groups: tuple[int, ...] = ()


class Verdict(NamedTuple):
    """What became of a trial: ``refused``, ``done``, or one of FAULTS."""

    place: str
    what: str
    verdict: str
    code: int | None
    seconds: float
    told: str


class Later(NamedTuple):
    """A trial that is made by a function, when it is its turn."""

    what: str
    make: Callable[[], Verdict]


def recorded(file: Path) -> set[tuple[str, str]]:
    """Return the place and the description of each trial in a file of ``--json``, or in the record."""
    rows = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines() if line.strip()]
    return {(_value(row, "place", "group"), _described(_value(row, "what", "trial"))) for row in rows}


def is_recorded(each: Try | Later | Verdict, known: set[tuple[str, str]]) -> bool:
    """Return whether a trial is among those that ``recorded`` has read; a function has no place yet."""
    if isinstance(each, Later):
        return each.what in {what for _, what in known}
    return (each.place, _described(each.what)) in known


def _value(row: dict[str, str], *names: str) -> str:
    return next(row[name] for name in names if name in row)


def _described(what: str) -> str:
    """Return the description that a trial had before it was made."""
    return what.removesuffix(IN_THE_MIDDLE).removesuffix(BEFORE)


def made(room: Room, given: Try) -> Verdict:
    """Make a trial."""
    room.marked()
    began = time.monotonic()
    code, is_hung = ended(started(room, given), given.limit)
    remaining = left(room)
    said, told = ((room.folder / name).read_text(errors="replace") for name in ("out.txt", "err.txt"))
    room.sweep()
    end = Ended(code, said, told, is_hung, bool(remaining))
    verdict = verdict_on(end, given.expected, room.marked())
    text = (told.strip() or said.strip())[-_TOLD:] + (f" left: {remaining}" if remaining else "")
    return Verdict(given.place, given.what, verdict, code, round(time.monotonic() - began, 1), text)


class Ended(NamedTuple):
    """How a command has ended, what it said, and whether it left a process."""

    code: int | None
    said: str
    told: str
    is_hung: bool = False
    has_left: bool = False


def verdict_on(end: Ended, expected: str, marks: list[str]) -> str:
    """Return the verdict on a command that has ended."""
    faults = {
        "executed": bool(marks),
        "hung": end.is_hung,
        "traceback": bool(_STACK.search(end.said + end.told)),
        "orphan": end.has_left,
        "crash": end.code is None or end.code < 0 or end.code in _CRASHES,
        "control": any(each in end.said + end.told for each in _CONTROL),
        "silent": end.code == 0 and expected == REFUSED and not _warns(end.said + end.told),
        "denied": end.code != 0 and expected == DONE,
        "unnamed": end.code not in (0, None) and not _names(end.told + end.said),
    }
    found = next((name for name, there in faults.items() if there), "")
    return found or ("refused" if end.code else "done")


def _warns(text: str) -> bool:
    """Return whether something is said; a training counts skipped iterations and patches in every log."""
    rest = _COUNTS.sub("", text.lower())
    return any(word in rest for word in ("warning", "skipped", "error"))


def _names(told: str) -> bool:
    """Return whether a line names the error, or a report the damage."""
    words = (
        "error",
        "missing",
        "damaged",
        "differs",
        "different content",
        "must",
        "cannot",
        "not a ",
        "no checksums",
        "megatron",
    )
    return any(word in line for line in told.splitlines() for word in words)


def started(room: Room, given: Try) -> int:
    """Start the command as the user; return its process."""
    for name in ("out.txt", "err.txt"):
        (room.folder / name).unlink(missing_ok=True)
    pid = os.fork()
    if pid:
        return pid
    try:
        _be(room, given)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(99)


def _be(room: Room, given: Try) -> None:
    """Become the command; does not return."""
    os.setsid()
    for number, name in ((1, "out.txt"), (2, "err.txt")):
        os.dup2(os.open(room.folder / name, os.O_CREAT | os.O_WRONLY | os.O_TRUNC, 0o666), number)
    os.dup2(os.open(given.standard_input or os.devnull, os.O_RDONLY), 0)
    os.chdir(given.cwd or room.temporary)
    if given.prepare:
        given.prepare()
    merged = {**room.environment(), **given.variables}
    variables = {name: value for name, value in merged.items() if value is not None}
    room.become(room.user if given.account is None else given.account, given.groups)
    for number in given.closed:
        os.close(number)
    if given.starts:
        program = given.program or installed()
        os.execvpe(program[0], [*program, *given.words], variables)
    _run_here(given.words, variables)


def installed() -> tuple[str, ...]:
    """Return what starts ``megatron-npu``."""
    program = Path(sys.executable).with_name("megatron-npu")
    return (str(program),) if program.exists() else (sys.executable, "-P", "-m", "megatron_npu")


def _run_here(words: list[str], variables: dict[str, str]) -> None:
    """Run a command in this fork, which has imported the package, and end."""
    import atexit
    import tempfile

    from megatron_npu.commands import cli

    os.environ.clear()
    os.environ.update(variables)
    os.umask(0o022)
    tempfile.tempdir = None
    sys.argv = [*installed()[-1:], *words]
    try:
        code: object = cli.main(list(words))
    except SystemExit as error:
        code = error.code
        if isinstance(code, str):
            print(code, file=sys.stderr)
            code = 1
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code if isinstance(code, int) else 0)


def ended(pid: int, limit: float) -> tuple[int | None, bool]:
    """Wait for a process; return its exit code, and whether it had to be killed."""
    began = time.monotonic()
    while True:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status), False
        if time.monotonic() - began > limit * slowness():
            with contextlib.suppress(OSError):
                os.killpg(pid, 9)
            os.waitpid(pid, 0)
            return None, True
        time.sleep(0.05)


def slowness() -> float:
    """Return how many times longer than alone a process may take here now."""
    return max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))


def left(room: Room) -> dict[int, str]:
    """Return the processes that do not end behind the command."""
    began = time.monotonic()
    while (found := room.processes()) and time.monotonic() - began < _SETTLING * slowness():
        time.sleep(0.05)
    return found
