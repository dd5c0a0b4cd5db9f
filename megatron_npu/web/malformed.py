"""Suppress the application's response if uvicorn finds a request malformed while it is being handled."""

from __future__ import annotations

from typing import TYPE_CHECKING

import h11

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send


class WithoutTraceback:
    """Drops responses to requests that uvicorn has already rejected, such as one with a malformed chunk.

    uvicorn itself sends status 400 then, and the application's response would raise an error.

    Args:
        app: the application.
    """

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        rejected = False

        async def send_if_possible(message: Message) -> None:
            nonlocal rejected
            if rejected:
                return
            try:
                await send(message)
            except h11.LocalProtocolError:
                rejected = True
                while (await receive())["type"] != "http.disconnect":  # uvicorn closes the connection
                    pass

        await self.app(scope, receive, send_if_possible)
