"""moto's S3 in a thread, which can stop in the midst of a checkpoint, so that a run can be killed there."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Iterator
from typing import Any

from moto.server import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import make_server

_WRITES = ("PUT", "POST", "DELETE")


class Stalling:
    """A WSGI application that stops at writes below a path, after the first of them.

    Attributes:
        reached: set when a write has been done and the next one waits.
    """

    def __init__(self, below: Callable[..., Any]) -> None:
        self.below = below
        self.reached = threading.Event()
        self._path: str | None = None
        self._written = False
        self._goes_on = threading.Event()

    @contextlib.contextmanager
    def stopping(self, path: str) -> Iterator[None]:
        """Stop at writes below a path, such as ``/BUCKET/run/iter_0000004/``, until the block ends."""
        self.reached.clear()
        self._goes_on.clear()
        self._path, self._written = path, False
        try:
            yield
        finally:
            self._path = None
            self._goes_on.set()

    def __call__(self, environ: dict[str, Any], start_response: Callable[..., Any]) -> Any:
        path, stopped = environ["PATH_INFO"], self._path
        if stopped is None or environ["REQUEST_METHOD"] not in _WRITES or not path.startswith(stopped):
            return self.below(environ, start_response)
        if not self._written and environ["REQUEST_METHOD"] == "PUT":
            self._written = True
            return self.below(environ, start_response)
        self.reached.set()
        self._goes_on.wait()
        start_response("503 Service Unavailable", [("Content-Length", "0")])  # its client has been killed
        return [b""]


@contextlib.contextmanager
def serving(port: int) -> Iterator[Stalling]:
    """Serve an empty storage at a port within the block."""
    application = Stalling(DomainDispatcherApplication(create_backend_app))
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = make_server("127.0.0.1", port, application, threaded=True)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield application
    finally:
        server.shutdown()
        thread.join()
