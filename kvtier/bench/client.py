"""One OpenAI-compatible server, asked for streams: whatever it does to a request is noted in that request's `Call`."""

from __future__ import annotations

import asyncio
import contextlib
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
from kvtier.errors import ConfigError, one_line

try:
    import aiohttp
except ImportError as error:
    raise ConfigError("the load generator needs aiohttp and aiofiles; run: pip install 'kvtier[bench]'") from error

if TYPE_CHECKING:
    from typing_extensions import Self

clock = time.perf_counter
_MOST_REFUSAL_BYTES = 4096
_MOST_LIST_BYTES = 4 << 20
_PREFLIGHT_SECONDS = 10.0
_END_SECONDS = 0.2
"""From the last event to the end of the response; a connection that takes longer is not used again."""
MOST_PIECES = 1 << 20
"""Of one answer: more is no answer to a request with a limit."""


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
            cookie_jar=aiohttp.DummyCookieJar(),  # requests are to be independent, also for who balances load by cookies
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
        wait = min(self._timeout, _PREFLIGHT_SECONDS)
        try:
            async with self._opened.get(
                f"{self.base}/models", timeout=aiohttp.ClientTimeout(total=wait), allow_redirects=False
            ) as answer:
                if answer.status != 200:
                    raise ConfigError(f"{self.base}: {await self._refusal(answer)}")
                listed = _parsed(await _up_to(answer, _MOST_LIST_BYTES))
            name = listed["data"][0]["id"]
            if not isinstance(name, str) or not name.isprintable():
                raise TypeError(name)
        except (aiohttp.ClientError, OSError, asyncio.TimeoutError) as failed:
            raise ConfigError(f"{self.base}: {self._why(failed, wait)}") from None
        except (ValueError, LookupError, TypeError):
            raise ConfigError(
                f"{self.base}/models: no list of models came; is this an OpenAI-compatible server?"
            ) from None
        return name

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
            async with self._opened.post(self._url, data=body, allow_redirects=False) as answer:
                if answer.status != 200:
                    call.fault = await self._refusal(answer)
                elif answer.content_type != "text/event-stream":
                    call.fault = f"answered {self._line(answer.content_type) or 'nothing'}, and no stream of events"
                else:
                    await self._read(answer, call)
        except (aiohttp.ClientError, OSError, asyncio.TimeoutError) as failed:
            call.fault = ("cut off mid-stream: " if call.times else "") + self._why(failed, self._timeout)
        except (ValueError, LookupError, TypeError, AttributeError) as wrong:
            call.fault = f"an event is not what the API has: {self._line(str(wrong) or type(wrong).__name__)}"
        if call.ended is None:
            call.ended = clock()

    async def _read(self, answer: aiohttp.ClientResponse, call: Call) -> None:
        stream = EventStream()
        async for data in answer.content.iter_any():
            if self._noted(stream.feed(data), call, clock()):
                if call.fault is None and not answer.content.at_eof():
                    with contextlib.suppress(asyncio.TimeoutError, aiohttp.ClientError):
                        await asyncio.wait_for(answer.content.readany(), _END_SECONDS)
                return
        if stream.end() == [b"[DONE]"]:
            call.ended = clock()
        else:
            call.fault = "the stream ended before its end"

    def _noted(self, payloads: list[bytes], call: Call, now: float) -> bool:
        """Whether that was all: the stream's last event is among them, or one that says that it has failed."""
        for payload in payloads:
            if payload == b"[DONE]":
                call.ended = now
                return True
            self._note(_parsed(payload), call, now)
            if call.fault is not None:
                return True
        return False

    def _note(self, chunk: dict[str, Any], call: Call, now: float) -> None:
        if chunk.get("error"):
            call.fault = f"failed mid-stream: {self._said(chunk)}"
        for choice in chunk.get("choices") or ():
            delta = choice.get("delta") or choice
            if any(delta.get(kind) for kind in _TEXTS):
                if len(call.times) == MOST_PIECES:
                    raise ValueError(f"more than {MOST_PIECES:,} pieces")
                call.times.append(now)
        usage = chunk.get("usage")
        if usage:
            call.completion_tokens, call.prompt_tokens = (
                _count(usage["completion_tokens"]),
                _count(usage["prompt_tokens"]),
            )
            call.cached_tokens = _count((usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0)

    async def _refusal(self, answer: aiohttp.ClientResponse) -> str:
        said = answer.reason or ""
        if answer.status in range(300, 400):
            said = f"moved to {answer.headers.get('location', 'nowhere')}; --base-url takes the place itself"
        else:
            with contextlib.suppress(ValueError):
                said = self._said(_parsed(await _up_to(answer, _MOST_REFUSAL_BYTES)))
        return f"HTTP {answer.status}" + (f": {self._line(said)}" if said else "")

    def _said(self, answer: object) -> str:
        """The message of an error body: OpenAI's ``{"error": {"message"}}``, or one of its dialects; on one line."""
        error = answer.get("error", answer) if isinstance(answer, dict) else answer
        message = error.get("message") or error.get("detail") if isinstance(error, dict) else error
        return self._line(str(message or "no message"))

    def _why(self, failed: BaseException, timeout: float) -> str:
        if isinstance(failed, asyncio.TimeoutError):
            return f"no answer in {timeout:g} s"
        if isinstance(failed, aiohttp.ClientConnectorCertificateError):
            return f"its certificate is not trusted ({failed.certificate_error}); KVTIER_CA_FILE names what to trust"
        if isinstance(failed, aiohttp.ClientConnectorSSLError):  # whose number is none of the system's
            return f"no TLS there: {self._line(str(failed.os_error))}"
        number = getattr(failed, "errno", None)  # asyncio's own words repeat the address
        known = (
            os.strerror(number) if isinstance(number, int) and number > 0 else getattr(failed, "message", str(failed))
        )
        return self._line(str(known)) or type(failed).__name__

    def _line(self, text: str) -> str:
        """One line for a terminal, without the key: a server says what it likes, and may send back what it was sent."""
        hidden = text.replace(self._access.key, "***") if self._access.key else text
        return one_line(hidden)


_TEXTS = ("content", "text", "reasoning_content", "reasoning", "tool_calls")
"""What a piece may have where it has something."""


def _parsed(raw: bytes) -> Any:  # noqa: ANN401 - JSON
    """Raises ``ValueError``, whatever is wrong with it."""
    try:
        return json.loads(raw)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def _count(number: Any) -> int:  # noqa: ANN401 - from JSON
    """A number of tokens. Raises ``ValueError`` or ``TypeError`` for what cannot be one."""
    if not 0 <= number < 1 << 53:
        raise ValueError(f"a usage of {number!r:.40} tokens")
    return int(number)


async def _up_to(answer: aiohttp.ClientResponse, most: int) -> bytes:
    """The body, cut off where it is longer."""
    came = bytearray()
    async for data in answer.content.iter_any():
        came += data
        if len(came) >= most:
            break
    return bytes(came[:most])


def _base(url: str) -> str:
    """With the version that OpenAI's paths begin with."""
    try:
        parts = urlsplit(url if "://" in url else f"http://{url}")
        known = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:  # brackets around no address, or a port that is none
        raise ConfigError("--base-url: give the server's address, such as http://127.0.0.1:8000") from None
    if parts.username or parts.password or parts.query or parts.fragment:
        raise ConfigError("--base-url: no user, password or parameters belong there; KVTIER_API_KEY holds the key")
    if not known:
        raise ConfigError(f"--base-url {url}: give the server's address, such as http://127.0.0.1:8000")
    return f"{parts.scheme}://{parts.netloc}{parts.path.rstrip('/') or '/v1'}"


def _trusted(access: ApiAccess) -> ssl.SSLContext:
    try:
        return ssl.create_default_context(cafile=access.ca_file)
    except (OSError, ssl.SSLError) as failed:
        raise ConfigError(f"KVTIER_CA_FILE: {access.ca_file}: {getattr(failed, 'strerror', failed)}") from None
