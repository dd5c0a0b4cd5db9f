"""What clients of a chat may ask, and what they are told when it makes no sense."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_npu.serving.chat_request import ChatRequest, parse
from megatron_npu.serving.completion_request import BadRequestError, CompletionRequest

HELLO = {"role": "user", "content": "Hello"}


def parsed(**fields) -> ChatRequest:
    return parse(json.dumps({"messages": [HELLO], **fields}).encode())


def test_defaults_are_openais():
    assert parsed() == ChatRequest([HELLO], CompletionRequest([]), None)


def test_everything():
    found = parsed(
        **{"model": "m", "n": 2, "max_tokens": 3, "temperature": 0, "top_p": 0.5, "top_k": 4, "seed": 1},
        **{"stop": ["x"], "stream": True, "stream_options": {"include_usage": True}, "user": "u"},
        **{"logprobs": True, "top_logprobs": 2, "response_format": {"type": "text"}, "tools": []},
        messages=[
            {"role": "system", "content": "Be brief.", "name": "me"},
            {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
            {"role": "assistant", "content": "", "refusal": None},
        ],
    )
    texts = [("system", "Be brief."), ("user", "ab"), ("assistant", "")]
    assert [(message["role"], message["content"]) for message in found.messages] == texts
    assert found.messages[0]["name"] == "me"
    expected = CompletionRequest([], "m", 2, 16, 0, 4, 0.5, 1, ("x",), True, True, False, 2)
    assert (found.request, found.max_tokens) == (expected, 3)
    assert parsed(max_completion_tokens=5, max_tokens=3).max_tokens == 5
    assert parsed(logprobs=True).request.logprobs == 0


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": None}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": "Hello"}, "messages"),
        ({"messages": ["Hello"]}, "messages"),
        ({"messages": [{"role": "user"}]}, "messages"),
        ({"messages": [{"content": "a"}]}, "messages"),
        ({"messages": [{**HELLO, "tool_calls": [1]}]}, "messages"),
        ({"messages": [{**HELLO, "name": 1}]}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": 1}]}]}, "messages"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_completion_tokens": "9"}, "max_completion_tokens"),
        ({"logprobs": 1}, "logprobs"),
        ({"top_logprobs": 1}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 6}, "top_logprobs"),
        ({"tools": [{"type": "function"}]}, "tools"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"prompt": "a"}, "prompt"),
        ({"echo": True}, "echo"),
    ],
)
def test_what_makes_no_sense_is_refused_by_the_name_of_the_field(fields, param):
    with pytest.raises(BadRequestError) as told:
        parsed(**fields)
    assert (told.value.param, told.value.status) == (param, 400)
    assert param in told.value.message


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: (
        st.lists(inner) | st.dictionaries(st.sampled_from(["role", "content", "type", "text"]), inner)
    ),
    max_leaves=5,
)


@settings(max_examples=30)
@given(st.dictionaries(st.sampled_from(["messages", "max_tokens", "logprobs", "stop", "x"]), _JSON))
def test_no_json_breaks_it(fields):
    message = ""
    try:
        parse(json.dumps(fields).encode())
    except BadRequestError as told:
        message = told.message
    assert len(message) < 500
