"""A request that turns out to be malformed while it is handled gets status 400, without a traceback."""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
from collections.abc import Iterator

import pytest

pytest.importorskip("uvicorn")

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from megatron_npu.web.malformed import WithoutTraceback


async def _answer(request: Request) -> Response:
    """Answer without reading the body, as a server refuses a path or a length."""
    return PlainTextResponse("read")


@contextlib.contextmanager
def _served() -> Iterator[int]:
    """Serve inside the block; yield the port."""
    app = WithoutTraceback(Starlette(routes=[Route("/", _answer, methods=["POST"])]))
    config = uvicorn.Config(app, http="h11", lifespan="off", log_config=None, access_log=False)
    server, listener = uvicorn.Server(config), socket.create_server(("127.0.0.1", 0))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    try:
        yield listener.getsockname()[1]
    finally:
        server.should_exit = True
        thread.join()


@pytest.mark.parametrize(("chunk", "status"), [(b"ZZ", 400), (b"-1", 400), (b"0\r\n", 200)])
def test_a_malformed_chunk(chunk: bytes, status: int, caplog: pytest.LogCaptureFixture) -> None:
    head = b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
    with (
        caplog.at_level(logging.ERROR),
        _served() as port,
        socket.create_connection(("127.0.0.1", port), 30) as client,
    ):
        client.sendall(head + chunk + b"\r\n")  # in one piece: it is rejected before the application begins
        assert client.recv(1000).startswith(b"HTTP/1.1 %d " % status)
    assert not caplog.records
