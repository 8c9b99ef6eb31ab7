"""One client's connection to the server: it ends where the client lets the server wait.

uvicorn bounds neither the time in which a request's head comes nor that in which an answer is taken, and each connection
holds a descriptor, each answer that is not taken a place among the open requests.
"""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.auto import AutoHTTPProtocol

HEAD_SECONDS = 30.0
"""A connection without a request is looked at so often, and ends the second time."""
TAKE_SECONDS = 60.0
"""An answer of which so little is taken that it waits for room for so long is given up, and what computes it ends."""


class Connection(AutoHTTPProtocol):  # type: ignore[valid-type, misc]  # whichever of its two parsers uvicorn finds
    """On the event loop, as any protocol."""

    cycle: Any
    """The last request, None before the first."""
    transport: asyncio.Transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._taking: asyncio.TimerHandle | None = None
        self._look(object())

    def connection_lost(self, exc: Exception | None) -> None:
        self._looking.cancel()
        self._taken()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._taking = asyncio.get_running_loop().call_later(TAKE_SECONDS, self.transport.abort)

    def resume_writing(self) -> None:
        self._taken()
        super().resume_writing()

    def _taken(self) -> None:
        if self._taking is not None:
            self._taking.cancel()
            self._taking = None

    def _look(self, before: object) -> None:
        """End the connection where it had no request ``before`` (the last one by then) and has none now."""
        idle = self.cycle is None or self.cycle.response_complete
        if idle and self.cycle is before:
            self.transport.abort()
            return
        last = self.cycle if idle else object()
        self._looking = asyncio.get_running_loop().call_later(HEAD_SECONDS, self._look, last)
