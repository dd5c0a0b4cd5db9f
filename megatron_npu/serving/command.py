"""``megatron-npu serve``: serve a checkpoint over HTTP with OpenAI's completions API and a web page.

Several processes can share one model (torchrun --nproc-per-node N -m megatron_npu serve); the first process
answers requests.
"""

from __future__ import annotations

import argparse
import contextlib
import signal
import socket
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from megatron_npu.base.arg_parser import Parser, byte_size, positive
from megatron_npu.base.errors import UsageError
from megatron_npu.generation import trained_model
from megatron_npu.generation.sampling import leader
from megatron_npu.generation.sampling.leader import Leader
from megatron_npu.generation.trained_model import SharedModelFlags, TrainedModel
from megatron_npu.serving.engine import Engine
from megatron_npu.web.address import LOOPBACK, Address, address, listening, require_packages

_GRACE = 5  # seconds for answers to be sent when the server stops
_CONNECTIONS = 256  # that may be open; one more is told 503


@dataclass(frozen=True)
class ServeFlags(SharedModelFlags):
    """The flags of the command."""

    port: Address
    host: str | None
    model_name: str | None
    max_queue: int
    max_texts: int
    max_request_bytes: int


def parser() -> argparse.ArgumentParser:
    """Return the command's parser."""
    result = Parser("megatron-npu serve", description=__doc__)
    add = result.add_argument
    trained_model.add_flags(add)
    add(
        "--port",
        type=address,
        metavar="[HOST:]PORT",
        default=Address(LOOPBACK, 8000),
        help="address to listen on; port 0 selects any free port; any host other than the loopback address "
        f"opens the server to the network (default: {LOOPBACK}:8000)",
    )
    add("--host", help=argparse.SUPPRESS)  # the host apart from the port, as other servers have it
    add(
        "--model-name",
        metavar="NAME",
        help="name of the model in the API (default: the name of the --load folder)",
    )
    add(
        "--max-queue",
        type=positive,
        default=16,
        help="maximum number of queued requests; the server answers further ones with status 429",
    )
    add("--max-texts", type=positive, default=8, help="maximum number of completions per request")
    add(
        "--max-request-bytes",
        type=byte_size,
        default=1 << 18,
        help="maximum size of a request in bytes; larger requests are answered with status 413",
    )
    return result


def main(argv: Sequence[str]) -> int:
    """Run the command until SIGINT or SIGTERM arrives, and return its exit code.

    Raises:
        UsageError: the checkpoint does not exist, the address cannot be used, or the web library is missing.
    """
    given = ServeFlags.of(parser().parse_args(argv))
    at = listening_at(given.port, given.host)
    require_packages("serve")
    patience = int(leader.PATIENCE.total_seconds()) // 60
    with trained_model.loaded(given, distributed_timeout_minutes=patience) as model:
        if model.args.rank > 0:  # the first rank says when it is over
            for number in (signal.SIGINT, signal.SIGTERM):
                signal.signal(number, signal.SIG_IGN)
        with leader.leading(model.sampler) as first:
            if first is not None:
                _serve(given, at, model, first)
    return 0


def listening_at(port: Address, host: str | None) -> Address:
    """Return the address to listen on.

    Raises:
        UsageError: ``--host`` and ``--port`` name different hosts.
    """
    if host is None:
        return port
    if port.host not in (LOOPBACK, host):
        raise UsageError(f"--host {host} and --port {port} name different hosts", remedy="Remove --host.")
    return port._replace(host=host)


def _serve(given: ServeFlags, at: Address, model: TrainedModel, first: Leader) -> None:
    """Serve until a signal arrives; this thread generates texts, and another thread handles HTTP."""
    engine = Engine(model, first, given.max_queue)
    name = given.model_name or Path(given.load).resolve().name
    with listening(f"--port {at}", at) as listener:
        server = _server(engine, name, given, at)
        with _until_signal(engine):
            thread = threading.Thread(target=_answer, args=(server, listener, engine), name="http")
            thread.start()
            _announce(name, at, listener)
            try:
                engine.run()
            finally:
                server.should_exit = True
                thread.join()
    print(f"megatron-npu serve: stopped after {engine.jobs} requests and {engine.tokens} tokens", flush=True)


def _server(engine: Engine, name: str, given: ServeFlags, at: Address) -> Any:
    import uvicorn

    from megatron_npu.serving import app
    from megatron_npu.web.malformed import WithoutTraceback

    hosts = ["localhost", "127.0.0.1", "[::1]"] if at.is_loopback else ["*"]
    application = app.build(engine, name, given.max_request_bytes, given.max_texts, hosts)
    return uvicorn.Server(
        uvicorn.Config(
            WithoutTraceback(application),
            log_level="warning",
            access_log=False,
            server_header=False,
            lifespan="off",
            limit_concurrency=_CONNECTIONS,
            timeout_graceful_shutdown=_GRACE,
        )
    )


def _answer(server: Any, listener: socket.socket, engine: Engine) -> None:
    """Run the HTTP server, and stop the engine when the server ends for any reason."""
    try:
        server.run(sockets=[listener])
    finally:
        engine.stop()


@contextlib.contextmanager
def _until_signal(engine: Engine) -> Any:
    """Make SIGINT and SIGTERM stop the engine inside the ``with`` block."""

    def stop(number: int, frame: FrameType | None) -> None:
        engine.stop()

    before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _announce(name: str, at: Address, listener: socket.socket) -> None:
    """Print the address of the server, and a warning if other machines can reach it."""
    host, port = listener.getsockname()[:2]
    shown = f"[{host}]" if ":" in host else host
    print(f"megatron-npu serve: {name} at http://{shown}:{port} (Ctrl-C stops it)", flush=True)
    if not at.is_loopback:
        print(
            f"megatron-npu serve: warning: --port {at} opens the server to other machines without "
            "encryption or passwords: anyone who can reach it can use the model. Use a proxy that "
            "provides both.",
            file=sys.stderr,
            flush=True,
        )
