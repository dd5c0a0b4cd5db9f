"""Build the JSON responses of OpenAI's API: models, completions (whole or in chunks) and errors."""

from __future__ import annotations

import functools
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from megatron_npu.data.tokenization.tokenizer import Tokenizer
from megatron_npu.generation.sampling.growing_text import GrowingText
from megatron_npu.generation.sampling.sampler import Sample
from megatron_npu.generation.sampling.scores import Score
from megatron_npu.serving.completion_request import BadRequestError, CompletionRequest
from megatron_npu.serving.engine import Job, Piece, Read

Json = dict[str, Any]


def model(name: str, created: int, positions: int) -> Json:
    """Return the JSON description of the model."""
    about = {"id": name, "object": "model", "created": created, "owned_by": "megatron_npu"}
    return {**about, "max_model_len": positions}


def models(only: Json) -> Json:
    """Return the list of models, which has one entry."""
    return {"object": "list", "data": [only]}


def error(problem: BadRequestError) -> Json:
    """Return the JSON that describes an error to the client."""
    kind = "invalid_request_error" if problem.status < 500 and problem.status != 429 else "server_error"
    told = {"message": problem.message, "type": kind, "param": problem.param, "code": problem.status}
    return {"error": {key: _writable(value) for key, value in told.items()}}


def _writable(value: Any) -> Any:
    """Replace lone surrogates in a string, because UTF-8 cannot represent them.

    JSON can represent them, but UTF-8 cannot.
    """
    return value.encode("utf-8", "backslashreplace").decode("utf-8") if isinstance(value, str) else value


@dataclass
class Completion:
    """The response to one completion request.

    Attributes:
        request, job: the request, and the job that generates its texts.
        name: the name of the model.
        tokenizer: the tokenizer of the model.
        echoes: the prompt that begins each text if ``echo`` is set.
    """

    request: CompletionRequest
    job: Job
    name: str
    tokenizer: Tokenizer
    echoes: list[str]
    created: int = field(default_factory=lambda: int(time.time()))

    def __post_init__(self) -> None:
        self.id = f"{self.kinds[0]}-{uuid.uuid4().hex}"
        self.texts = list(self.echoes)
        self.samples: list[Sample | None] = [None] * len(self.texts)
        self.finishes: list[str | None] = [None] * len(self.texts)
        self.scores: list[Score] | None = None
        self.offsets = [Offsets(self.tokenizer, prompt) for prompt in self.job.prompts]

    @property
    def kinds(self) -> tuple[str, str, str]:
        """The prefix of the response's id, and the names of its object types for whole responses and for
        chunks.
        """
        return "cmpl", "text_completion", "text_completion"

    def add(self, event: Piece | Read) -> None:
        """Add a piece of text, or the scores of the prompts, to the response."""
        if isinstance(event, Read):
            self.scores = event.scores
            return
        self.texts[event.row] += event.text
        self.samples[event.row] = event.sample
        self.finishes[event.row] = event.finish or self.finishes[event.row]

    def whole(self) -> Json:
        """Return the whole response, after all pieces have been added."""
        choices = []
        for row, text in enumerate(self.texts):
            sample = self.samples[row]
            tokens = range(len(sample.logprobs)) if sample else range(0)
            choices.append(self._choice(row, text, sample, tokens, self.finishes[row], self._read(row)))
        return {**self._head(self.kinds[1]), "choices": choices, "usage": self.usage()}

    def opening(self) -> list[Json]:
        """Return the first chunks of a stream, which contain the prompts if the client requested them."""
        return self.echo() if self.request.echo and not self.request.scored else []

    def pieces(self, event: Piece | Read) -> list[Json]:
        """Return the chunks of a stream for one event: a prompt's scores or a piece of text."""
        if isinstance(event, Read):
            return self.echo()
        tokens = range(0)
        if event.token is not None:
            tokens = range(event.token, event.token + 1)
        elif event.finish:  # the end token
            tokens = range(len(event.sample.tokens), len(event.sample.logprobs))
        told = event.finish or event.text or (tokens and self.request.logprobs is not None)
        if not told:
            return []
        choice = self._choice(event.row, event.text, event.sample, tokens, event.finish)
        return [self._piece(choice)]

    def echo(self) -> list[Json]:
        """Return the chunks of a stream that repeat the prompts."""
        rows = enumerate(self.echoes)
        return [
            self._piece(self._choice(row, text, None, range(0), None, self._read(row))) for row, text in rows
        ]

    def last(self) -> Json:
        """Return the last chunk of a stream, which contains the token counts."""
        return {**self._head(self.kinds[2]), "choices": [], "usage": self.usage()}

    def usage(self) -> Json:
        """Return the token counts, in which a prompt is counted once for all of its completions."""
        prompts = sum(len(prompt) for prompt in self.job.prompts[:: self.request.n])
        added = sum(len(sample.tokens) for sample in self.samples if sample)
        return {"prompt_tokens": prompts, "completion_tokens": added, "total_tokens": prompts + added}

    def word(self, token: int) -> str:
        """Return the text of a single token."""
        return self.tokenizer.decode([token])

    def _head(self, kind: str) -> Json:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.name}

    def _piece(self, choice: Json) -> Json:
        return {**self._head(self.kinds[2]), "choices": [choice]}

    def _read(self, row: int) -> Score | None:
        """Return the scores of a prompt if the response contains them, or None."""
        is_shown = self.request.prompts[row // self.request.n] is not None
        return self.scores[row] if self.scores is not None and is_shown else None

    def _choice(
        self,
        row: int,
        text: str,
        sample: Sample | None,
        tokens: range,
        finish: str | None,
        read: Score | None = None,
    ) -> Json:
        wanted = self.request.logprobs is not None and (sample is not None or read is not None)
        logprobs = self._logprobs(row, read, sample, tokens) if wanted else None
        return {"index": row, "text": text, "logprobs": logprobs, "finish_reason": finish}

    def _logprobs(self, row: int, read: Score | None, sample: Sample | None, tokens: range) -> Json:
        """Return the log-probabilities of the tokens in the prompt and in the generated text.

        The first token of a prompt has none.
        """
        rows: list[tuple[int, float | None, Json | None, int]] = []
        if read is not None:
            ids, offsets = self.job.prompts[row], Offsets(self.tokenizer, [])
            values = [None, *read.logprobs], [None, *map(self._by_words, read.alternatives)]
            rows += zip(ids, *values, map(functools.partial(offsets.of, ids), range(len(ids))), strict=True)
        for place in tokens if sample else ():
            assert sample is not None
            offset = len(self.echoes[row]) + self.offsets[row].of(sample.tokens, place)
            alternatives = self._by_words(sample.alternatives[place])
            rows.append((self.added(sample, place), sample.logprobs[place], alternatives, offset))
        return {
            "tokens": [self.word(token) for token, *_ in rows],
            "token_logprobs": [logprob for _, logprob, *_ in rows],
            "top_logprobs": [alternatives for *_, alternatives, _ in rows],
            "text_offset": [offset for *_, offset in rows],
        }

    def added(self, sample: Sample, place: int) -> int:
        """Return the generated token with the given index.

        After the last one, return the end token that ended the text.
        """
        return sample.tokens[place] if place < len(sample.tokens) else self.tokenizer.eod

    def _by_words(self, values: dict[int, float]) -> Json:
        """Return the log-probabilities, indexed by the text of each token.

        If several tokens have the same text, because they are parts of characters, the most likely one is
        used.
        """
        found: Json = {}
        for token, value in values.items():
            found.setdefault(self.word(token), value)
        return found


class Offsets:
    """Computes the positions, in characters, of the tokens that follow a prompt.

    Args:
        tokenizer: the tokenizer of the model.
        prompt: the ids that precede the text.
    """

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int]) -> None:
        self._growing = GrowingText(tokenizer, prompt)
        self._places = [0]

    def of(self, tokens: Sequence[int], place: int) -> int:
        """Return the position, in characters, of the token with the given index.

        ``tokens`` are the tokens of the text so far.
        """
        while len(self._places) <= place:
            new = tokens[len(self._places) - 1 : len(self._places)]
            self._places.append(self._places[-1] + len(self._growing.added(new)))
        return self._places[place]
