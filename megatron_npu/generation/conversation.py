"""Run an interactive conversation: read prompts one by one, and print each continuation as it is
generated.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable

from megatron_npu import watchdog
from megatron_npu.base.errors import UsageError
from megatron_npu.generation.sampling.growing_text import GrowingText
from megatron_npu.generation.sampling.leader import Leader
from megatron_npu.generation.sampling.options import Options
from megatron_npu.generation.sampling.sampler import Sample
from megatron_npu.generation.trained_model import TrainedModel

QUESTION = "Context prompt (stop to exit) >>> "  # as Megatron's own script asks
_STOP = "stop"


def talk(model: TrainedModel, leader: Leader, options: Options) -> None:
    """Read prompts from standard input, and print each continuation.

    The conversation ends at ``stop`` or at the end of the input.

    If a prompt is too long, a message is printed and the next prompt is read. Ctrl-C stops the generation of
    the current text.
    """
    _edit_lines()
    while (prompt := _asked()) is not None:
        try:
            _answer(model, leader, options, prompt)
        except UsageError as error:
            print(error)
        except KeyboardInterrupt:
            print(" (interrupted)")


def _edit_lines() -> None:
    """Enable line editing if Python supports it.

    Bytes that are not UTF-8 are accepted here and reported later.
    """
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  # input() uses it from then on
    for stream in (sys.stdin, sys.stdout):
        with contextlib.suppress(AttributeError):  # of another kind, in a test say
            stream.reconfigure(errors="surrogateescape")  # type: ignore[union-attr]


def _asked() -> str | None:
    """Read a prompt and return it, or return None at the end of the input."""
    try:
        with watchdog.phase(watchdog.WAITING):
            prompt = input(QUESTION)
    except (EOFError, KeyboardInterrupt):
        print()
        return None
    return None if prompt.strip() == _STOP else prompt


def _answer(model: TrainedModel, leader: Leader, options: Options, prompt: str) -> None:
    """Print the model's continuation of a prompt, one piece at a time."""
    ids = model.prompt(prompt)
    text = GrowingText(model.tokenizer, ids)
    print(prompt, end="", flush=True)
    leader.sample([ids], options, _printer(text))
    print(text.rest())


def _printer(text: GrowingText) -> Callable[[int, Sample], bool]:
    def watch(place: int, sample: Sample) -> bool:
        print(text.added(sample.tokens), end="", flush=True)
        return False

    return watch
