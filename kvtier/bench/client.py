"""One OpenAI-compatible server, asked for streams: whatever it does to a request is noted in that request's `Call`."""

from __future__ import annotations

import asyncio
import json
import os
import ssl
import time
from types import TracebackType
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from kvtier.bench.goodput import Call
from kvtier.bench.sse import EventStream
from kvtier.config import ApiAccess
from kvtier.errors import ConfigError

try:
    import aiohttp
except ImportError as error:
    raise ConfigError("the load generator needs aiohttp and aiofiles; run: pip install 'kvtier[bench]'") from error

if TYPE_CHECKING:
    from typing_extensions import Self

clock = time.perf_counter
_MOST_REFUSAL_BYTES = 4096
_PREFLIGHT_SECONDS = 10.0


class Client:
    """Streams completions over as many connections as there are open requests. An async context manager."""

    def __init__(self, base_url: str, access: ApiAccess, *, chat: bool = False, timeout: float = 120.0) -> None:
        """``timeout``: seconds that one request may take. Raises ``ConfigError`` for a URL that is none."""
        self.base = _base(base_url)
        self._chat = chat
        self._timeout = timeout
        self._access = access
        self._url = f"{self.base}/{'chat/completions' if chat else 'completions'}"
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        headers = {"content-type": "application/json", "accept-encoding": "identity"}
        if self._access.key is not None:
            headers["authorization"] = f"Bearer {self._access.key}"
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, ssl=_trusted(self._access)),
            headers=headers,
            timeout=aiohttp.ClientTimeout(total=self._timeout),
        )
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._opened.close()

    @property
    def _opened(self) -> aiohttp.ClientSession:
        assert self._session is not None, "used as a context manager"
        return self._session

    async def model(self) -> str:
        """The first model that the server names. Raises ``ConfigError`` where it is not there, or refuses."""
        try:
            wait = aiohttp.ClientTimeout(total=min(self._timeout, _PREFLIGHT_SECONDS))
            async with self._opened.get(f"{self.base}/models", timeout=wait) as answer:
                if answer.status != 200:
                    raise ConfigError(f"{self.base}: {await self._refusal(answer)}")
                listed = await answer.json(content_type=None)
            return str(listed["data"][0]["id"])
        except (aiohttp.ClientError, OSError, asyncio.TimeoutError) as failed:
            raise ConfigError(f"{self.base}: {self._why(failed)}") from None
        except (ValueError, LookupError, TypeError):
            raise ConfigError(
                f"{self.base}/models: no list of models came; is this an OpenAI-compatible server?"
            ) from None

    def body(self, model: str, prompt: str | list[int], output_tokens: int) -> bytes:
        """The request for a stream with its usage. Raises ``ConfigError`` where the endpoint takes no token ids."""
        if self._chat and not isinstance(prompt, str):
            raise ConfigError("a chat endpoint takes no token ids; leave --token-ids or --chat out")
        asked: dict[str, object] = (
            {"messages": [{"role": "user", "content": prompt}]} if self._chat else {"prompt": prompt}
        )
        options = {"stream": True, "stream_options": {"include_usage": True}, "temperature": 0, "ignore_eos": True}
        return json.dumps({"model": model, **asked, "max_tokens": output_tokens, **options}).encode()

    async def ask(self, body: bytes, call: Call) -> None:
        """Send ``body`` and note in ``call`` what comes; nothing is raised but a cancellation."""
        call.sent = clock()
        try:
            async with self._opened.post(self._url, data=body) as answer:
                if answer.status != 200:
                    call.fault = await self._refusal(answer)
                elif answer.content_type != "text/event-stream":
                    call.fault = f"answered {answer.content_type or 'nothing'}, and no stream of events"
                else:
                    await self._read(answer, call)
        except (aiohttp.ClientError, OSError, asyncio.TimeoutError) as failed:
            call.fault = ("cut off mid-stream: " if call.times else "") + self._why(failed)
        except (ValueError, LookupError, TypeError, AttributeError) as wrong:
            call.fault = f"an event is not what the API has: {type(wrong).__name__}"
        call.ended = clock()

    async def _read(self, answer: aiohttp.ClientResponse, call: Call) -> None:
        stream, done = EventStream(), False
        async for data in answer.content.iter_any():
            now = clock()
            for payload in stream.feed(data):
                if payload == b"[DONE]":
                    done = True
                else:
                    self._note(json.loads(payload), call, now)
        if not done and call.fault is None:
            call.fault = "the stream ended before its end"

    def _note(self, chunk: dict[str, Any], call: Call, now: float) -> None:
        if chunk.get("error"):
            call.fault = f"failed mid-stream: {self._said(chunk)}"
        for choice in chunk.get("choices") or ():
            delta = choice.get("delta") or choice
            if delta.get("content") or delta.get("text") or delta.get("reasoning_content") or delta.get("tool_calls"):
                call.times.append(now)
        usage = chunk.get("usage")
        if usage:
            call.completion_tokens, call.prompt_tokens = int(usage["completion_tokens"]), int(usage["prompt_tokens"])
            call.cached_tokens = int((usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0)

    async def _refusal(self, answer: aiohttp.ClientResponse) -> str:
        raw = await answer.content.read(_MOST_REFUSAL_BYTES)
        try:
            said = self._said(json.loads(raw))
        except ValueError:
            said = answer.reason or ""
        return f"HTTP {answer.status}" + (f": {said}" if said else "")

    def _said(self, answer: object) -> str:
        """The message of an error body: OpenAI's ``{"error": {"message"}}``, or one of its dialects; on one line."""
        error = answer.get("error", answer) if isinstance(answer, dict) else answer
        message = error.get("message") or error.get("detail") if isinstance(error, dict) else error
        return self._hidden(" ".join(str(message or "no message").split())[:200])

    def _why(self, failed: BaseException) -> str:
        if isinstance(failed, asyncio.TimeoutError):
            return f"no answer in {self._timeout:g} s"
        if isinstance(failed, aiohttp.ClientConnectorCertificateError):
            return f"its certificate is not trusted ({failed.certificate_error}); KVTIER_CA_FILE names what to trust"
        number = getattr(failed, "errno", None)  # asyncio's own words repeat the address
        known = os.strerror(number) if isinstance(number, int) and number > 0 else str(failed)
        return self._hidden(known or type(failed).__name__)

    def _hidden(self, text: str) -> str:
        """A server may send back what it was sent."""
        return text.replace(self._access.key, "***") if self._access.key else text


def _base(url: str) -> str:
    """With the version that OpenAI's paths begin with."""
    parts = urlsplit(url if "://" in url else f"http://{url}")
    if parts.username or parts.password or parts.query:
        raise ConfigError("--base-url: no user, password or parameters belong there; KVTIER_API_KEY holds the key")
    try:
        known = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:
        known = False
    if not known:
        raise ConfigError(f"--base-url {url}: give the server's address, such as http://127.0.0.1:8000")
    return f"{parts.scheme}://{parts.netloc}{parts.path.rstrip('/') or '/v1'}"


def _trusted(access: ApiAccess) -> ssl.SSLContext:
    try:
        return ssl.create_default_context(cafile=access.ca_file)
    except (OSError, ssl.SSLError) as failed:
        raise ConfigError(f"KVTIER_CA_FILE: {access.ca_file}: {getattr(failed, 'strerror', failed)}") from None
