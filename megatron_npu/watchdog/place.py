"""Where the main thread of this process stands: read from its stack by another thread, at no cost to it."""

from __future__ import annotations

import sys
import threading
import time
from dataclasses import dataclass
from types import FrameType

_COLLECTIVES = "torch.distributed.distributed_c10d"
_SHOWN = 12  # innermost frames
_PHASED = (
    "megatron.",
    "megatron_npu.training.loop",
    "megatron_npu.training.checkpoint",
    "megatron_npu.acceleration.loop",
)
# What a function of theirs means for the run; the outermost that is on the stack counts.
_PHASES = {
    "save_checkpoint": "saving",
    "_save": "saving",
    "maybe_finalize_async_save": "saving",
    "_export": "saving",
    "evaluate": "evaluating",
    "_evaluate": "evaluating",
    "_validate": "evaluating",
    "_sample": "evaluating",
    "_test": "evaluating",
    "load_checkpoint": "loading",
    "load": "loading",
    "train_step": "training",
    "_step": "training",
    "_iterate": "between two steps",
    "train": "between two steps",
}
# Who is in one of these waits for people: at a debugger's or an interpreter's prompt, or for a request.
_OUTSIDE = ("IPython", "_pyrepl", "asyncio", "bdb", "code", "pdb", "socketserver")
_INPUT = "megatron_npu.watchdog.prompt"


@dataclass(frozen=True)
class Place:
    """What a thread is doing.

    Attributes:
        phase: of the run: training, evaluating, saving, loading, …
        collective: the function of torch.distributed that it is in; empty: none.
        call: the innermost function of Megatron, the driver or `train`, as ``module:line in function``.
        frames: the innermost frames, the last one first.
        mark: differs from an earlier one if the thread has moved meanwhile, or has computed for 0.1 s.
        outside: whether it waits for people, who may take as long as they like.
    """

    phase: str
    collective: str
    call: str
    frames: tuple[str, ...]
    mark: tuple[object, ...]
    outside: bool = False

    def __str__(self) -> str:
        within = f"in {self.collective}, called " if self.collective else ""
        return f"{self.phase}, {within}at {self.call}" if self.call else self.phase


def of_main_thread() -> Place:
    """Return where the main thread of this process stands."""
    main = threading.main_thread()
    frame = sys._current_frames().get(main.ident or 0)
    frames = []
    while frame is not None:
        frames.append(frame)
        frame = frame.f_back
    used = time.clock_gettime(time.pthread_getcpuclockid(main.ident or 0))
    return Place(
        _phase(frames),
        next((each.f_code.co_name for each in reversed(frames) if _module(each) == _COLLECTIVES), ""),
        next((_said(each) for each in frames if _is_of_the_run(each)), ""),
        tuple(_said(each) for each in frames[:_SHOWN]),
        (round(used, 1), *((id(each.f_code), each.f_lasti) for each in frames)),
        _waits_for_people(frames),
    )


def _waits_for_people(frames: list[FrameType]) -> bool:
    """Return whether a server waits for requests, or a prompt or a debugger for a user."""
    if not frames or "pydevd" in sys.modules:  # a plain prompt has no frame; editors hide theirs
        return True
    modules = {_module(each) for each in frames}
    return _INPUT in modules or any(module.partition(".")[0] in _OUTSIDE for module in modules)


def _phase(frames: list[FrameType]) -> str:
    named = (_PHASES.get(each.f_code.co_name) for each in frames if _module(each).startswith(_PHASED))
    found = [phase for phase in named if phase]
    inner = [phase for phase in found if phase != "between two steps"]
    return inner[-1] if inner else found[0] if found else "starting"


def _is_of_the_run(frame: FrameType) -> bool:
    module = _module(frame)
    return module.startswith(("megatron.", "megatron_npu.training.", "megatron_npu.acceleration."))


def _module(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", ""))


def _said(frame: FrameType) -> str:
    return f"{_module(frame)}:{frame.f_lineno} in {frame.f_code.co_name}"
