"""A chat over HTTP, of a checkpoint whose tokenizer has a template."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator

import pytest

from megatron_npu.data.tokenization.hf import HuggingFaceTokenizer
from tests.conftest import LONGEST
from tests.end_to_end.test_serve import Server, choices, pieces, started
from tests.support import tiny
from tests.support.tokenizers_made import byte_level

pytest.importorskip("megatron.core")
pytest.importorskip("starlette")
pytest.importorskip("uvicorn")
TEMPLATE = (
    "{% for message in messages %}{% if message.role == 'tool' %}{{ raise_exception('no tools') }}{% endif %}"
    "{% if message.content == 'long' %}{{ 'a' * 16000000 }}{% endif %}"
    "<|{{ message.role }}|>{{ message.content }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "To be?"}]
RENDERED = "<|system|>Be brief.<|endoftext|><|user|>To be?<|endoftext|><|assistant|>"
GREEDY = {"max_tokens": 4, "temperature": 0}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory) -> str:
    folder = tmp_path_factory.mktemp("tokenizer")
    byte_level(special=("<|endoftext|>",)).save(str(folder / "tokenizer.json"))
    config = {"eos_token": "<|endoftext|>", "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return str(folder)


@pytest.fixture(scope="module")
def server(dataset, tokenizer, tmp_path_factory) -> Iterator[Server]:
    folder = str(tmp_path_factory.mktemp("trained") / "chatty")
    flags = [*tiny.flags_for(dataset), "--train-iters", "2", "--eval-iters", "0", "--seq-length", "128"]
    flags += ["--max-position-embeddings", "128", "--tokenizer-type", "HuggingFaceTokenizer"]
    flags.remove("--vocab-size")
    flags.remove(str(tiny.SIZE))
    done = tiny.run("pretrain", *flags, "--tokenizer-model", tokenizer, "--save", folder)
    assert done.returncode == 0, done.stderr
    running = started(folder)
    yield running
    running.process.send_signal(signal.SIGTERM)
    _, err = running.process.communicate(timeout=LONGEST)
    assert running.process.returncode == 0
    assert "Traceback" not in err


def chat(server: Server, **fields) -> dict:
    status, answer = server.ask("/v1/chat/completions", {"messages": MESSAGES, **fields})
    assert status == 200, answer
    return answer


def test_an_answer_is_the_completion_of_what_the_template_makes(server, tokenizer):
    ids = HuggingFaceTokenizer(tokenizer).encode(RENDERED)
    expected = server.complete(prompt=ids, **GREEDY, logprobs=1)
    answer = chat(server, **GREEDY, logprobs=True, top_logprobs=1)
    assert answer["object"] == "chat.completion"
    assert answer["usage"] == expected["usage"]
    (choice,) = answer["choices"]
    assert choice["message"] == {"role": "assistant", "content": choices(expected)[0]}
    assert choice["finish_reason"] == expected["choices"][0]["finish_reason"]
    told = choice["logprobs"]["content"]
    logprobs = expected["choices"][0]["logprobs"]
    count = expected["usage"]["completion_tokens"]
    assert [token["logprob"] for token in told] == logprobs["token_logprobs"][:count]
    assert [token["top_logprobs"][0]["logprob"] for token in told] == logprobs["token_logprobs"][:count]
    assert len(chat(server, n=2, max_tokens=2)["choices"]) == 2


def test_a_stream_has_the_pieces_of_the_whole(server):
    fields = {"max_tokens": 8, "seed": 3}
    whole = chat(server, **fields)
    connection = server.connection()
    body = {"messages": MESSAGES, **fields, "stream": True, "stream_options": {"include_usage": True}}
    connection.request("POST", "/v1/chat/completions", json.dumps(body), {"Content-Type": "application/json"})
    first, *rest = pieces(connection.getresponse())
    assert first["object"] == "chat.completion.chunk"
    assert first["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert rest.pop()["usage"] == whole["usage"]
    deltas = [event["choices"][0]["delta"].get("content", "") for event in rest]
    assert "".join(deltas) == whole["choices"][0]["message"]["content"]
    assert rest[-1]["choices"][0]["finish_reason"] == whole["choices"][0]["finish_reason"]


def test_without_a_number_of_tokens_as_many_as_fit(server):
    answer = chat(server, temperature=0)
    assert answer["usage"]["total_tokens"] == 128 or answer["choices"][0]["finish_reason"] == "stop"


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"messages": [{"role": "tool", "content": "x"}]}, "rejects the messages: no tools"),
        ({"messages": [{"role": "user", "content": "x" * 300}]}, "at most 127"),
        (
            {"messages": [{"role": "user", "content": "long"}]},
            "the chat template turns the messages into 16000",
        ),
        ({"messages": []}, "one or more"),
        ({"max_tokens": 128}, "128 positions"),
        ({"n": 9}, "completions, but at most 8 are allowed per request"),
        ({"model": "gpt-5"}, "the only model is 'chatty'"),
    ],
)
def test_bad_requests_are_told(server, fields, told):
    status, answer = server.ask("/v1/chat/completions", {"messages": MESSAGES, **fields})
    assert status == answer["error"]["code"] == (404 if "model" in fields else 400)
    assert told in answer["error"]["message"]


def test_the_client_of_openai(server):
    openai = pytest.importorskip("openai")
    client = openai.OpenAI(base_url=f"http://127.0.0.1:{server.port}/v1", api_key="none", max_retries=0)
    fields = {"model": "chatty", "messages": MESSAGES, "max_completion_tokens": 8, "seed": 3}
    answer = client.chat.completions.create(**fields, logprobs=True, top_logprobs=2)
    assert answer.choices[0].message.role == "assistant"
    assert len(answer.choices[0].logprobs.content[0].top_logprobs) == 2
    parts = client.chat.completions.create(**fields, stream=True)
    content = "".join(part.choices[0].delta.content or "" for part in parts)
    assert content == answer.choices[0].message.content
