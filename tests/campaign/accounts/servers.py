"""The server and the dashboard: values, bodies, paths, headers, slow and resetting clients, signals."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import struct
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from tests.campaign.accounts import trials
from tests.campaign.accounts.rooms import Room
from tests.campaign.accounts.samples import Samples
from tests.campaign.accounts.trials import Verdict
from tests.support import ports

_WAIT = 60.0  # seconds for an answer
_LIMIT = "127.0.0.1"


class Request(NamedTuple):
    """What is sent, or a function that sends and returns the answer."""

    what: str
    sent: bytes | Callable[[int], bytes]
    ends: bool = False  # whether nothing more follows


class Server:
    """A server of the user, until the end of the block."""

    def __init__(
        self, room: Room, words: list[str], port: int, path: str, prepare: Callable[[], object] = bool
    ) -> None:
        self.room, self.port, self.path, self.prepare = room, port, path, prepare
        self.log = room.folder / "server.txt"
        self._seen = 0
        with self.log.open("wb") as stream:
            self.process = subprocess.Popen(
                [*trials.installed(), *words],
                env=room.environment(),
                cwd=room.temporary,
                stdin=subprocess.DEVNULL,
                stdout=stream,
                stderr=stream,
                start_new_session=True,
                preexec_fn=self._become,
            )

    def _become(self) -> None:
        self.prepare()
        self.room.become(self.room.user)

    def __enter__(self) -> Server:
        began = time.monotonic()
        while self.process.poll() is None and time.monotonic() - began < 300 * trials.slowness():
            if _is_alive(self.port, self.path):
                break
            time.sleep(0.2)
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()
        self.room.sweep()

    def told(self) -> str:
        """Return all that it has printed."""
        return self.log.read_text(errors="replace")

    def tried(self, place: str, request: Request) -> Verdict:
        """Send a request; return what became of it, and of the server."""
        began = time.monotonic()
        try:
            sent = request.sent
            got = sent(self.port) if callable(sent) else exchanged(self.port, sent, request.ends)
        except OSError as error:
            got = f"<{type(error).__name__}>".encode()
        is_alive, told = _is_alive(self.port, self.path), self.told()[self._seen :]
        self._seen += len(told)
        verdict = self._judged(got, told, is_alive, request.ends)
        text = f"{got[:300].decode(errors='replace')} | {told[-600:]}"
        return Verdict(place, request.what, verdict, self.process.poll(), time.monotonic() - began, text)

    def _judged(self, got: bytes, told: str, is_alive: bool, ends: bool) -> str:
        first = got.partition(b"\r\n")[0]
        faults = {
            "executed": bool(self.room.marked()),
            "traceback": "Traceback" in told or b" 500 " in first,
            "crash": self.process.poll() is not None,
            "hung": not is_alive or b"<TimeoutError>" in got,
            "silent": not got and not ends,  # who hangs up may get no answer
        }
        found = next((name for name, there in faults.items() if there), "")
        return found or ("done" if b" 200 " in first else "refused")

    def ended(self, place: str, what: str, number: int) -> Verdict:
        """End it with a signal; return what became of it."""
        began = time.monotonic()
        self.process.send_signal(number)
        try:
            code: int | None = self.process.wait(60 * trials.slowness())
        except subprocess.TimeoutExpired:
            code = None
        left = trials.left(self.room)
        told = self.told()
        faults = {"hung": code is None, "orphan": bool(left), "traceback": "Traceback" in told}
        verdict = next((name for name, there in faults.items() if there), "done")
        return Verdict(place, what, verdict, code, time.monotonic() - began, f"{told[-500:]} left {left}")


def exchanged(port: int, sent: bytes, ends: bool = False, wait: float = _WAIT) -> bytes:
    """Send bytes to a server, and return its answer."""
    got = b""
    with socket.create_connection((_LIMIT, port), 10) as connection:
        connection.settimeout(wait)
        try:
            connection.sendall(sent)
            if ends:
                connection.shutdown(socket.SHUT_WR)
            while len(got) < 200_000 and not _is_whole(got):
                part = connection.recv(65536)
                if not part:
                    break
                got += part
        except OSError as error:
            got += f" <{type(error).__name__}>".encode()
    return got


def _is_whole(got: bytes) -> bool:
    head, end, body = got.partition(b"\r\n\r\n")
    found = re.search(rb"content-length: (\d+)", head, re.IGNORECASE)
    return bool(end and found and len(body) >= int(found[1])) or b"data: [DONE]" in body


def _is_alive(port: int, path: str) -> bool:
    try:
        return bool(exchanged(port, get(path, "Connection: close\r\n"), wait=60 * trials.slowness()))
    except OSError:
        return False


def get(path: str | bytes, more: str = "") -> bytes:
    """Return a request for a page."""
    name = path.encode() if isinstance(path, str) else path
    return b"GET " + name + f" HTTP/1.1\r\nHost: 127.0.0.1\r\n{more}\r\n".encode()


def post(body: Any, path: str = "/v1/completions", **how: Any) -> bytes:
    """Return a request with a body, which is JSON unless it is bytes.

    Args:
        body: of the request.
        path: of the request.
        how: ``method``; ``length``: what the header says; ``head``: more headers.
    """
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    length = how.get("length", len(content))
    head = f"{how.get('method', 'POST')} {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: {length}\r\n"
    return head.encode() + b"Content-Type: application/json\r\n" + how.get("head", b"") + b"\r\n" + content


_ASKED: dict[str, Any] = {"prompt": "1 2", "max_tokens": 2}
_VALUES: dict[str, tuple[Any, ...]] = {
    "temperature": (-1, 1e308, "x", []),
    "top_p": (0, -0.0, 2, True),
    "max_tokens": (10**30, -1, 1.5, 0, True),
    "n": (0, 10**9, -1),
    "stop": ("", ["a"] * 10_000, {"a": 1}, "\ud800"),
    "logprobs": (10**9, -1),
    "seed": (2**70, -1, "x"),
    "prompt": (
        *([], ["1"] * 100_000, [[1, 2]], [-1], [10**30], ["\ud800"], "\x00", "9" * 6000, {"a": 1}, None),
    ),
    "stream": ("yes", 1),
    "echo": ("x",),
    "model": ("\ud800", "../../etc"),
    "logit_bias": ({"x": 1}, {"1": 1e400}),
    "best_of": (10**9,),
    "suffix": ("\ud800",),
    "\ud800": (1,),
    "user": ("x" * 1_000_000,),
}
_BODIES: dict[str, bytes] = {
    "nan": b'{"prompt":"1","temperature":NaN}',
    "1e400": b'{"prompt":"1","temperature":1e400}',
    "infinity": b'{"prompt":"1","max_tokens":Infinity}',
    "nested": b'{"prompt":' + b"[" * 500_000,
    "not UTF-8": b'{"prompt":"\xff"}',
    "UTF-16": '{"prompt":"1"}'.encode("utf-16"),
    "a byte order mark": b'\xef\xbb\xbf{"prompt":"1"}',
    "a key twice": b'{"prompt":"1","prompt":2}',
    "a list": b"[]",
    "null": b"null",
    "empty": b"",
    "10^4 digits": b'{"prompt":"1","max_tokens":' + b"9" * 10_000 + b"}",
}
_USER = {"role": "user", "content": "1 2"}
_CHATS: dict[str, Any] = {
    "plain": {"messages": [_USER], "max_tokens": 2},
    "no messages": {},
    "messages of an object": {"messages": {"a": 1}},
    "a role of a template": {"messages": [{"role": "{{7*7}}", "content": "{% include '/etc/passwd' %}"}]},
    "parts": {"messages": [{"role": "user", "content": ["x"]}]},
    "an image": {
        "messages": [
            {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}]}
        ]
    },
    "10^5 messages": {"messages": [_USER] * 100_000, "max_tokens": 1},
    "5,000 messages": {"messages": [_USER] * 5000, "max_tokens": 1},
    "a surrogate": {"messages": [{"role": "user", "content": "\ud800"}]},
    "tools": {"messages": [_USER], "tools": [{"type": "function"}]},
    "a stream": {"messages": [_USER], "stream": True, "max_tokens": 2},
    "logprobs of 10^9": {"messages": [_USER], "logprobs": True, "top_logprobs": 10**9},
    "a name of a list": {"messages": [{**_USER, "name": ["x"]}]},
    "a template": {"messages": [_USER], "chat_template": "{{ ''.__class__.__mro__ }}"},
    "template arguments": {"messages": [_USER], "chat_template_kwargs": {"messages": []}},
    "no content": {"messages": [{"role": "assistant", "content": None}]},
    "nested": {"messages": [json.loads("[" * 500 + "]" * 500)]},
}
_RAW: dict[str, tuple[bytes, bool]] = {
    "a path above": (get("/../../etc/passwd"), False),
    "a path with a zero byte": (get("/%00"), False),
    "a path above, encoded": (get("/%2e%2e/%2e%2e/etc/passwd"), False),
    "a path that is not UTF-8": (get("/%ff%fe"), False),
    "a long path": (get("/" + "a" * 200_000), False),
    "another host": (b"GET / HTTP/1.1\r\nHost: evil.example\r\n\r\n", False),
    "no host": (b"GET /health HTTP/1.1\r\n\r\n", False),
    "two hosts": (b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\nHost: evil\r\n\r\n", False),
    "another method": (post(_ASKED, method="BREW"), False),
    "put": (post(_ASKED, method="PUT"), False),
    "another origin": (post(_ASKED, head=b"Origin: http://127.0.0.1:9\r\n"), False),
    "a form of another page": (
        post(b'{"prompt":"1","a":"=1"}', head=b"Content-Type: text/plain\r\nOrigin: http://127.0.0.1:9\r\n"),
        False,
    ),
    "noise": (os.urandom(2000) + b"\r\n\r\n", True),
    "TLS": (bytes.fromhex("16030100a5010000a10303") + os.urandom(150), True),
    "HTTP/0.9": (b"GET /\r\n\r\n", True),
    "HTTP/2": (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", True),
    "a negative length": (post(_ASKED, length=-1), True),
    "a length that is too long": (post(_ASKED, length=10**6), True),
    "a length of text": (post(_ASKED, length="x"), True),
    "a length of other digits": (post(_ASKED, length="\u0663"), True),
    "a length of 10^30": (post(_ASKED, length=10**30), True),
    "a bad chunk": (
        b"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nTransfer-Encoding: chunked\r\n\r\nZZ\r\n",
        True,
    ),
    "chunks and a length": (post(b"0\r\n\r\n", head=b"Transfer-Encoding: chunked\r\n"), True),
    "20,000 headers": (get("/health", "".join(f"X-{n}: a\r\n" for n in range(20_000))), False),
    "an upgrade": (get("/", "Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Key: x\r\n"), True),
    "100-continue": (post(_ASKED, head=b"Expect: 100-continue\r\n"), False),
    "a range": (get("/", "Range: bytes=-999999999999999999999\r\n"), False),
    "6 MB": (post(b'{"prompt":"' + b"1 " * 3_000_000 + b'"}'), False),
    "100 MB": (post(b"x" * (100 << 20)), False),
}


def _slow(port: int) -> bytes:
    """Hold 100 requests half sent, and send a whole one."""
    held = [socket.create_connection((_LIMIT, port), 10) for _ in range(100)]
    for each in held:
        each.sendall(post(_ASKED)[:60])
    time.sleep(3)
    got = exchanged(port, post(_ASKED))
    for each in held:
        each.close()
    return got


def _resetting(port: int) -> bytes:
    for _ in range(50):
        connection = socket.create_connection((_LIMIT, port), 10)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        connection.sendall(post({**_ASKED, "stream": True, "max_tokens": 20}))
        connection.close()
    return exchanged(port, post(_ASKED))


def requests() -> Iterator[Request]:
    """Yield what is sent to the server."""
    yield Request("plain", post(_ASKED))
    for name, values in _VALUES.items():
        for value in values:
            yield Request(f"{name!a}={value!a}"[:60], post({**_ASKED, name: value}))
    for name, body in _BODIES.items():
        yield Request(f"body: {name}", post(body))
    for name, chat in _CHATS.items():
        yield Request(f"chat: {name}", post(chat, "/v1/chat/completions"))
    for name, (sent, ends) in _RAW.items():
        yield Request(name, sent, ends)
    yield Request("100 slow senders", _slow)
    yield Request("50 resets in streams", _resetting)


def serve(room: Room) -> Iterator[Verdict]:
    """Yield what became of requests to a server, and of signals under load."""
    samples = Samples(room)
    words = ["serve", "--load", str(samples.checkpoint), "--port"]
    port = ports.free_port()
    with Server(room, [*words, str(port)], port, "/health") as server:
        for request in requests():
            yield server.tried("serve", request)
    for number in (signal.SIGTERM, signal.SIGKILL, signal.SIGINT, signal.SIGHUP):
        port = ports.free_port()
        with Server(room, [*words, str(port)], port, "/health") as server, _load(port):
            yield server.ended(
                "signals to servers", f"{signal.Signals(number).name} to serve under load", number
            )


class _load:  # noqa: N801  # as a function
    """Eight streams and 20 half-sent requests, until the end of the block."""

    def __init__(self, port: int) -> None:
        self.port = port

    def __enter__(self) -> None:
        asked = post({**_ASKED, "max_tokens": 40, "stream": True})
        self.threads = [threading.Thread(target=self._stream, args=(asked,)) for _ in range(8)]
        for thread in self.threads:
            thread.start()
        self.held = [socket.create_connection((_LIMIT, self.port), 10) for _ in range(20)]
        for each in self.held:
            each.sendall(post(_ASKED)[:-3])
        time.sleep(0.5)

    def _stream(self, asked: bytes) -> None:
        try:
            exchanged(self.port, asked, wait=20)
        except OSError:
            return

    def __exit__(self, *_: object) -> None:
        for thread in self.threads:
            thread.join()
        for each in self.held:
            each.close()


_ROWS: dict[str, bytes] = {
    "nan": b'{"iteration":1,"lm loss":NaN}\n',
    "text": b'{"iteration":"x","epoch":[]}\n',
    "nested": b"[" * 300_000 + b"\n",
    "6,000 digits": b'{"iteration":' + b"9" * 6000 + b"}\n",
    "a script": b'{"iteration":1,"lm loss":1,"<img src=x onerror=alert(1)>":1}\n',
    "a surrogate": b'{"iteration":1,"\\ud800":1,"lm loss":2}\n',
    "noise": os.urandom(100_000),
    "a line of 30 MB": b'{"a":"' + b"x" * 30_000_000 + b'"}\n',
    "a negative iteration": b'{"iteration":-5,"lm loss":1e308}\n',
    "nothing": b"",
}


def dashboard(room: Room) -> Iterator[Verdict]:
    """Yield what became of dashboards of a stranger's folders."""
    for name, rows in _ROWS.items():
        folder = room.place(f"job {name}")
        for file in ("metrics.jsonl", "summary.json"):
            (folder / file).write_bytes(rows)
        room.give(folder)
        port = ports.free_port()
        with Server(room, ["dashboard", str(folder), "--port", f"{_LIMIT}:{port}"], port, "/") as server:
            yield server.tried("dashboard", Request(f"page: {name}", get("/", "Connection: close\r\n")))
            yield server.tried("dashboard", Request(f"events: {name}", _events))
            yield server.tried(
                "dashboard", Request(f"another host: {name}", b"GET / HTTP/1.1\r\nHost: evil\r\n\r\n")
            )
            yield server.ended("dashboard", f"SIGTERM: {name}", signal.SIGTERM)
        shutil.rmtree(folder, ignore_errors=True)


def _events(port: int) -> bytes:
    with socket.create_connection((_LIMIT, port), 10) as connection:
        connection.settimeout(20)
        connection.sendall(get("/events"))
        return connection.recv(65536)
