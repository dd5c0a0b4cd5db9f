"""The server: answers, limits, clients that go away, the page in a real browser, and its end."""

from __future__ import annotations

import http.client
import json
import queue
import re
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import pytest

from megatron_npu.commands import cli
from tests.conftest import LONGEST, wait_until
from tests.support import browser, tiny, warm

pytest.importorskip("megatron.core")
pytest.importorskip("starlette")
pytest.importorskip("uvicorn")
POSITIONS = 32_768  # more than a test waits for: a stream lasts until somebody ends it
# the likeliest tokens go round in circles; one that is drawn would be the end token soon
LONG = {"prompt": "1 2 3", "max_tokens": 32_000, "stream": True, "temperature": 0, "stop": ["no such text"]}


@dataclass
class Server:
    """A server that runs, and where."""

    process: subprocess.Popen
    port: int

    def connection(self) -> http.client.HTTPConnection:
        return http.client.HTTPConnection("127.0.0.1", self.port, timeout=LONGEST)

    def ask(self, path: str, body: Any = None, **headers: str) -> tuple[int, Any]:
        """Return status and JSON of an answer; a body that is no bytes is sent as JSON."""
        connection = self.connection()
        data = body if isinstance(body, bytes | None) else json.dumps(body).encode()
        headers = {"Content-Type": "application/json", **headers}
        connection.request("GET" if data is None else "POST", path, data, headers)
        answer = connection.getresponse()
        content = answer.read()
        connection.close()
        kind = answer.getheader("content-type", "")
        return answer.status, json.loads(content) if "json" in kind else content.decode()

    def complete(self, **fields: Any) -> dict:
        status, answer = self.ask("/v1/completions", fields)
        assert status == 200, answer
        return answer

    def begin(self, **fields: Any) -> http.client.HTTPResponse:
        """Return a stream of which the first piece has been read."""
        connection = self.connection()
        body = json.dumps({**LONG, **fields})
        connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
        answer = connection.getresponse()
        assert answer.status == 200
        assert answer.readline().startswith(b"data: ")
        return answer

    def health(self) -> dict:
        return self.ask("/health")[1]

    def idle(self) -> dict:
        """Wait until no request is under way; return the server's health."""
        return wait_until(lambda: [health for health in [self.health()] if not health["requests"]])[0]


def started(folder: str, *flags: str, processes: int = 1, **settings: str) -> Server:
    command, env = warm.ready(
        tiny.command("serve", "--load", folder, "--port", "0", *flags, processes=processes),
        tiny.environment() | settings,
        warm.DRIVER,
    )
    process = subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    watchdog = threading.Timer(LONGEST, process.kill)
    watchdog.start()
    for line in process.stdout:
        if found := re.search(r"http://127\.0\.0\.1:(\d+)", line):
            watchdog.cancel()
            return Server(process, int(found[1]))
    pytest.fail(process.stderr.read())


@pytest.fixture(scope="module")
def trained(dataset, tmp_path_factory) -> str:
    folder = tmp_path_factory.mktemp("trained") / "tiny-model"
    flags = [*tiny.flags_for(dataset), "--max-position-embeddings", str(POSITIONS), "--train-iters", "2"]
    done = tiny.run("pretrain", *flags, "--eval-iters", "0", "--no-plot", "--save", str(folder))
    assert done.returncode == 0, done.stderr
    return str(folder)


@pytest.fixture(scope="module")
def server(trained) -> Iterator[Server]:
    running = started(trained, "--max-queue", "1")
    yield running
    running.process.send_signal(signal.SIGTERM)
    out, err = running.process.communicate(timeout=LONGEST)
    assert running.process.returncode == 0
    assert re.fullmatch(r"megatron-npu serve: stopped after \d+ requests and \d+ tokens\n", out)
    assert "Traceback" not in err


def choices(answer: dict) -> list[str]:
    return [choice["text"] for choice in answer["choices"]]


def pieces(stream: http.client.HTTPResponse) -> list[dict]:
    """Return the events of a stream to its end; the last one must be the mark of it."""
    lines = [line for line in stream.read().decode().splitlines() if line]
    assert lines[-1] == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]


def test_a_completion(server, trained, monkeypatch, capsys):
    answer = server.complete(prompt="1 2 3", max_tokens=5, temperature=0)
    assert answer["object"] == "text_completion"
    assert answer["usage"] == {"prompt_tokens": 3, "completion_tokens": 5, "total_tokens": 8}
    (choice,) = answer["choices"]
    assert choice["finish_reason"] == "length"
    monkeypatch.setenv("MEGATRON_NPU_DEVICE", "cpu")
    line = ["generate", "--load", trained, "--prompt", "1 2 3", "--num-tokens", "5", "--greedy"]
    assert cli.main(line) == 0
    assert "1 2 3" + choice["text"] == capsys.readouterr().out.rstrip("\n")
    ids = server.complete(prompt=[1, 2, 3], max_tokens=5, temperature=0)
    assert choices(ids) == [choice["text"]]
    echoed = server.complete(prompt="1 2 3", max_tokens=5, temperature=0, echo=True)
    assert choices(echoed) == ["1 2 3" + choice["text"]]


def test_several_texts_seeds_and_log_probabilities(server):
    fields = {"prompt": ["1 2", "7"], "n": 2, "max_tokens": 4, "seed": 3, "logprobs": 2}
    answer, again = server.complete(**fields), server.complete(**fields)
    assert choices(answer) == choices(again)
    assert len(set(choices(answer))) == 4
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
    assert answer["usage"]["prompt_tokens"] == 3
    logprobs = answer["choices"][0]["logprobs"]
    assert " " + " ".join(logprobs["tokens"]) == choices(answer)[0]
    assert all(value < 0 for value in logprobs["token_logprobs"])
    assert [len(some) for some in logprobs["top_logprobs"]] == [2] * 4
    assert choices(server.complete(prompt="1 2", max_tokens=9)) != choices(
        server.complete(prompt="1 2", max_tokens=9)
    )


def test_a_text_that_begins_with_nothing(server):
    answer = server.complete(max_tokens=4, temperature=0, echo=True, logprobs=1)
    assert len(choices(answer)[0].split()) == 4
    logprobs = answer["choices"][0]["logprobs"]
    assert len(logprobs["tokens"]) == 4, "the end token before it was not asked for"
    assert None not in logprobs["token_logprobs"]


def test_what_the_model_thinks_of_a_prompt(server):
    """Each place against a prompt that ends there, of which the next token is drawn with a cache."""
    fields = {"temperature": 0, "echo": True, "logprobs": 2}
    answer = server.complete(prompt=["1 2 3 4", "9 8"], max_tokens=1, **fields)
    first, second = (choice["logprobs"] for choice in answer["choices"])
    assert first["tokens"][:4] == ["1", "2", "3", "4"]
    assert first["text_offset"] == [0, 1, 3, 5, 7]
    assert choices(answer)[0] == " ".join(first["tokens"])
    assert [len(values) for values in second.values()] == [3] * 4
    assert first["token_logprobs"][0] is first["top_logprobs"][0] is None
    for place in range(1, 5):
        prompt = " ".join(first["tokens"][:place])
        expected = server.complete(prompt=prompt, max_tokens=1, temperature=0, logprobs=2)
        (likeliest,) = expected["choices"][0]["logprobs"]["top_logprobs"]
        assert first["top_logprobs"][place] == pytest.approx(likeliest, abs=1e-4)
        assert first["token_logprobs"][place] <= max(likeliest.values()) + 1e-4
    ids = server.complete(prompt=[1, 2, 3, 4], max_tokens=0, **fields)
    (choice,) = ids["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("1 2 3 4", "length")
    assert choice["logprobs"] == {name: values[:4] for name, values in first.items()}
    assert ids["usage"] == {"prompt_tokens": 4, "completion_tokens": 0, "total_tokens": 4}


@pytest.mark.parametrize("echo", [True, False])
def test_log_probabilities_of_a_stream_are_those_of_the_whole(server, echo):
    fields = {"prompt": "1 2 3", "max_tokens": 60, "seed": 3, "temperature": 1, "logprobs": 1, "echo": echo}
    (whole,) = server.complete(**fields, stop=["no such text"])["choices"]
    stream = server.begin(**fields, stream_options={"include_usage": True})
    found = [event["choices"][0]["logprobs"] for event in pieces(stream) if event["choices"]]
    lost = 3 if echo else 1  # the first event was read already
    for name, values in whole["logprobs"].items():
        assert [value for some in found for value in some[name]] == values[lost:]
    assert len(whole["logprobs"]["tokens"]) == len(whole["text"].split()) + (whole["finish_reason"] == "stop")


def test_the_end_token_has_a_log_probability_too(server):
    """Whoever leaves the last token away, as lm-eval does, must not lose one of the prompt."""
    ended = []
    for seed in range(20):
        answer = server.complete(prompt="1 2 3", n=8, max_tokens=40, seed=seed, logprobs=1, echo=True)
        ended = [choice for choice in answer["choices"] if choice["finish_reason"] == "stop"]
        if ended:
            break
    logprobs = ended[0]["logprobs"]
    assert logprobs["tokens"] == [*ended[0]["text"].split(), "255"]
    assert {len(values) for values in logprobs.values()} == {len(logprobs["tokens"])}


def test_no_chat_without_a_template(server):
    status, answer = server.ask("/v1/chat/completions", {"messages": [{"role": "user", "content": "1"}]})
    assert (status, answer["error"]["param"]) == (400, "messages")
    assert "no chat template; send plain text to /v1/completions" in answer["error"]["message"]


def test_the_client_of_openai(server):
    openai = pytest.importorskip("openai")
    client = openai.OpenAI(base_url=f"http://127.0.0.1:{server.port}/v1", api_key="none", max_retries=0)
    assert [model.id for model in client.models.list()] == ["tiny-model"]
    assert client.models.retrieve("tiny-model").owned_by == "megatron_npu"
    fields = {
        "model": "tiny-model",
        "prompt": "1 2 3",
        "max_tokens": 5,
        "seed": 1,
        "logprobs": 1,
        "echo": True,
    }
    answer = client.completions.create(**fields)
    assert answer.choices[0].text.startswith("1 2 3 ")
    assert answer.choices[0].logprobs.token_logprobs[0] is None
    parts = client.completions.create(**fields, stream=True)
    assert "".join(part.choices[0].text for part in parts) == answer.choices[0].text
    with pytest.raises(openai.NotFoundError, match="the only model is 'tiny-model'"):
        client.models.retrieve("gpt-5")
    with pytest.raises(openai.BadRequestError, match="no chat template"):
        client.chat.completions.create(model="tiny-model", messages=[{"role": "user", "content": "1"}])


def test_a_stream_has_the_pieces_of_the_whole(server):
    fields = {"prompt": "1 2 3", "max_tokens": 6, "seed": 3}
    whole = server.complete(**fields)
    stream = server.begin(**{"temperature": 1, **fields}, echo=True, stream_options={"include_usage": True})
    assert stream.getheader("content-type").startswith("text/event-stream")
    found = pieces(stream)  # the first one, the prompt, was read already
    assert "".join(choices(event)[0] for event in found if event["choices"]) == choices(whole)[0]
    assert found[-1]["usage"] == whole["usage"]
    assert found[-2]["choices"][0]["finish_reason"] == "length"


def test_a_stop_text_ends_a_text_and_is_not_part_of_it(server):
    text = choices(server.complete(prompt="1 2 3", max_tokens=8, temperature=0))[0]
    third = " ".join(text.split()[2:4])
    answer = server.complete(prompt="1 2 3", max_tokens=8, temperature=0, stop=["nothing", third])
    assert choices(answer)[0] == text[: text.index(third)]
    assert answer["choices"][0]["finish_reason"] == "stop"


@pytest.mark.parametrize(
    ("status", "body", "told"),
    [
        (400, b"{", "must be JSON in UTF-8"),
        (400, b"\xff\xfe", "must be JSON in UTF-8"),
        (400, {"prompt": ""}, "leave prompt out for an unconditional sample"),
        (400, {"prompt": "word"}, "the text must consist of numbers from 0 to"),
        (400, b'{"prompt": "\\ud800"}', "the text must consist of numbers from 0 to"),
        (400, b'{"prompt": "a", "\\ud800": 1}', "unknown field"),
        (400, {"prompt": [256]}, "from 0 to 255"),
        (400, {"prompt": "1 " * POSITIONS}, f"at most {POSITIONS - 1}"),
        (400, {"prompt": "1", "max_tokens": POSITIONS}, f"{POSITIONS} positions"),
        (400, {"prompt": "1", "max_tokens": "9"}, "max_tokens"),
        (400, {"prompt": "1", "max_tokens": 0}, "or 0 with echo and logprobs"),
        (400, {"prompt": "1", "n": 9}, "completions, but at most 8 are allowed per request"),
        (404, {"prompt": "1", "model": "gpt-5"}, "the only model is 'tiny-model'"),
        (413, b'{"prompt": "' + b"1 " * 500_000 + b'"}', "more than 262144 bytes"),
    ],
)
def test_bad_requests_are_told_and_the_server_goes_on(server, status, body, told):
    found, answer = server.ask("/v1/completions", body)
    assert (found, answer["error"]["code"]) == (status, status)
    assert told in answer["error"]["message"]
    assert len(choices(server.complete(prompt="1", max_tokens=1))) == 1


def test_other_requests(server):
    assert server.ask("/v1/models")[1]["data"][0]["id"] == "tiny-model"
    assert server.ask("/v1/models/tiny-model")[1] == server.ask("/v1/models")[1]["data"][0]
    assert server.ask("/v1/models/gpt-5")[0] == 404
    assert server.ask("/nothing")[0] == 404
    assert server.ask("/v1/completions")[0] == 405
    plain = {"Content-Type": "text/plain"}  # what a page of another site could send
    assert server.ask("/v1/completions", b"{}", **plain)[0] == 415
    assert server.ask("/health", Host="evil.example")[0] == 400


def test_who_goes_away_ends_the_text_and_who_comes_too_late_is_told(server):
    before = server.idle()["tokens"]
    stream = server.begin()
    second: queue.Queue[dict] = queue.Queue()
    waiter = threading.Thread(target=lambda: second.put(server.complete(prompt="1", max_tokens=2)))
    waiter.start()
    wait_until(lambda: server.health()["requests"] == 2)
    status, answer = server.ask("/v1/completions", {"prompt": "1"})
    assert (status, answer["error"]["type"]) == (429, "server_error")
    stream.close()
    assert len(choices(second.get(timeout=LONGEST))) == 1
    waiter.join()
    assert server.idle()["tokens"] - before < 30_000, "nobody waited for the 32,000 tokens"


def test_bodies_that_never_come_do_not_outlive_the_server(trained):
    server = started(trained)
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    clients = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(20)]
    for client in clients:
        client.sendall(head + b'Content-Length: 1000\r\n\r\n{"prompt"')
    server.ask("/health")
    server.process.send_signal(signal.SIGTERM)
    _, errors = server.process.communicate(timeout=LONGEST)
    assert server.process.returncode == 0
    assert errors == "", errors[:2000]
    assert {client.recv(1 << 16)[:12] for client in clients} == {b"HTTP/1.1 503"}
    for client in clients:
        client.close()


def test_the_end_cuts_what_is_drawn(trained):
    server = started(trained, "--model-name", "other", "--host", "127.0.0.1")
    stream = server.begin()
    server.process.send_signal(signal.SIGINT)
    found = pieces(stream)
    assert found[-1]["model"] == "other"
    assert found[-1]["choices"][0]["finish_reason"] == "length"
    assert len(found) < 32_000
    out, err = server.process.communicate(timeout=LONGEST)
    assert (server.process.returncode, out.count("\n")) == (0, 1), err
    assert "Traceback" not in err


@pytest.fixture(scope="module", autouse=True)
def unasked(request) -> Iterator[Callable[[], dict[int, Server]] | None]:
    """Servers of one process and of two that nobody asks for long, and then rarely, once all of that is over.

    They wait together, and while the other tests of this file run.
    """
    test = test_one_that_nobody_asks_for_long_is_no_hang
    if not any(getattr(item, "function", None) is test for item in request.session.items):
        yield None
        return
    trained = request.getfixturevalue("trained")
    # seconds: less, and a busy machine alone would be a hang
    running = {number: started(trained, processes=number, MEGATRON_NPU_WATCHDOG="5") for number in (1, 2)}

    def wait_and_ask() -> dict[int, Server]:
        time.sleep(8)
        for _ in range(
            3
        ):  # so light a traffic that the thread with the model stands at one place whenever seen
            for server in running.values():
                assert len(choices(server.complete(prompt="1 2", max_tokens=1, temperature=0))) == 1
            time.sleep(2.5)
        return running

    with ThreadPoolExecutor(1) as pool:
        yield pool.submit(wait_and_ask).result
    for server in running.values():
        server.process.kill()


@pytest.mark.parametrize("processes", [1, 2])  # the second one waits for the first, in a collective
def test_one_that_nobody_asks_for_long_is_no_hang(unasked, processes):
    server = unasked()[processes]
    assert server.health()["requests"] == 0
    server.process.send_signal(signal.SIGTERM)
    out, err = server.process.communicate(timeout=LONGEST)
    assert "is stopped:" not in err
    assert "exits:" not in err
    assert out == "megatron-npu serve: stopped after 3 requests and 3 tokens\n"
    if processes == 1:  # torchrun says that a signal has ended it
        assert (server.process.returncode, err) == (0, "")


def test_an_address_that_cannot_be_had(server, trained, refused, monkeypatch):
    monkeypatch.setenv("MEGATRON_NPU_DEVICE", "cpu")
    taken = refused("serve", "--load", trained, "--port", server.port)
    assert f"--port 127.0.0.1:{server.port}" in taken
    assert f"--port 127.0.0.1:{server.port}" in refused(
        "serve", "--load", trained, "--port", f"127.0.0.1:{server.port}"
    )
    assert "but got 70000" in refused("serve", "--load", trained, "--port", "70000")
    apart = refused("serve", "--load", trained, "--port", "192.0.2.1:0", "--host", "192.0.2.2")
    assert "--host 192.0.2.2 and --port 192.0.2.1:0 name different hosts" in apart


@pytest.mark.parametrize(("width", "dark"), [(1200, False), (360, True)])
def test_the_page_in_a_browser(server, tmp_path, width, dark):
    with browser.page(tmp_path) as page:
        page.open(f"http://127.0.0.1:{server.port}/", width=width, dark=dark)
        page.wait("document.getElementById('model')?.textContent === 'tiny-model'")
        assert page.value("document.documentElement.scrollWidth <= window.innerWidth"), "nothing sticks out"
        back = page.value("getComputedStyle(document.body).backgroundColor")
        assert (back == "rgb(23, 23, 26)") == dark
        fields = "[...document.querySelectorAll('input,textarea')]"
        assert page.value(f"{fields}.filter(field => !field.labels.length).length") == 0
        page.value(
            "for (const [id, value] of [['prompt', '1 2 3'], ['seed', '3'], ['max_tokens', '6']])"
            " document.getElementById(id).value = value"
        )
        page.value("document.getElementById('generate').click()")
        page.wait("document.getElementById('status').textContent.includes('6 tokens')")
        expected = server.complete(prompt="1 2 3", max_tokens=6, seed=3, top_p=0.9, echo=True)
        assert page.value("document.getElementById('output').textContent") == choices(expected)[0]
        page.value(
            "document.getElementById('prompt').value = 'word'; document.getElementById('generate').click()"
        )
        page.wait("document.getElementById('status').textContent.includes('must consist of numbers')")
        page.value("document.getElementById('prompt').value = '1'")
        page.value("document.getElementById('max_tokens').value = '32000'")
        page.value("document.getElementById('temperature').value = '0'")
        page.value("document.getElementById('generate').click()")
        page.wait("document.getElementById('output').textContent.length > 9")
        page.value("document.getElementById('stop').click()")
        page.wait("document.getElementById('status').textContent === 'Stopped.'")
        server.idle()
        assert [error for error in page.errors if "400" not in error] == []
