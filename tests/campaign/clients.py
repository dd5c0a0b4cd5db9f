"""Clients of ``serve`` and of a run's page, as they come: patient ones, wrong ones, and ones that go away."""

from __future__ import annotations

import http.client
import json
import random
import socket
from collections.abc import Callable
from typing import Any

_PATIENCE = 90.0  # seconds for an answer
Asked = tuple[str, str]  # what was asked, and what was wrong with the answer; empty: nothing


class Client:
    """Asks one thing after the other.

    Args:
        port: of this machine.
        seed: decides what is asked.
    """

    def __init__(self, port: int, seed: float) -> None:
        self.port, self.rng = port, random.Random(seed)

    def pause(self) -> float:
        """Return how many seconds it waits."""
        return self.rng.uniform(0.1, 1.5)

    def ask(self) -> Asked:
        """Ask something; whatever the server does, this returns."""
        kind: Callable[[], str] = self.rng.choice(self.kinds())
        try:
            return kind.__name__, kind()
        except (OSError, http.client.HTTPException, ValueError, KeyError) as error:
            return kind.__name__, f"{type(error).__name__}: {error}"

    def kinds(self) -> list[Callable[[], str]]:
        """Return what it may ask."""
        raise NotImplementedError

    def _get(self, path: str) -> bytes:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=_PATIENCE)
        try:
            connection.request("GET", path)
            return connection.getresponse().read()
        finally:
            connection.close()


class ServeClient(Client):
    """A client of ``serve``."""

    def __init__(self, port: int, seed: float) -> None:
        super().__init__(port, seed)
        self._first: str | None = None

    def kinds(self) -> list[Callable[[], str]]:
        """Return what it may ask."""
        return [
            *(self.whole, self.stream, self.scored, self.chat, self.wrong, self.health),
            *(self.leave_a_stream, self.leave_a_body),
        ]

    def whole(self) -> str:
        """Ask for the likeliest text; it is the same each time."""
        _, answer = self._post(prompt="1 2 3", max_tokens=24, temperature=0)
        text = answer["choices"][0]["text"]
        self._first = self._first or text
        return "" if text == self._first else f"{text!r}, not {self._first!r}"

    def stream(self) -> str:
        """Take all of a stream."""
        connection = self._begin(prompt="4 5", max_tokens=40, stream=True)
        end = connection.getresponse().read()[-14:]
        connection.close()
        return "" if end == b"data: [DONE]\n\n" else f"a stream that ends in {end!r}"

    def scored(self) -> str:
        """Ask what the model thinks of a prompt."""
        _, answer = self._post(prompt=["7 8 9", "1"], max_tokens=0, echo=True, logprobs=2)
        return "" if len(answer["choices"]) == 2 else f"{answer}"

    def chat(self) -> str:
        """Ask for a chat, of which this checkpoint knows nothing: 400."""
        return self._refused(400, "/v1/chat/completions", messages=[{"role": "user", "content": "1"}])

    def wrong(self) -> str:
        """Ask for what cannot be: 400."""
        fields: dict[str, Any] = self.rng.choice(
            [{"prompt": "\ud800"}, {"n": -1}, {"\ud800": 1}, {"prompt": [-5]}]
        )
        return self._refused(400, "/v1/completions", **fields)

    def health(self) -> str:
        """Ask whether it is there."""
        return "" if b'"ok"' in self._get("/health") else "no health"

    def leave_a_stream(self) -> str:
        """Go away in the middle of a stream."""
        connection = self._begin(prompt="4 5", max_tokens=90, stream=True)
        connection.getresponse().read(1)
        connection.close()
        return ""

    def leave_a_body(self) -> str:
        """Go away in the middle of a request."""
        with socket.create_connection(("127.0.0.1", self.port), _PATIENCE) as line:
            head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            line.sendall(f"{head}Content-Length: 1000\r\n\r\n{{".encode())
        return ""

    def _begin(self, path: str = "/v1/completions", **fields: Any) -> http.client.HTTPConnection:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=_PATIENCE)
        connection.request("POST", path, json.dumps(fields), {"Content-Type": "application/json"})
        return connection

    def _post(self, path: str = "/v1/completions", **fields: Any) -> tuple[int, dict[str, Any]]:
        connection = self._begin(path, **fields)
        try:
            answer = connection.getresponse()
            return answer.status, json.loads(answer.read())
        finally:
            connection.close()

    def _refused(self, status: int, path: str, **fields: Any) -> str:
        code, answer = self._post(path, **fields)
        return "" if code == status else f"{code}: {answer}"


class DashboardClient(Client):
    """A client of a run's page."""

    def kinds(self) -> list[Callable[[], str]]:
        """Return what it may ask."""
        return [self.page, self.state, self.events]

    def page(self) -> str:
        """Ask for the page."""
        return "" if b"<html" in self._get("/").lower() else "no page"

    def state(self) -> str:
        """Ask for the run's state."""
        return "" if json.loads(self._get("/state"))["iteration"] else "no iteration"

    def events(self) -> str:
        """Go away after the first event."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=_PATIENCE)
        connection.request("GET", "/events")
        first = connection.getresponse().read(6)
        connection.close()
        return "" if first == b"data: " else f"{first!r}"
