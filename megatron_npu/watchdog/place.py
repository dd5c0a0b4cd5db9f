"""Read the main thread's position from its stack, in another thread and without slowing the main thread
down.
"""

from __future__ import annotations

import sys
import threading
import time
from dataclasses import dataclass
from types import FrameType

from megatron_npu.watchdog import phases

_COLLECTIVES = "torch.distributed.distributed_c10d"
_PATIENT = ("megatron_npu.checkpoint_files.patience", "wait_for_others")  # waits without a collective
_SHOWN = 12  # innermost frames
# Rooms of this package whose functions stand between a run and what it calls: they are not named.
_BENEATH = frozenset("adaptors devices ops patching standins watchdog".split())
# What a function of Megatron's own scripts means, where no phase was entered; the outermost counts.
_UPSTREAM: dict[str, phases.Name] = {
    "save_checkpoint": "saving",
    "maybe_finalize_async_save": "saving",
    "evaluate": "evaluating",
    "load_checkpoint": "loading",
    "train_step": "training",
    "train": "between two steps",
}
# Python's and IPython's debuggers and prompts, which run what a person types.
_PROMPTS = frozenset("IPython _pyrepl bdb code pdb".split())
# Servers in the main thread, such as Flask's: they wait for a request where the innermost frame is theirs.
_SERVERS = frozenset("asyncio socketserver".split())
_WAIT = "selectors"  # in which they do so


@dataclass(frozen=True)
class Place:
    """A description of the position of a thread in the program.

    Attributes:
        phase: the phase of the run; see ``phases``.
        collective: the torch.distributed function that the thread is executing, or empty if there is none.
        call: the innermost function of Megatron or of a command, as ``module:line in function``.
        frames: the thread's stack frames, innermost first.
        mark: a value that changes if the thread has moved, or has computed for 0.1 s.
        outside: whether the thread waits for a person, which may take any amount of time.
    """

    phase: phases.Name
    collective: str
    call: str
    frames: tuple[str, ...]
    mark: tuple[object, ...]
    outside: bool = False

    def __str__(self) -> str:
        within = f"in {self.collective}, called " if self.collective else ""
        return f"{self.phase}, {within}at {self.call}" if self.call else self.phase


def of_main_thread() -> Place:
    """Return the position of the main thread of this process."""
    main = threading.main_thread()
    frame = sys._current_frames().get(main.ident or 0)
    frames = []
    while frame is not None:
        frames.append(frame)
        frame = frame.f_back
    used = time.clock_gettime(time.pthread_getcpuclockid(main.ident or 0))
    phase = phases.current() or _upstream_phase(frames)
    return Place(
        phase,
        next((each.f_code.co_name for each in reversed(frames) if _waits_for_others(each)), ""),
        next((_said(each) for each in frames if _is_of_the_run(each)), ""),
        tuple(_said(each) for each in frames[:_SHOWN]),
        (round(used, 1), *((id(each.f_code), each.f_lasti) for each in frames)),
        phase == phases.WAITING or _waits_for_people(frames),
    )


def _waits_for_people(frames: list[FrameType]) -> bool:
    """Return True if the process waits for people, such as a server for requests or a prompt for input."""
    if not frames or "pydevd" in sys.modules:  # a plain prompt has no frame; editors hide theirs
        return True
    tops = [_module(each).partition(".")[0] for each in frames]
    waits = next((top for top in tops if top != _WAIT), "")
    return waits in _SERVERS or not _PROMPTS.isdisjoint(tops)


def _upstream_phase(frames: list[FrameType]) -> phases.Name:
    named = [
        _UPSTREAM[each.f_code.co_name]
        for each in frames
        if each.f_code.co_name in _UPSTREAM and _module(each).startswith("megatron.")
    ]
    inner = [phase for phase in named if phase != "between two steps"]
    return inner[-1] if inner else named[0] if named else "starting"


def _waits_for_others(frame: FrameType) -> bool:
    module = _module(frame)
    return module == _COLLECTIVES or (module, frame.f_code.co_name) == _PATIENT


def _is_of_the_run(frame: FrameType) -> bool:
    package, _, rest = _module(frame).partition(".")
    return package == "megatron" or (package == "megatron_npu" and rest.partition(".")[0] not in _BENEATH)


def _module(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", ""))


def _said(frame: FrameType) -> str:
    return f"{_module(frame)}:{frame.f_lineno} in {frame.f_code.co_name}"
