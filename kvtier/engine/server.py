"""The OpenAI-compatible HTTP server: JSON in, tokens out, nothing else. No endpoint runs what it is sent."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import json
import logging
import time
import uuid
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from urllib.parse import urlsplit

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from kvtier.abc.store import Cleared, Selection
from kvtier.engine.answer import Answer, ChatAnswer, TextAnswer
from kvtier.engine.async_engine import AsyncEngine
from kvtier.engine.conversation import rendered
from kvtier.engine.protocol import Body, ChatBody, CompletionBody, ParameterError, TokenizeBody, parse, parse_clear
from kvtier.engine.request import FinishReason, Request
from kvtier.engine.tokenizer import Tokenizer
from kvtier.errors import RequestError

_log = logging.getLogger(__name__)

MAX_BODY_BYTES = 8 << 20
BODY_SECONDS = 60.0
"""A body that is not there by then is not waited for: senders that trickle would hold connections for ever."""
MAX_SHOWN = 1 << 10
"""Characters of an error's message."""
MAX_CHARACTERS = 2 << 20
"""Of one text: a tokenizer takes seconds, and a hundred bytes a token, for it."""
TOKEN_CHARACTERS = 128
"""Of one token at most, whatever the vocabulary: a text of more than so many times the context is refused unread."""


@dataclass(frozen=True, slots=True)
class Served:
    """What the server tells of the engine behind it."""

    model: str
    exact: bool
    """Whether hits are bit-equal to cold runs here, as the self-test found."""
    tiers: Callable[[], Mapping[str, str]] = dict
    """Tier name to ``ok`` or ``degraded: <why>``, as of now."""
    notes: Callable[[], Sequence[str]] = tuple
    """What is worth knowing although nothing is wrong, as of now."""
    audit: Callable[[], Sequence[str]] = tuple
    """Faults of what is held in memory, in words, as of now."""
    clear: Callable[[Selection, str | None], Cleared] | None = None
    """Clears selected scopes, or one tier; None where no tier is below."""
    metrics: Callable[[], bytes] = bytes
    """The Prometheus text, as of now."""
    shutdown_seconds: float = 10.0
    """How long open requests may go on after the server was told to stop."""


def make_app(engine: AsyncEngine, served: Served) -> Starlette:
    """The ASGI application. Its lifespan starts the engine's thread and ends it."""
    server = _Server(engine, served)

    @contextlib.asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        engine.start()
        try:
            yield
        finally:
            await engine.close(served.shutdown_seconds)

    return Starlette(
        routes=[
            Route("/v1/completions", server.completions, methods=["POST"]),
            Route("/v1/chat/completions", server.chat, methods=["POST"]),
            Route("/tokenize", server.tokenize, methods=["POST"]),
            Route("/v1/models", server.models),
            Route("/v1/models/{name:path}", server.model),
            Route("/health", server.health),
            Route("/metrics", server.metrics),
            Route("/admin/audit", server.audit, methods=["POST"]),
            Route("/admin/clear", server.clear, methods=["POST"]),
        ],
        exception_handlers={
            RequestError: _request_error,
            HTTPException: _http_error,
            ClientDisconnect: _gone,
            Exception: _internal_error,
        },
        lifespan=lifespan,
    )


class _Server:
    def __init__(self, engine: AsyncEngine, served: Served) -> None:
        self._engine = engine
        self._served = served
        self._started = int(time.time())

    async def completions(self, http: HttpRequest) -> Response:
        body = parse(CompletionBody, await _read(http))
        self._check_model(body.model)
        ids = [
            await self._encoded(self._tokenizer("prompt"), prompt, "prompt") if isinstance(prompt, str) else prompt
            for prompt in body.prompts()
        ]
        return await self._answer(http, body, ids, TextAnswer)

    async def chat(self, http: HttpRequest) -> Response:
        body = parse(ChatBody, await _read(http))
        self._check_model(body.model)
        tokenizer = self._tokenizer("messages")
        text = await asyncio.to_thread(rendered, tokenizer, body.messages, body.shown_tools)
        ids = await self._encoded(tokenizer, text, "messages", special=False)
        return await self._answer(http, body, [ids], ChatAnswer)

    async def tokenize(self, http: HttpRequest) -> Response:
        """As vLLM's: what a text or a conversation is in tokens, and how many this engine holds."""
        body = parse(TokenizeBody, await _read(http))
        self._check_model(body.model)
        text = body.text()
        tokenizer = self._tokenizer("prompt" if text is not None else "messages")
        special = text is not None if body.add_special_tokens is None else body.add_special_tokens
        if text is None:
            assert body.messages is not None, "a body is one of the two"
            text = await asyncio.to_thread(
                rendered, tokenizer, body.messages, body.tools, add_generation_prompt=body.add_generation_prompt
            )
        ids = await _encoded(
            tokenizer, text, "prompt" if body.messages is None else "messages", special, MAX_CHARACTERS
        )
        return JSONResponse(
            {
                "count": len(ids),
                "max_model_len": self._engine.engine.max_length,
                "tokens": ids,
                "token_strs": [tokenizer.token_text(token) for token in ids] if body.return_token_strs else None,
            }
        )

    async def models(self, http: HttpRequest) -> Response:
        return JSONResponse({"object": "list", "data": [self._card()]})

    async def model(self, http: HttpRequest) -> Response:
        if http.path_params["name"] != self._served.model:
            raise HTTPException(404, f"the model {http.path_params['name']!r} does not exist here")
        return JSONResponse(self._card())

    async def health(self, http: HttpRequest) -> Response:
        tiers = dict(self._served.tiers())
        fault = self._engine.fault
        worst = self._engine.engine.cache_fault or next((state for state in tiers.values() if state != "ok"), None)
        status = f"error: {fault}" if fault else f"degraded: {worst.removeprefix('degraded: ')}" if worst else "ok"
        content = {
            "status": status,
            "model": self._served.model,
            "exact": self._served.exact,
            "tiers": tiers,
            "notes": list(self._served.notes()),
        }
        return JSONResponse(content, 503 if fault else 200)

    async def metrics(self, http: HttpRequest) -> Response:
        return Response(self._served.metrics(), media_type="text/plain; version=0.0.4")

    async def audit(self, http: HttpRequest) -> Response:
        _check_local(http)
        await _read(http)
        return JSONResponse({"findings": list(await asyncio.to_thread(self._served.audit))})

    async def clear(self, http: HttpRequest) -> Response:
        _check_local(http)
        what, tier = parse_clear(await _read(http))
        if self._served.clear is None:
            raise RequestError("no tier is configured here: there is nothing below HBM to clear")
        cleared = await asyncio.to_thread(self._served.clear, what, tier)
        return JSONResponse(asdict(cleared))

    def _card(self) -> dict[str, object]:
        length = self._engine.engine.max_length
        return {
            "id": self._served.model,
            "object": "model",
            "created": self._started,
            "owned_by": "kvtier",
            "max_model_len": length,
        }

    def _tokenizer(self, param: str) -> Tokenizer:
        tokenizer = self._engine.engine.tokenizer
        if tokenizer is None:
            raise ParameterError("this model has no tokenizer; send token ids to /v1/completions", param)
        return tokenizer

    async def _encoded(self, tokenizer: Tokenizer, text: str, param: str, *, special: bool = True) -> list[int]:
        """The tokens of a text that may fit into this engine."""
        most = min(MAX_CHARACTERS, TOKEN_CHARACTERS * self._engine.engine.max_length)
        return await _encoded(tokenizer, text, param, special, most)

    def _check_model(self, model: str | None) -> None:
        if model not in (None, self._served.model):
            raise HTTPException(404, f"the model {model!r} does not exist here; {self._served.model!r} does")

    async def _answer(self, http: HttpRequest, body: Body, prompts: list[list[int]], kind: type[Answer]) -> Response:
        sampling, hints = body.sampling(), body.hints()
        tokenizer = self._engine.engine.tokenizer
        answer = kind(self._served.model, len(prompts), sampling, tokenizer, body.usage_in_stream)
        base = uuid.uuid4().hex
        requests = [
            Request(f"{base}-{index}", tuple(prompt), sampling, salt=body.cache_salt, hints=hints)
            for index, prompt in enumerate(prompts)
        ]
        chunks = self._chunks(answer, requests)
        if not body.stream:
            await _unless_gone(http, chunks)
            return JSONResponse(answer.whole())
        first = await anext(chunks)  # a request that cannot be served is refused before the stream begins
        return StreamingResponse(_events(first, chunks), media_type="text/event-stream", headers=_NO_STORE)

    async def _chunks(self, answer: Answer, requests: list[Request]) -> AsyncIterator[list[dict[str, object]]]:
        """What each output adds to the stream; ``answer`` gathers the whole meanwhile."""
        if self._engine.busy(len(requests)):
            raise HTTPException(503, self._engine.fault or "too many requests are open; try again")
        order = {request.id: index for index, request in enumerate(requests)}
        with self._engine.open(requests) as outputs:
            yield answer.opening()
            async for output in outputs:
                if output.finish in (FinishReason.ERROR, FinishReason.ABORT):
                    raise HTTPException(503, self._engine.fault or "the engine ended this request before its time")
                yield answer.add(order[output.request_id], output)
        yield answer.closing()


_NO_STORE = {"cache-control": "no-store"}


def _check_local(http: HttpRequest) -> None:
    """What only a person on this machine may ask: over loopback or a Unix socket, which has no address.

    Not through a proxy, which is on this machine while who asks is not, and not by a name that a web page made ours.
    """
    host = http.client.host if http.client is not None else ""
    forwarded = any(name in _OF_PROXIES or name.startswith("x-forwarded-") for name in http.headers)
    if forwarded or (host and not (_is_loopback(host) and _is_loopback(_asked_host(http)))):
        raise HTTPException(404, "Not Found")


_OF_PROXIES = frozenset(
    ("forwarded", "via", "x-real-ip", "x-client-ip", "true-client-ip", "cf-connecting-ip", "x-envoy-external-address")
)
"""With all that begin with ``x-forwarded-``: what proxies add to what they pass on."""


def _asked_host(http: HttpRequest) -> str:
    """The host by whose name the server was asked, empty where that is no name: ``http.url`` then has the server's own."""
    try:
        return urlsplit(f"//{http.headers.get('host', '')}").hostname or ""
    except ValueError:
        return ""


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


async def _encoded(tokenizer: Tokenizer, text: str, param: str, special: bool, most: int) -> list[int]:
    if len(text) > most:
        raise ParameterError(f"{param}: the text has {len(text)} characters; at most {most} are taken here", param)
    return await asyncio.to_thread(tokenizer.encode, text, special)


async def _read(http: HttpRequest) -> bytes:
    """The body, if it is JSON, not too large and here in time.

    Other content types a browser sends without asking; this one not.
    """
    if http.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
        raise HTTPException(415, "the body must be application/json")
    try:
        return await asyncio.wait_for(_whole(http), BODY_SECONDS)
    except asyncio.TimeoutError:
        raise HTTPException(408, f"the body was not here within {BODY_SECONDS:g} seconds") from None


async def _whole(http: HttpRequest) -> bytes:
    parts, size = [], 0
    async for part in http.stream():
        size += len(part)
        if size > MAX_BODY_BYTES:
            raise HTTPException(413, f"the body is larger than {MAX_BODY_BYTES} bytes")
        parts.append(part)
    return b"".join(parts)


async def _unless_gone(http: HttpRequest, chunks: AsyncIterator[list[dict[str, object]]]) -> None:
    """Run ``chunks`` to its end, or until the client has gone: then what it asked for is aborted."""

    async def consume() -> None:
        async for _ in chunks:
            pass

    async def gone() -> None:
        while (await http.receive())["type"] != "http.disconnect":
            pass

    work, watch = asyncio.ensure_future(consume()), asyncio.ensure_future(gone())
    try:
        await asyncio.wait((work, watch), return_when=asyncio.FIRST_COMPLETED)
        if not work.done():
            raise ClientDisconnect
        work.result()
    finally:
        work.cancel()
        watch.cancel()
        await asyncio.gather(work, watch, return_exceptions=True)


async def _events(
    first: list[dict[str, object]], chunks: AsyncIterator[list[dict[str, object]]]
) -> AsyncIterator[bytes]:
    """Server-sent events. A fault after the stream has begun is its last event but one."""
    try:
        for chunk in first:
            yield _event(chunk)
        async for batch in chunks:
            for chunk in batch:
                yield _event(chunk)
    except (HTTPException, RequestError) as error:
        yield _event(_error_body(str(getattr(error, "detail", error)), "server_error"))
    yield b"data: [DONE]\n\n"


def _event(content: object) -> bytes:
    return f"data: {json.dumps(content, separators=(',', ':'))}\n\n".encode()


def _error_body(message: str, kind: str, param: str | None = None, code: str | None = None) -> dict[str, object]:
    return {"error": {"message": _shown(message), "type": kind, "param": _shown(param or "") or None, "code": code}}


def _shown(text: str) -> str:
    """What an error repeats of what a client sent: not all of a long text, and nothing that is no Unicode."""
    text = text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}..."
    return text.encode(errors="backslashreplace").decode()


async def _request_error(_: HttpRequest, error: Exception) -> Response:
    param = error.param if isinstance(error, ParameterError) else _blamed(str(error))
    return JSONResponse(_error_body(str(error), "invalid_request_error", param), 400)


def _blamed(message: str) -> str | None:
    """The parameter that a message of the engine begins with, if it does."""
    name = message.partition(" ")[0]
    return name if name in CompletionBody.model_fields else None


async def _gone(_: HttpRequest, error: Exception) -> Response:
    """The client has gone: nobody is left to be told."""
    del error
    return Response(status_code=499)


async def _http_error(_: HttpRequest, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    kind = "invalid_request_error" if error.status_code < 500 else "server_error"
    code = "model_not_found" if error.status_code == 404 and "model" in error.detail else None
    return JSONResponse(_error_body(error.detail, kind, code=code), error.status_code, headers=error.headers)


async def _internal_error(_: HttpRequest, error: Exception) -> Response:
    _log.error("a request failed inside the server", exc_info=error)
    return JSONResponse(_error_body("the server failed; its log says why", "server_error"), 500)
