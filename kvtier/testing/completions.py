"""A stub of an OpenAI-compatible server: canned streams at a steady pace, and failures on request. It computes nothing."""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

if TYPE_CHECKING:
    from types import TracebackType

    from typing_extensions import Self

MODEL = "stub"


@dataclass(frozen=True, slots=True)
class Reply:
    """How one request is answered."""

    status: int = 200
    message: str = ""
    """Of an error's body."""
    cut_after: int | None = None
    """The connection is closed after so many pieces."""
    error_after: int | None = None
    """An error event comes after so many pieces, and then the end."""
    unfinished: bool = False
    """The response ends without its last event."""
    stall: bool = False
    """Nothing comes at all."""
    content_type: str = "text/event-stream"
    garbled: bool = False
    """The first event is no JSON."""
    newline: bytes = b"\n"


@dataclass(slots=True)
class StubServer:
    """Listens on loopback, on the event loop that it is started on. An async context manager.

    ``seen`` has the body of each request, in order; ``reply`` says how the request of that number is answered.
    """

    gap: float = 0.0
    """Seconds from one piece to the next."""
    reply: Callable[[int], Reply] = lambda _: Reply()
    cached_tokens: int = 0
    """Of each prompt, as the usage says."""
    context: ssl.SSLContext | None = None
    keep: bool = True
    """Whether ``seen`` and ``headers`` are kept."""
    seen: list[dict[str, Any]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    count: int = 0
    _server: asyncio.Server | None = None

    async def start(self, port: int = 0) -> None:
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(
            lambda: _Connection(self, loop), "127.0.0.1", port, backlog=2048, ssl=self.context
        )

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._server is not None, "it has been started"
        self._server.close()

    @property
    def url(self) -> str:
        assert self._server is not None, "it has been started"
        scheme = "http" if self.context is None else "https"
        return f"{scheme}://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"


class _Connection(asyncio.Protocol):
    """One connection: requests one after another, each answered before the next is read."""

    def __init__(self, server: StubServer, loop: asyncio.AbstractEventLoop) -> None:
        self._server, self._loop = server, loop
        self._came = b""
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)

    def connection_lost(self, error: Exception | None) -> None:
        self._transport = None

    def data_received(self, data: bytes) -> None:
        self._came += data
        head, separator, rest = self._came.partition(b"\r\n\r\n")
        if not separator:
            return
        line, *fields = head.decode("latin-1").split("\r\n")
        headers = {name.lower(): value.strip() for name, _, value in (each.partition(":") for each in fields)}
        length = int(headers.get("content-length", "0"))
        if len(rest) < length:
            return
        self._came = rest[length:]
        if line.startswith("GET"):
            self._whole(200, {"object": "list", "data": [{"id": MODEL, "object": "model"}]})
            return
        body = json.loads(rest[:length])
        if self._server.keep:
            self._server.seen.append(body)
            self._server.headers.append(headers)
        reply = self._server.reply(self._server.count)
        self._server.count += 1
        if reply.status != 200:
            self._whole(reply.status, {"error": {"message": reply.message, "type": "stub"}})
        elif not reply.stall:
            self._begin(reply, body, "/chat/" in line)

    def _begin(self, reply: Reply, body: dict[str, Any], chat: bool) -> None:
        self._write(
            b"HTTP/1.1 200 OK\r\ncontent-type: %s\r\ntransfer-encoding: chunked\r\n\r\n" % reply.content_type.encode()
        )
        pieces, prompt = int(body["max_tokens"]), body.get("prompt") or body["messages"][0]["content"]
        prompt_tokens = len(prompt.split()) if isinstance(prompt, str) else len(prompt)
        text = {"delta": {"content": " word"}} if chat else {"text": " word", "logprobs": None}
        kind = "chat.completion.chunk" if chat else "text_completion"
        common = {"id": f"cmpl-{'0' * 32}", "object": kind, "created": 0, "model": MODEL}
        piece = {**common, "choices": [{"index": 0, **text, "finish_reason": None}], "usage": None}
        usage = {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": pieces,
            "prompt_tokens_details": {"cached_tokens": self._server.cached_tokens},
        }
        event = _event(json.dumps(piece).encode(), reply.newline)
        if reply.garbled:
            event = _event(b"{not json", reply.newline)
        last = _event(json.dumps({**common, "choices": [], "usage": usage}).encode(), reply.newline)
        self._next(reply, event, last, pieces, 0)

    def _next(self, reply: Reply, event: bytes, last: bytes, pieces: int, sent: int) -> None:
        if self._transport is None:
            return
        if sent == reply.cut_after:
            self._transport.abort() if self._server.context is None else self._transport.close()
            return
        if sent == reply.error_after:
            last, pieces = _event(b'{"error":{"message":"the engine has failed","type":"server_error"}}', b"\n"), sent
        if sent < pieces:
            self._write(event)
            self._loop.call_later(self._server.gap, self._next, reply, event, last, pieces, sent + 1)
            return
        end = b"" if reply.unfinished else last + _event(b"[DONE]", reply.newline)
        self._write(end + b"0\r\n\r\n")

    def _whole(self, status: int, content: object) -> None:
        body = json.dumps(content).encode()
        self._write(
            b"HTTP/1.1 %d Stub\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%s"
            % (status, len(body), body)
        )

    def _write(self, data: bytes) -> None:
        if self._transport is not None:
            self._transport.write(data)


def _event(payload: bytes, newline: bytes) -> bytes:
    """One server-sent event as one chunk of the transfer."""
    event = b"data: " + payload + newline + newline
    return b"%x\r\n%s\r\n" % (len(event), event)
