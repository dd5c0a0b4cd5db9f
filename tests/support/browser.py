"""A headless browser, controlled through pipes with Chromium's DevTools protocol, without driver or port."""

from __future__ import annotations

import base64
import itertools
import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import wait_until

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
_FLAGS = (
    "--headless=new --remote-debugging-pipe --no-sandbox --disable-gpu --disable-dev-shm-usage "
    "--no-first-run --disable-extensions --disable-background-networking --no-default-browser-check"
).split()


def program() -> str:
    """Return the path of the browser's program, or skip the test if there is none."""
    found = next(filter(None, map(shutil.which, NAMES)), None)
    if found is None:
        pytest.skip("no Chromium (or Chrome) is installed")
    return found


class Page:
    """An open page.

    Attributes:
        errors: the exceptions of the page's scripts and the errors in its console, including CSP violations.
    """

    def __init__(self, sends: int, receives: int) -> None:
        self.errors: list[str] = []
        self._out, self._in = os.fdopen(sends, "wb", buffering=0), os.fdopen(receives, "rb", buffering=0)
        self._numbers, self._rest, self._session = itertools.count(1), b"", None

    def start(self) -> None:
        """Open an empty page and listen to its events."""
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        attached = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Call a method of the protocol and return its result."""
        number = next(self._numbers)
        message = {"id": number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        self._out.write(json.dumps(message).encode() + b"\0")
        while True:
            answer = self._next()
            if answer.get("id") == number:
                assert "error" not in answer, answer
                return answer["result"]

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            piece = self._in.read(1 << 16)
            assert piece, "the browser has ended"
            self._rest += piece
        text, _, self._rest = self._rest.partition(b"\0")
        message = json.loads(text)
        self._note(message.get("method"), message.get("params", {}))
        return message

    def _note(self, event: str | None, values: dict[str, Any]) -> None:
        if event == "Runtime.exceptionThrown":
            self.errors.append(json.dumps(values["exceptionDetails"])[:2000])
        elif event == "Log.entryAdded" and values["entry"]["level"] in ("error", "warning"):
            self.errors.append(values["entry"]["text"])

    def open(self, url: str, width: int = 1200, height: int = 900, dark: bool = False) -> None:
        """Navigate to an address in a window of the given size."""
        self.call(
            "Emulation.setDeviceMetricsOverride",
            **{"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600},
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        self.call("Page.navigate", url=url)

    def value(self, expression: str) -> Any:
        """Return the value of a JavaScript expression; a promise is awaited."""
        result = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")

    def wait(self, expression: str) -> Any:
        """Wait until the value of a JavaScript expression is truthy, and return the value."""
        return wait_until(
            lambda: self.value(expression),
            told=lambda: (expression, self.errors, self.value("document.body.innerText")),
        )

    def screenshot(self, path: Path) -> None:
        """Write a PNG of the whole page."""
        taken = self.call("Page.captureScreenshot", captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(taken["data"]))


@contextmanager
def page(folder: Path) -> Iterator[Page]:
    """Open an empty page in a separate browser inside the block.

    Args:
        folder: the folder for the browser's profile.
    """
    theirs_in, sends = os.pipe()
    receives, theirs_out = os.pipe()
    profile = [f"--user-data-dir={folder / 'profile'}"]
    # the protocol's ends are 3 and 4 by definition
    shell = 'exec 3<&"$1" 4>&"$2"; shift 2; exec "$@"'
    words = ["bash", "-c", shell, "browser", str(theirs_in), str(theirs_out), program(), *_FLAGS, *profile]
    process = subprocess.Popen(
        words, pass_fds=(theirs_in, theirs_out), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    os.close(theirs_in)
    os.close(theirs_out)
    try:
        opened = Page(sends, receives)
        opened.start()
        yield opened
    finally:
        process.kill()
        process.wait()
