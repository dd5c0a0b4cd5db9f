"""Parse and check requests to ``/v1/completions``, independently of HTTP and of the model."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megatron_npu.base.errors import UsageError

MAX_STOPS, MAX_LOGPROBS = 4, 5  # as OpenAI
MOST_TOKENS, MOST_TEXTS = 1 << 30, 128
_MAX_STOP_LENGTH = 200  # characters
# Fields of OpenAI's that say nothing here, with the values that ask for nothing.
_WITHOUT_MEANING = {
    "best_of": (None, 1),
    "frequency_penalty": (None, 0),
    "logit_bias": (None, {}),
    "presence_penalty": (None, 0),
    "suffix": (None, ""),
}

Prompt = str | list[int] | None  # None: text that begins with nothing


class BadRequestError(Exception):
    """Raised when the server cannot answer a request because the request is invalid.

    Args:
        message: a description of what was given and what was expected.
        param: the name of the invalid field, if there is one.
        status: the HTTP status of the response.
    """

    def __init__(self, message: str, param: str | None = None, status: int = 400) -> None:
        super().__init__(message)
        self.message, self.param, self.status = message, param, status


@dataclass(frozen=True)
class CompletionRequest:
    """A completion request that has been checked.

    Whether it is compatible with the model is checked later.

    Attributes:
        prompts: one or more prompts.
        model: the name of the model, if given.
        n: the number of completions per prompt.
        max_tokens: the maximum number of tokens to generate.
        temperature, top_k, top_p, seed: the sampling options. A top_p of 1 and a top_k of 0 set no limit.
        stop: strings that end the generation and are not part of the result.
        stream: whether chunks are sent as they are generated.
        include_usage: whether a stream ends with the token counts.
        echo: whether the text begins with the prompt.
        logprobs: the number of most likely tokens to return with log-probabilities, in addition to the
            log-probability of each token itself. If None, no log-probabilities are returned. With ``echo``,
            they include those of the prompt, and ``max_tokens`` may be 0.
    """

    prompts: list[Prompt]
    model: str | None = None
    n: int = 1
    max_tokens: int = 16
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stream: bool = False
    include_usage: bool = False
    echo: bool = False
    logprobs: int | None = None

    @property
    def scored(self) -> bool:
        """True if the request asks for the log-probabilities of the prompts."""
        return self.echo and self.logprobs is not None


def parse(body: bytes) -> CompletionRequest:
    """Parse the completion request in the body of an HTTP request.

    Raises:
        BadRequestError: the body is not JSON, or a field has the wrong type or value.
    """
    fields = Fields.of(body)
    request = CompletionRequest(
        prompts=_prompts(fields.take("prompt", (str, list))),
        max_tokens=fields.number("max_tokens", int, 16, 0, MOST_TOKENS),
        **common(fields),
        echo=fields.take("echo", bool) or False,
        logprobs=fields.number("logprobs", int, None, 0, MAX_LOGPROBS),
    )
    fields.require_rest_without_meaning(_WITHOUT_MEANING)
    if request.max_tokens == 0 and not request.scored:
        raise BadRequestError(
            f"max_tokens must be from 1 to {MOST_TOKENS}, or 0 with echo and logprobs, but got 0",
            "max_tokens",
        )
    return request


def common(fields: Fields) -> dict[str, Any]:
    """Return the fields that completions and chats share, such as the model, sampling options and stop
    strings.

    Raises:
        BadRequestError: a field has the wrong type or value.
    """
    options = fields.take("stream_options", dict) or {}
    return {
        "model": fields.take("model", str),
        "n": fields.number("n", int, 1, 1, MOST_TEXTS),
        "temperature": fields.number("temperature", float, 1.0, 0, 2),
        "top_k": fields.number("top_k", int, 0, 0, 1 << 30),
        "top_p": fields.number("top_p", float, 1.0, 0, 1),
        "seed": fields.number("seed", int, None, -(1 << 63), (1 << 63) - 1),
        "stop": _stops(fields.take("stop", (str, list))),
        "stream": fields.take("stream", bool) or False,
        "include_usage": options.get("include_usage") is True,
    }


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is not a valid JSON number")


class Fields:
    """The fields of a request, with a record of which of them have been read."""

    @classmethod
    def of(cls, body: bytes) -> Fields:
        """Parse the body of a request into fields.

        Raises:
            BadRequestError: the body is not a JSON object.
        """
        try:
            values = json.loads(body.decode("utf-8"), parse_constant=_no_constant)
        except (ValueError, RecursionError) as error:  # of decoding, too
            raise BadRequestError(f"the request body must be JSON in UTF-8: {error}") from error
        if not isinstance(values, dict):
            raise BadRequestError("the request body must be a JSON object")
        return cls(values)

    def __init__(self, values: dict[str, Any]) -> None:
        self._rest = dict(values)

    def take(self, name: str, kind: type | tuple[type, ...]) -> Any:
        """Return the value of a field, or None if the field is missing or its value is null."""
        value = self._rest.pop(name, None)
        kinds = kind if isinstance(kind, tuple) else (kind,)
        if value is None or type(value) in kinds:
            return value
        words = " or ".join(_WORDS[one] for one in kinds)
        raise BadRequestError(f"{name} must be {words}, but got {shown(value)}", name)

    def number(self, name: str, kind: type, default: Any, least: float, most: float) -> Any:
        """Return a number from a field after checking its inclusive bounds."""
        value = self.take(name, (int, float) if kind is float else int)
        if value is None:
            return default
        if not least <= value <= most:
            raise BadRequestError(f"{name} must be from {least} to {most}, but got {shown(value)}", name)
        return value

    def require_rest_without_meaning(self, without_meaning: Mapping[str, tuple[Any, ...]]) -> None:
        """Reject fields that were not read, unless their value has no effect.

        Args:
            without_meaning: the unsupported fields, each with the values that have no effect.
        """
        self._rest.pop("user", None)
        for name, value in self._rest.items():
            if name not in without_meaning:
                raise BadRequestError(f"unknown field {shown(name)}", name)
            if value not in without_meaning[name]:
                raise BadRequestError(f"{name} is not supported; leave it out", name)


_WORDS = {str: "a string", list: "a list", dict: "an object", bool: "true or false", int: "an integer"}
_WORDS |= {float: "a number"}


def shown(value: object) -> str:
    """Format a value for use in messages."""
    text = ascii(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _prompts(value: Any) -> list[Prompt]:
    """Return the prompts of a request, which may be given as a string, as ids, or as a list of either.

    None stands for unconditional generation.
    """
    if value is None or isinstance(value, str):
        return [_text(value)]
    if _is_ids(value):
        return [value]
    if not value:
        raise BadRequestError("prompt must be a string, but got an empty list", "prompt")
    for prompt in value:
        if not isinstance(prompt, str) and not _is_ids(prompt):
            raise BadRequestError(
                "prompt must be a list of strings or of token ids, but it contains values of other types",
                "prompt",
            )
    return [_text(prompt) if isinstance(prompt, str) else prompt for prompt in value]


def _is_ids(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(type(token) is int for token in value)


def _text(value: str | None) -> str | None:
    if value == "":
        raise BadRequestError(
            "prompt must not be empty; pass some text, or leave prompt out for an unconditional sample",
            "prompt",
        )
    return value


def _stops(value: Any) -> tuple[str, ...]:
    """Return the stop strings of a request, which may be given as null, a string or a list of strings.

    Raises:
        BadRequestError: there are too many stop strings, or values of another type.
    """
    found = [] if value is None else [value] if isinstance(value, str) else value
    if len(found) > MAX_STOPS or not all(map(_is_stop, found)):
        raise BadRequestError(
            f"stop must be at most {MAX_STOPS} strings of 1 to {_MAX_STOP_LENGTH} characters", "stop"
        )
    return tuple(found)


def _is_stop(value: Any) -> bool:
    return isinstance(value, str) and 0 < len(value) <= _MAX_STOP_LENGTH


def in_words(error: UsageError, param: str | None = None) -> BadRequestError:
    """Convert the error of a command to an error for a client, without advice about command-line flags."""
    return BadRequestError(error.problem, param)
