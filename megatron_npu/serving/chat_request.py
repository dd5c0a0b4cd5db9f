"""Parse and check requests to ``/v1/chat/completions``, independently of HTTP and of the model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from megatron_npu.serving.completion_request import (
    MAX_LOGPROBS,
    MOST_TOKENS,
    BadRequestError,
    CompletionRequest,
    Fields,
    common,
    shown,
)

# Fields of OpenAI's that say nothing here, with the values that ask for nothing.
_WITHOUT_MEANING: dict[str, tuple[Any, ...]] = {
    "frequency_penalty": (None, 0),
    "function_call": (None, "none"),
    "functions": (None, []),
    "logit_bias": (None, {}),
    "metadata": (None, {}),
    "modalities": (None, ["text"]),
    "parallel_tool_calls": (None, True, False),
    "presence_penalty": (None, 0),
    "response_format": (None, {"type": "text"}),
    "service_tier": (None, "auto", "default"),
    "store": (None, False),
    "tool_choice": (None, "none", "auto"),
    "tools": (None, []),
}

Message = dict[str, str]


@dataclass(frozen=True)
class ChatRequest:
    """A chat request that has been checked.

    Whether it is compatible with the model and its template is checked later.

    Attributes:
        messages: one or more messages, each with a ``role`` and a ``content``.
        request: the sampling options, as a completion request without a prompt.
        max_tokens: the maximum number of tokens to generate. If None, as many tokens as fit into the model
            are generated.
    """

    messages: list[Message]
    request: CompletionRequest
    max_tokens: int | None


def parse(body: bytes) -> ChatRequest:
    """Parse the chat request in the body of an HTTP request.

    Raises:
        BadRequestError: the body is not JSON, or a field has the wrong type or value.
    """
    fields = Fields.of(body)
    messages = _messages(fields.take("messages", list))
    lengths = [
        fields.number(name, int, None, 1, MOST_TOKENS) for name in ("max_completion_tokens", "max_tokens")
    ]
    request = CompletionRequest(
        prompts=[],
        **common(fields),
        logprobs=_logprobs(
            fields.take("logprobs", bool), fields.number("top_logprobs", int, None, 0, MAX_LOGPROBS)
        ),
    )
    fields.require_rest_without_meaning(_WITHOUT_MEANING)
    return ChatRequest(messages, request, lengths[0] if lengths[0] is not None else lengths[1])


def _logprobs(wanted: bool | None, top: int | None) -> int | None:
    if top is not None and not wanted:
        raise BadRequestError("top_logprobs requires logprobs to be true", "top_logprobs")
    return (top or 0) if wanted else None


def _messages(values: list[Any] | None) -> list[Message]:
    if not values:
        raise BadRequestError(
            "messages must be a list of one or more messages, each with role and content, but "
            "got an empty list",
            "messages",
        )
    return [_message(number, value) for number, value in enumerate(values)]


def _message(number: int, value: Any) -> Message:
    if not isinstance(value, dict):
        raise BadRequestError(f"messages[{number}] must be an object, but got {shown(value)}", "messages")
    rest = {name: field for name, field in value.items() if field is not None}
    role, content = rest.pop("role", None), rest.pop("content", None)
    if isinstance(content, list):
        content = _text_of_parts(content)
    if not isinstance(role, str) or not isinstance(content, str):
        raise BadRequestError(
            f"messages[{number}] must have role and content, both of which must be strings", "messages"
        )
    name = rest.pop("name", None)
    if rest or not isinstance(name, str | None):
        field = shown(next(iter(rest), "name"))
        raise BadRequestError(f"messages[{number}]: {field} is not supported; leave it out", "messages")
    return {"role": role, "content": content} | ({} if name is None else {"name": name})


def _text_of_parts(parts: list[Any]) -> str | None:
    """Return the text of a message whose content is a list, or None if a part of the list is not text."""
    texts: list[str] = []
    for part in parts:
        text = part.get("text") if isinstance(part, dict) and part.get("type") == "text" else None
        if not isinstance(text, str):
            return None
        texts.append(text)
    return "".join(texts)
