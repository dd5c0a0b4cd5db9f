"""What clients may ask, and what they are told when it makes no sense."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_npu.serving.completion_request import BadRequestError, CompletionRequest, parse


def parsed(**fields) -> CompletionRequest:
    return parse(json.dumps(fields).encode())


def test_defaults_are_openais():
    assert parsed() == CompletionRequest([None])
    assert parsed(prompt="a") == CompletionRequest(["a"], max_tokens=16, temperature=1.0, top_p=1.0, n=1)


def test_everything():
    found = parsed(
        **{"prompt": "a", "model": "m", "n": 2, "max_tokens": 3, "temperature": 0, "top_p": 0.5, "top_k": 4},
        **{"seed": -1, "stop": "x", "stream": True, "stream_options": {"include_usage": True}, "echo": True},
        **{
            "logprobs": None,
            "user": "u",
            "suffix": None,
            "best_of": 1,
            "presence_penalty": 0,
            "logit_bias": {},
        },
    )
    assert found == CompletionRequest(
        ["a"], "m", 2, 3, 0, 4, 0.5, -1, ("x",), stream=True, include_usage=True, echo=True
    )


def test_prompts_are_scored_where_they_are_repeated_with_log_probabilities():
    assert not parsed(logprobs=1).scored
    assert not parsed(echo=True).scored
    assert parsed(echo=True, logprobs=0, max_tokens=0).scored


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [([1, 2], [[1, 2]]), ([[1], [2, 3]], [[1], [2, 3]]), (["a", "b"], ["a", "b"]), (None, [None])],
)
def test_prompts(prompt, expected):
    assert parsed(prompt=prompt).prompts == expected


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": ""}, "prompt"),
        ({"prompt": ["a", ""]}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [True]}, "prompt"),
        ({"prompt": [1.5]}, "prompt"),
        ({"prompt": {"a": 1}}, "prompt"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": "9"}, "max_tokens"),
        ({"max_tokens": True}, "max_tokens"),
        ({"n": 1000}, "n"),
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": 2.1}, "temperature"),
        ({"top_p": 1.1}, "top_p"),
        ({"seed": 1 << 70}, "seed"),
        ({"stop": ["a"] * 5}, "stop"),
        ({"stop": ""}, "stop"),
        ({"stop": [1]}, "stop"),
        ({"stop": "x" * 201}, "stop"),
        ({"stream": 1}, "stream"),
        ({"stream_options": []}, "stream_options"),
        ({"logprobs": 6}, "logprobs"),
        ({"max_tokens": 0, "echo": True}, "max_tokens"),
        ({"max_tokens": 0, "logprobs": 1}, "max_tokens"),
        ({"suffix": "x"}, "suffix"),
        ({"best_of": 2}, "best_of"),
        ({"messages": []}, "messages"),
    ],
)
def test_what_makes_no_sense_is_refused_by_the_name_of_the_field(fields, param):
    with pytest.raises(BadRequestError) as told:
        parsed(**fields)
    assert (told.value.param, told.value.status) == (param, 400)
    assert param in told.value.message


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"[]", b"1", b"\xff", b'{"temperature": NaN}', b"[" * 100000, b'{"n": ' + b"9" * 9999 + b"}"],
)
def test_what_is_no_json_object_is_refused(body):
    with pytest.raises(BadRequestError, match="body"):
        parse(body)


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=5,
)


@settings(max_examples=30)
@given(st.dictionaries(st.sampled_from([*CompletionRequest.__dataclass_fields__, "prompt", "x"]), _JSON))
def test_no_json_breaks_it(fields):
    message = ""
    try:
        parse(json.dumps(fields).encode())
    except BadRequestError as told:
        message = told.message
    assert len(message) < 500
