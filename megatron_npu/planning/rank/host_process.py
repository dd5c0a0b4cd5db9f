"""Fork processes for the ranks of a plan.

It is started as ``python -m megatron_npu.planning.rank.host_process DEVICE FD WORDS...``.

Every rank of a plan imports torch, Megatron and the program's own modules, which takes longer than a dry run
of most models. This process imports them once. The host then receives requests on the socket FD (see
``planning.hosts``), forks for each one, and sends back the exit status of the fork.
"""

from __future__ import annotations

import ast
import contextlib
import gc
import importlib
import json
import os
import select
import signal
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

from megatron_npu.base import settings
from megatron_npu.process import python_child

_LOOKING = 0.5  # seconds between two looks for a parent that has ended
_WAITING = 0.05  # seconds between two looks for forks that have ended
_IMPORTS = {"pretrain": "megatron_npu.pretrain.run.pretrain", "train": "megatron_npu.finetune.run.command"}
_OF_RANKS = (
    *("before_training", "exchanged_batches", "measurements", "npu", "process_groups", "program_lines"),
    *("routing", "stage_shapes", "uneven_shards"),
)


def main(device: str, descriptor: str, *start: str) -> int:
    """Import the modules that ranks on ``device`` need, and serve requests until the parent process ends."""
    channel = socket.socket(fileno=int(descriptor))
    with _ending_with(channel):
        prepared = _imported(device, start) and len(os.listdir("/proc/self/task")) == 1
    gc.collect()
    gc.freeze()  # what is imported needs no collection in the forks, and is no part of their models
    waiting: dict[int, socket.socket] = {}  # by the process that runs for it
    while True:
        pause = _WAITING if waiting else None
        for ready in select.select([channel, *waiting.values()], [], [], pause)[0]:
            if ready is channel:
                text, files, *_ = socket.recv_fds(channel, 1 << 16, 1)
                if not text:
                    return _end(waiting)
                asker = socket.socket(fileno=files[0])
                child = os.fork()
                if not child:
                    for each in (channel, asker, *waiting.values()):
                        each.close()
                    _run(device, json.loads(text), prepared)
                waiting[child] = asker
            else:  # nobody waits for this rank any more
                os.kill(next(child for child, asker in waiting.items() if asker is ready), signal.SIGKILL)
        for child in tuple(waiting):
            ended, status = os.waitpid(child, os.WNOHANG)
            if ended:
                _answer(waiting.pop(child), os.waitstatus_to_exitcode(status))


@contextlib.contextmanager
def _ending_with(channel: socket.socket) -> Iterator[None]:
    """End this process inside the ``with`` block as soon as the channel is closed, without a thread.

    The imports take seconds, in which nobody reads the channel.
    """

    def look(number: int, frame: FrameType | None) -> None:
        if any(events & select.POLLHUP for _, events in poll.poll(0)):
            os._exit(1)

    poll = select.poll()
    poll.register(channel, select.POLLHUP)
    before = signal.signal(signal.SIGALRM, look)
    signal.setitimer(signal.ITIMER_REAL, _LOOKING, _LOOKING)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def _answer(asker: socket.socket, code: int) -> None:
    with asker, contextlib.suppress(OSError):  # it has not waited
        asker.sendall(str(code).encode())


def _end(waiting: dict[int, socket.socket]) -> int:
    for child in waiting:
        os.kill(child, signal.SIGKILL)
    return 0


def _run(device: str, request: dict[str, Any], prepared: bool) -> None:
    """Run a rank in this forked process.

    If the imports failed, use a new interpreter, which reports the same error as the real run.
    """
    try:
        log = os.open(request["log"], os.O_CREAT | os.O_WRONLY | os.O_TRUNC, 0o600)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.environ.update(request["environment"])
        module = f"megatron_npu.planning.rank.{device}"
        if not prepared:
            command = python_child.module(module, [request["specification"]])
            os.execv(command[0], command)
        if device == "npu":
            _tell_simulator()
        importlib.import_module(module).main(request["specification"])
    except BaseException:
        sys.excepthook(*sys.exc_info())
    sys.stderr.flush()
    os._exit(1)


def _tell_simulator() -> None:
    """Pass the settings of this rank to the simulator, which reads most of them when it first uses them."""
    from megatron_npu.sim import build
    from megatron_npu.sim.settings import simulator_values

    runtime = build.runtime_library()
    for name, value in simulator_values().items():
        runtime.sim_set(name.encode(), value.encode())


def _imported(device: str, start: tuple[str, ...]) -> bool:
    """Import the modules that a rank needs, in the order in which a rank imports them.

    Return False if an import fails.
    """
    try:
        if device != "npu":  # Megatron must be imported after its devices have been replaced
            importlib.import_module(f"megatron_npu.planning.rank.{device}")
            return True
        for name in ("torch", "torch_npu", "megatron_npu.commands.cli"):
            importlib.import_module(name)
        for name in _OF_RANKS:
            importlib.import_module(f"megatron_npu.planning.rank.{name}")
        if start[0] in _IMPORTS:
            importlib.import_module(_IMPORTS[start[0]])
        elif not settings.REDIRECT.enabled():  # which changes what a script's imports see
            _import_as(Path(start[1]))
    except Exception:
        return False
    return True


def _import_as(script: Path) -> None:
    """Import the modules that a script imports, using the search path of ``megatron-npu run``."""
    from megatron_npu import plugin
    from megatron_npu.commands import run

    plugin.install()
    run.search_for(script.resolve())
    for name in modules_of(script.read_text(encoding="utf-8")):
        importlib.import_module(name)


def modules_of(source: str) -> list[str]:
    """Return the modules that a script imports before its first statement with side effects.

    Such a statement, as ``sys.path.append(...)`` or ``os.environ["X"] = "1"``, may change what later imports
    do.
    """
    names: list[str] = []
    for statement in ast.parse(source).body:
        if isinstance(statement, ast.Import):
            names += [alias.name for alias in statement.names]
        elif isinstance(statement, ast.ImportFrom) and statement.module and not statement.level:
            names.append(statement.module)
        elif _reaches_out(statement):
            break
    return list(dict.fromkeys(names))


def _reaches_out(statement: ast.stmt) -> bool:
    if isinstance(statement, ast.Expr):
        return not isinstance(statement.value, ast.Constant)
    if isinstance(statement, ast.Assign):
        return not all(isinstance(target, ast.Name) for target in statement.targets)
    return isinstance(statement, ast.AugAssign | ast.Delete)


if __name__ == "__main__":
    if sys.argv[1] == "cuda":
        from megatron_npu.planning.fake_cuda import library

        library.load()  # before torch is imported
    sys.exit(main(*sys.argv[1:]))
