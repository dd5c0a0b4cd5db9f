"""Run steps of several programs in turn: while one takes a step, the others wait.

The speed of a shared machine drifts by tens of percent within minutes. Programs that run one after the other
meet different conditions; programs whose steps alternate meet the same, and a ratio is that of neighbouring
steps.

A program creates a ``Turn`` and calls ``take`` at the same place in each step. The other side is ``measure``,
which starts the programs, one after the other, and assigns the turns.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import statistics
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

_ADDRESS = "BENCHMARK_TURNS"  # of the socket, in the environment of the programs
_LONGEST = 900.0  # seconds from a turn to the next: a first step compiles
_LOOK = 0.5  # seconds between two looks at whether a program that is waited for lives


class Turn:
    """This process's place in the rotation; outside ``measure`` it never waits."""

    def __init__(self) -> None:
        address = os.environ.get(_ADDRESS)
        self._socket = socket.socket(socket.AF_UNIX) if address else None
        if self._socket:
            self._socket.connect(address)

    def take(self) -> None:
        """Report that a step has ended, and wait until the next one may begin."""
        if self._socket:
            self._socket.sendall(b".")
            if not self._socket.recv(1):
                raise SystemExit("the benchmark process that assigns the turns has exited")


@dataclass
class Program:
    """A program that takes steps: one process, or the ranks of a launcher.

    Attributes:
        name: its name in the results.
        command: the command to start.
        environment: changes to this process's environment for it; None removes a name.
        ranks: number of processes that take each turn together.
        before: number of warm-up steps, which it takes without turns.
        seconds: the time of each measured step.
        said: the last line of its output, parsed from JSON.
    """

    name: str
    command: Sequence[str]
    environment: Mapping[str, str | None] = field(default_factory=dict)
    ranks: int = 1
    before: int = 2
    seconds: list[float] = field(default_factory=list)
    said: Any = None


def measure(programs: Sequence[Program], steps: int) -> None:
    """Let programs take steps in turn; fill in ``seconds`` and ``said``.

    Each must call ``Turn.take`` in ``before + steps`` steps, in all its ranks, and then end.

    Raises:
        RuntimeError: a program ended early, or took too long.
    """
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        running = [stack.enter_context(_started(program, Path(folder))) for program in programs]
        for number in range(steps):
            # forward and backward in turn, so that no program always follows the same one
            for one in running if number % 2 == 0 else reversed(running):
                one.program.seconds.append(one.step())
        for one in running:
            one.finish()


def ratios(of: Program, to: Program) -> list[float]:
    """Return the speed-up of each step of a program over the neighbouring step of the other."""
    return [b / a for a, b in zip(of.seconds, to.seconds, strict=True)]


def ratio(of: Program, to: Program) -> float:
    """Return the median of these ratios."""
    return statistics.median(ratios(of, to))


class _Running:
    """A started program, and the connections to its ranks."""

    def __init__(self, program: Program, process: subprocess.Popen[str], output: Path) -> None:
        self.program = program
        self._process = process
        self._output = output
        self._ranks: list[socket.socket] = []

    def meet(self, server: socket.socket) -> None:
        """Wait until the ranks have connected and completed the first steps."""
        server.settimeout(_LOOK)
        end = time.monotonic() + _LONGEST
        while len(self._ranks) < self.program.ranks:
            try:
                rank, _ = server.accept()
            except TimeoutError:
                self._look(end)
            else:
                rank.settimeout(_LOOK)
                self._ranks.append(rank)
        self._hear()
        for _ in range(self.program.before - 1):
            self.step()

    def step(self) -> float:
        """Let the ranks take a step; return its seconds."""
        begin = time.perf_counter()
        self._go()
        self._hear()
        return time.perf_counter() - begin

    def finish(self) -> None:
        """Let the program end, and read its output."""
        self._go()
        if self._process.wait(_LONGEST):
            raise RuntimeError(f"{self.program.name} ended with exit code {self._process.returncode}")
        lines = self._output.read_text(encoding="utf-8").strip().splitlines()
        self.program.said = json.loads(lines[-1]) if lines else None

    def end(self) -> None:
        for rank in self._ranks:
            rank.close()
        if self._process.poll() is None:
            self._process.terminate()
            self._process.wait()

    def _go(self) -> None:
        try:
            for rank in self._ranks:
                rank.sendall(b".")
        except BrokenPipeError:
            raise RuntimeError(f"{self.program.name} ended early (for want of memory?)") from None

    def _hear(self) -> None:
        end = time.monotonic() + _LONGEST
        for rank in self._ranks:
            while True:
                try:
                    heard = rank.recv(1)
                except TimeoutError:
                    self._look(end)
                    continue
                if not heard:
                    raise RuntimeError(f"{self.program.name} has fewer steps than the others")
                break

    def _look(self, end: float) -> None:
        """Check that the program still runs and has not exceeded its time."""
        if self._process.poll() is not None:
            raise RuntimeError(f"{self.program.name} ended early, with exit code {self._process.returncode}")
        if time.monotonic() > end:
            raise RuntimeError(f"{self.program.name} has taken no step for {_LONGEST:.0f} s")


@contextlib.contextmanager
def _started(program: Program, folder: Path) -> Iterator[_Running]:
    """Start a program and let it take its first steps; end it with the context."""
    address = folder / f"{len(list(folder.iterdir()))}.socket"
    output = address.with_suffix(".out")
    # Warm: bytecode is there, as on a user's machine from the second start on.
    wanted = {"PYTHONDONTWRITEBYTECODE": None, **program.environment, _ADDRESS: str(address)}
    environment = {name: value for name, value in {**os.environ, **wanted}.items() if value is not None}
    with socket.socket(socket.AF_UNIX) as server, output.open("w") as out:
        server.bind(str(address))
        server.listen()
        process = subprocess.Popen(program.command, env=environment, stdout=out, text=True)
        running = _Running(program, process, output)
        try:
            running.meet(server)
            yield running
        finally:
            running.end()
