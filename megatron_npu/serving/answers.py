"""The JSON of OpenAI's API: models, completions whole and in pieces, errors."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from megatron_npu.data.tokenization.tokenizer import Tokenizer
from megatron_npu.generation.sampling.sampler import Sample
from megatron_npu.serving.completion_request import BadRequestError, CompletionRequest
from megatron_npu.serving.engine import Job, Piece

Json = dict[str, Any]


def models(name: str, created: int, positions: int) -> Json:
    """Return the list of the one model."""
    model = {"id": name, "object": "model", "created": created, "owned_by": "megatron_npu"}
    return {"object": "list", "data": [{**model, "max_model_len": positions}]}


def error(problem: BadRequestError) -> Json:
    """Return what a client is told of a problem."""
    kind = "invalid_request_error" if problem.status < 500 and problem.status != 429 else "server_error"
    told = {"message": problem.message, "type": kind, "param": problem.param, "code": problem.status}
    return {"error": {key: _writable(value) for key, value in told.items()}}


def _writable(value: Any) -> Any:
    """Return a text without halves of UTF-16's pairs, which JSON can name and UTF-8 cannot say."""
    return value.encode("utf-8", "backslashreplace").decode("utf-8") if isinstance(value, str) else value


@dataclass
class Completion:
    """The answer to one request.

    Attributes:
        request, job: what was asked for.
        name: the model's.
        tokenizer: the model's.
        echoes: what each text begins with.
    """

    request: CompletionRequest
    job: Job
    name: str
    tokenizer: Tokenizer
    echoes: list[str]
    id: str = field(default_factory=lambda: f"cmpl-{uuid.uuid4().hex}")
    created: int = field(default_factory=lambda: int(time.time()))

    def __post_init__(self) -> None:
        self.texts = list(self.echoes)
        self.samples: list[Sample | None] = [None] * len(self.texts)
        self.finishes: list[str | None] = [None] * len(self.texts)

    def add(self, piece: Piece) -> None:
        """Take a piece of a text."""
        self.texts[piece.row] += piece.text
        self.samples[piece.row] = piece.sample
        self.finishes[piece.row] = piece.finish or self.finishes[piece.row]

    def whole(self) -> Json:
        """Return the answer when all pieces are there."""
        choices = []
        for row, text in enumerate(self.texts):
            sample = self.samples[row]
            tokens = range(len(sample.tokens)) if sample else range(0)
            choices.append(self._choice(row, text, sample, tokens, self.finishes[row]))
        return {**self._head(), "choices": choices, "usage": self.usage()}

    def piece(self, piece: Piece) -> Json:
        """Return one piece of a stream."""
        tokens = range(0) if piece.token is None else range(piece.token, piece.token + 1)
        return {
            **self._head(),
            "choices": [self._choice(piece.row, piece.text, piece.sample, tokens, piece.finish)],
        }

    def echo(self, row: int) -> Json:
        """Return the piece of a stream that repeats a prompt."""
        return {**self._head(), "choices": [self._choice(row, self.echoes[row], None, range(0), None)]}

    def last(self) -> Json:
        """Return the piece of a stream that has the numbers of tokens."""
        return {**self._head(), "choices": [], "usage": self.usage()}

    def usage(self) -> Json:
        """Return the numbers of tokens; a prompt counts once, however many texts follow it."""
        prompts = sum(len(prompt) for prompt in self.job.prompts[:: self.request.n])
        added = sum(len(sample.tokens) for sample in self.samples if sample)
        return {"prompt_tokens": prompts, "completion_tokens": added, "total_tokens": prompts + added}

    def _head(self) -> Json:
        return {"id": self.id, "object": "text_completion", "created": self.created, "model": self.name}

    def _choice(self, row: int, text: str, sample: Sample | None, tokens: range, finish: str | None) -> Json:
        wanted = self.request.logprobs is not None and sample is not None
        logprobs = self._logprobs(sample, tokens) if wanted and sample is not None else None
        return {"index": row, "text": text, "logprobs": logprobs, "finish_reason": finish}

    def _logprobs(self, sample: Sample, tokens: range) -> Json:
        def word(token: int) -> str:
            return self.tokenizer.decode([token])

        places = [(sample.tokens[place], place) for place in tokens]
        return {
            "tokens": [word(token) for token, _ in places],
            "token_logprobs": [sample.logprobs[place] for _, place in places],
            "top_logprobs": [_by(word, sample.alternatives[place]) for _, place in places],
            "text_offset": [len(self.tokenizer.decode(sample.tokens[:place])) for _, place in places],
        }


def _by(word: Callable[[int], str], values: dict[int, float]) -> dict[str, float]:
    return {word(token): value for token, value in values.items()}
