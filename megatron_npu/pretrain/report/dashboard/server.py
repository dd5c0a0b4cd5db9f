"""Implement the read-only dashboard server, which responds only to GET requests.

``process`` starts it: ``python -m megatron_npu.pretrain.report.dashboard.server METRICS NAME SOCKET HOST``.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import sys
import threading
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import FileResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from megatron_npu.pretrain.report.dashboard.snapshot import Run
from megatron_npu.web.address import Address
from megatron_npu.web.headers import HEADERS
from megatron_npu.web.malformed import WithoutTraceback

PAGE = Path(__file__).parent / "page"
FILES = ("index.html", "dashboard.css", "dashboard.js")
CLIENTS = 64  # at a time; more are told to come again
_TICK = 0.5  # seconds between two looks at the file
_ALIVE = 15.0  # seconds after which something is sent even if nothing is new
_LAST_SECONDS = 2  # that clients have to take the last state when the server ends


class Server(uvicorn.Server):
    """HTTP server that serves the dashboard of a run until ``should_exit`` is set.

    Args:
        run: the run to show.
        host: the address to listen on; requests for other host names are rejected, so that other web sites
            cannot use the server.
    """

    def __init__(self, run: Run, host: Address) -> None:
        self.run_shown = run
        routes = [Route("/state", self._state), Route("/events", self._events)]
        routes += [Route(f"/{'' if name == 'index.html' else name}", _file(name)) for name in FILES]
        app = WithoutTraceback(_Guarded(Starlette(routes=routes), host))
        super().__init__(
            uvicorn.Config(
                app,
                http="h11",
                loop="asyncio",
                ws="none",
                lifespan="off",
                log_config=None,
                access_log=False,
                server_header=False,
                limit_concurrency=CLIENTS,
                timeout_graceful_shutdown=_LAST_SECONDS,
            )
        )

    async def _state(self, request: Request) -> Response:
        """Respond with the state of the run as JSON, for use by scripts."""
        _, text = await run_in_threadpool(self.run_shown.snapshot)
        return Response(text, media_type="application/json")

    async def _events(self, request: Request) -> Response:
        """Respond with the state of the run, now and after each change, as server-sent events."""
        return StreamingResponse(self._states(), media_type="text/event-stream")

    async def _states(self) -> AsyncIterator[str]:
        known, told = 0, time.monotonic()
        while True:
            ending = self.should_exit
            version, text = await run_in_threadpool(self.run_shown.snapshot, ending)
            if version != known:
                known, told = version, time.monotonic()
                yield f"data: {text}\n\n"
            elif time.monotonic() - told > _ALIVE:
                told = time.monotonic()
                yield ": nothing new\n\n"
            if ending:
                return
            await asyncio.sleep(_TICK)


def _file(name: str) -> Any:
    async def answer(request: Request) -> Response:
        return FileResponse(PAGE / name)

    return answer


class _Guarded:
    """Wrapper of a web application that adds ``HEADERS`` and rejects requests for unknown host names.

    Otherwise, a web site could point its own name to 127.0.0.1 and read the responses (DNS rebinding).
    """

    def __init__(self, app: ASGIApp, host: Address) -> None:
        self.app = app
        self.names = {"localhost", "127.0.0.1", "::1", host.host} if host.is_loopback else None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                extra = [(name.lower().encode(), value.encode()) for name, value in HEADERS.items()]
                message["headers"] = [*message["headers"], *extra]
            await send(message)

        app = self.app
        if self.names is not None and Request(scope).url.hostname not in self.names:
            app = PlainTextResponse("unknown host\n", status_code=421)
        await app(scope, receive, send_with_headers)


def serve(metrics: Path, name: str, sock: socket.socket, host: Address) -> None:
    """Serve the dashboard until Ctrl-C is pressed."""
    with contextlib.suppress(KeyboardInterrupt):  # which uvicorn raises again when it has ended
        Server(Run(metrics, name), host).run(sockets=[sock])


def _serve_while_the_input_is_open(metrics: str, name: str, descriptor: str, host: str) -> None:
    """Serve the dashboard until the parent process ends or closes standard input."""
    sock = socket.socket(fileno=int(descriptor))
    server = Server(Run(Path(metrics), name), Address(host, sock.getsockname()[1]))

    def wait() -> None:
        sys.stdin.buffer.read()
        server.should_exit = True

    threading.Thread(target=wait, daemon=True).start()
    server.run(sockets=[sock])


if __name__ == "__main__":
    _serve_while_the_input_is_open(*sys.argv[1:])
