"""Define the engine, whose thread owns the model, takes jobs from a queue, and sends generated text to
clients.
"""

from __future__ import annotations

import asyncio
import queue
import sys
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch.distributed as dist

from megatron_npu import watchdog
from megatron_npu.base.errors import UsageError
from megatron_npu.generation.sampling.growing_text import GrowingText
from megatron_npu.generation.sampling.leader import Leader
from megatron_npu.generation.sampling.options import Options
from megatron_npu.generation.sampling.sampler import Sample
from megatron_npu.generation.sampling.scores import Score
from megatron_npu.generation.trained_model import TrainedModel
from megatron_npu.serving.completion_request import BadRequestError, in_words
from megatron_npu.serving.stops import Stops


@dataclass(frozen=True)
class Piece:
    """A piece of a generated text, with the characters that are new.

    Attributes:
        row: the index of the text.
        text: the new characters, which may be empty.
        sample: the whole text so far, which may be longer than the pieces sent.
        token: the index of the piece's token, or None if the piece contains only text that was held back.
        finish: the reason why the text ended (``stop`` or ``length``), or None if the text continues.
    """

    row: int
    text: str
    sample: Sample
    token: int | None = None
    finish: str | None = None


@dataclass(frozen=True)
class Read:
    """The scores of the prompts of a job.

    Attributes:
        scores: the scores, one per text.
    """

    scores: list[Score]


Event = Piece | Read | BadRequestError | None


@dataclass
class Job:
    """The job of generating the texts that one client has requested.

    Attributes:
        prompts: the ids of each prompt.
        options: the sampling options. If None, nothing is generated.
        stops: the strings that end a text.
        scored: the number of most likely tokens to return per prompt position. If None, the prompts are not
            scored.
        events: the queue of events: the scores of the prompts (if any), the pieces, and then None at the end
            or an error.
        loop: the event loop of the client's task.
        cancelled: set when the client has disconnected.
    """

    prompts: list[list[int]]
    options: Options | None
    stops: Sequence[str] = ()
    scored: int | None = None
    events: asyncio.Queue[Event] = field(default_factory=asyncio.Queue)
    loop: asyncio.AbstractEventLoop = field(default_factory=asyncio.get_running_loop)
    cancelled: bool = False

    def tell(self, event: Event) -> None:
        """Send an event to the task that serves the client. The engine's thread calls this method."""
        self.loop.call_soon_threadsafe(self.events.put_nowait, event)


class Engine:
    """The engine, which processes jobs one after another with the model.

    Args:
        model: the model that generates the texts.
        leader: the sampler for all ranks of the model.
        most_waiting: the maximum number of waiting jobs, in addition to the current one.

    Attributes:
        jobs, tokens: the number of completed jobs and of generated tokens.
    """

    def __init__(self, model: TrainedModel, leader: Leader, most_waiting: int) -> None:
        self.model, self._leader, self._most = model, leader, most_waiting
        self._queue: queue.SimpleQueue[Job | None] = queue.SimpleQueue()  # a signal handler may put into it
        self._open: set[int] = set()
        self._stopping = False
        self.jobs = self.tokens = 0

    @property
    def waiting(self) -> int:
        """The number of unfinished jobs, including the one that is being processed."""
        return len(self._open)

    def submit(self, job: Job) -> None:
        """Add a job to the engine's queue.

        Raises:
            BadRequestError: too many jobs are waiting (429), or the server is stopping (503).
        """
        self.require_going()
        if len(self._open) > self._most:
            raise BadRequestError(f"{self._most} requests are already waiting; try again later", status=429)
        self._open.add(id(job))
        self._queue.put(job)

    def require_going(self) -> None:
        """Raise an error if the server is stopping.

        Raises:
            BadRequestError: the server is stopping (503).
        """
        if self._stopping:
            raise _stopping()

    def stop(self) -> None:
        """Stop the current text at its next token, reject all waiting jobs, and make ``run`` return."""
        self._stopping = True
        self._queue.put(None)

    def run(self) -> None:
        """Process jobs until ``stop`` is called. Call it on rank 0, in the thread that loaded the model."""
        while (job := self._next()) is not None:
            self._finish(job)
        while not self._queue.empty():
            if (job := self._queue.get()) is not None:
                self._finish(job)

    def _next(self) -> Job | None:
        with watchdog.phase(watchdog.WAITING):
            return self._queue.get()

    def _finish(self, job: Job) -> None:
        """Generate the texts of a job, and report the end of the job even if an error occurs."""
        end: BadRequestError | None = None
        try:
            if self._stopping:
                end = _stopping()
            elif not job.cancelled:
                _Drawing(self, job).run(self._leader)
        except UsageError as error:
            end = in_words(error)
        except Exception:
            if dist.get_world_size() > 1:
                raise  # the ranks are no longer at the same place
            traceback.print_exc(file=sys.stderr)
            end = BadRequestError("the model failed; see the server's log for the cause", status=500)
        finally:
            self._open.discard(id(job))
            self.jobs += 1
            job.tell(end)

    def ends(self, job: Job) -> bool:
        """Return True if a job must end because its client has disconnected or the server is stopping."""
        return job.cancelled or self._stopping


class _Drawing:
    """A job that is running, with the pieces of its texts and the positions at which they stop."""

    def __init__(self, engine: Engine, job: Job) -> None:
        self.engine, self.job = engine, job
        self.texts = [GrowingText(engine.model.tokenizer, prompt) for prompt in job.prompts]
        self.stops = [Stops(job.stops) for _ in job.prompts]

    def run(self, leader: Leader) -> None:
        """Score the prompts and generate the requested texts, and report each piece and the end of each
        text.
        """
        prompts, options = self.job.prompts, self.job.options
        if self.job.scored is not None:
            self.job.tell(Read(leader.score(prompts, alternatives=self.job.scored)))
        if options is None:
            samples = [Sample(prompt) for prompt in prompts]
        else:
            samples = leader.sample(prompts, options, self._watch)
        for row, sample in enumerate(samples):
            rest = self.stops[row].passed(self.texts[row].rest())
            rest += "" if self.stops[row].found else self.stops[row].rest()
            cut = self.engine.ends(self.job) and not self.stops[row].found
            finish = "stop" if sample.finished and not cut else "length"
            self.job.tell(Piece(row, rest, sample, finish=finish))

    def _watch(self, row: int, sample: Sample) -> bool:
        self.engine.tokens += 1
        piece = self.stops[row].passed(self.texts[row].added(sample.tokens))
        self.job.tell(Piece(row, piece, sample, token=len(sample.tokens) - 1))
        return self.stops[row].found or self.engine.ends(self.job)


def _stopping() -> BadRequestError:
    return BadRequestError("the server is stopping", status=503)


def new_job(
    model: TrainedModel,
    prompts: list[list[int]],
    options: Options | None,
    stops: Sequence[str] = (),
    scored: int | None = None,
) -> Job:
    """Check that the prompts of a job fit the model, and return the job.

    Raises:
        BadRequestError: a prompt does not fit.
    """
    positions = model.sampler.positions
    for prompt in prompts:
        try:
            (model.sampler.check_text if options is None else model.sampler.check)(prompt)
        except UsageError as error:
            raise in_words(error, "prompt") from error
        if options is not None and len(prompt) + options.num_tokens > positions:
            raise BadRequestError(
                f"the prompt has {len(prompt)} tokens and max_tokens is {options.num_tokens}, which "
                f"together exceed the model's {positions} positions; reduce max_tokens or shorten the prompt",
                "max_tokens",
            )
    return Job(prompts, options, stops, scored)
