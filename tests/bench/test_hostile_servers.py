"""The load generator against servers that are none: whatever comes over the socket is one line in one request's `Call`."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time
import tracemalloc
from collections.abc import Callable, Iterator
from typing import TypeAlias

import pytest

from kvtier.bench.client import _END_SECONDS, MOST_PIECES, Client, clock
from kvtier.bench.goodput import Call, Targets, summary
from kvtier.config import ApiAccess
from kvtier.errors import ConfigError

SECRET = "sk-very-secret"
Answer: TypeAlias = Callable[[socket.socket], None]


@contextlib.contextmanager
def listening(answer: Answer) -> Iterator[str]:
    """A server that reads the request of one connection and then does as it likes; its address."""

    def serve() -> None:
        with contextlib.suppress(OSError), server.accept()[0] as connection:
            connection.settimeout(60.0)
            came = b""
            while b"\r\n\r\n" not in came or (came.startswith(b"POST") and not came.endswith(b"}")):
                came += connection.recv(65536)
                if not came.startswith((b"GET", b"POST")):
                    break
            answer(connection)

    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(60.0)
        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield f"127.0.0.1:{server.getsockname()[1]}/v1"
        finally:
            thread.join(60.0)
            assert not thread.is_alive(), "whoever asks has gone"


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


def event(payload: object) -> bytes:
    return chunk(b"data: " + (payload if isinstance(payload, bytes) else json.dumps(payload).encode()) + b"\n\n")


STREAM = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
BARE = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nconnection: close\r\n\r\n"
WORD = event({"choices": [{"text": " word"}]})
DONE = event(b"[DONE]")
END = DONE + b"0\r\n\r\n"


def usage(tokens: bytes) -> bytes:
    return event(b'{"usage": {"prompt_tokens": 3, "completion_tokens": %b}}' % tokens)


def saying(*parts: bytes, then_close: bool = True) -> Answer:
    def answer(connection: socket.socket) -> None:
        for part in parts:
            connection.sendall(part)
            time.sleep(0.01 if len(parts) > 1 else 0.0)  # so that they come apart
        while not then_close and connection.recv(1):
            pass

    return answer


def without_end(head: bytes, part: bytes) -> Answer:
    def answer(connection: socket.socket) -> None:
        connection.sendall(head)
        while True:
            connection.sendall(part)

    return answer


def head(status: bytes, length: int, *more: bytes) -> bytes:
    return b"\r\n".join([b"HTTP/1.1 " + status, b"content-length: %d" % length, *more, b"", b""])


REFUSAL = json.dumps({"error": {"message": f"no \x1b[31mroom\nfor {SECRET}"}}).encode()
HOSTILE: dict[str, tuple[Answer, str | None, int]] = {
    "closes at once": (saying(), "Server disconnected", 0),
    "no HTTP": (saying(b"\x1b[31m\x00\xff\r\n\r\n" * 9), "Bad status line: ", 0),
    "a long header": (saying(b"HTTP/1.1 200 OK\r\nx: " + b"y" * 100_000), "Got more than", 0),
    "closes mid-stream": (saying(STREAM + WORD), "cut off mid-stream: Response payload is not completed", 1),
    "half an event": (saying(BARE, b'data: {"choi'), "the stream ended before its end", 0),
    "a chunk of no length": (saying(STREAM + b"zz\r\nx\r\n"), "Invalid character in chunk size", 0),
    "a line without end": (without_end(BARE, b"x" * 65536), "an event is not what the API has: an event of more", 0),
    "events without end": (without_end(STREAM, WORD * 2000), "cut off mid-stream: no answer in 1 s", -1),
    "a refusal in two parts": (
        saying(head(b"429 Busy", len(REFUSAL)) + REFUSAL[:9], REFUSAL[9:]),
        "HTTP 429: no [31mroom for ***",
        0,
    ),
    "a page as refusal": (saying(head(b"503 \x1b[31mAway", 6) + b"<html>"), "HTTP 503: [31mAway", 0),
    "a refusal without end": (without_end(b"HTTP/1.1 500 Oops\r\n\r\n", b"x" * 65536), "HTTP 500: Oops", 0),
    "a deep refusal": (saying(head(b"500 Oops", 4000) + b"[" * 4000), "HTTP 500: Oops", 0),
    "moved": (saying(head(b"307 Moved", 0, b"location: http://h/v2")), "HTTP 307: moved to http://h/v2; --base-url", 0),
    "deep": (saying(STREAM + event(b"[" * 100_000)), "an event is not what the API has: nested too deeply", 0),
    "an event of null": (saying(STREAM + event(None) + END), "an event is not what the API has: ", 0),
    "usage without end": (
        saying(STREAM + WORD + usage(b"1e999") + END),
        "an event is not what the API has: a usage",
        1,
    ),
    "usage below zero": (
        saying(STREAM + WORD + usage(b"-5") + END),
        "an event is not what the API has: a usage of -5",
        1,
    ),
    "usage of many digits": (saying(STREAM + usage(b"9" * 4000) + END), "an event is not what the API has: a usage", 0),
    "fails and stays": (
        saying(STREAM + event({"error": {"message": "it\nburns"}}), then_close=False),
        "failed mid-stream: it burns",
        0,
    ),
    "ends and stays": (saying(STREAM + WORD + DONE, then_close=False), None, 1),
    "ends and goes on": (without_end(STREAM + WORD + DONE, WORD), None, 1),
    "ends in a line": (saying(BARE + b'data: {"choices": [{"text": "w"}]}\n\ndata: [DONE]\n'), None, 1),
    "empty pieces": (saying(STREAM + event({"choices": [{"delta": {}}]}) + usage(b"0") + END), None, 0),
}


@pytest.mark.parametrize("kind", HOSTILE)
async def test_whatever_comes_is_one_line(kind: str) -> None:
    answer, fault, pieces = HOSTILE[kind]
    with listening(answer) as url:
        async with Client(url, ApiAccess(key=SECRET), timeout=1.0 if "no answer" in (fault or "") else 60.0) as client:
            call = Call(0.0)
            await client.ask(client.body("m", "x", 4), call)
            returned = clock()
    assert (call.fault is None) if fault is None else (call.fault or "").startswith(fault), call.fault
    assert (call.fault or "x").isprintable() and len(call.fault or "") < 300 and SECRET not in (call.fault or "")
    assert len(call.times) == pieces if pieces >= 0 else len(call.times) <= MOST_PIECES
    assert call.ended is not None and call.ended - call.sent < 30.0
    if kind == "ends and stays":
        assert returned - call.ended >= 0.9 * _END_SECONDS, (
            "an answer ends with its last event, not with its connection"
        )
    report = summary([call], Targets(1.0, 1.0))
    assert json.loads(json.dumps(report)) == report
    assert (report["without_text"], report["without_usage"]) == (
        int(kind == "empty pieces"), int(call.ok and kind != "empty pieces"),
    )  # fmt: skip


def listing(name: object) -> Answer:
    body = json.dumps({"data": [{"id": name}]}).encode()
    return saying(head(b"200 OK", len(body)) + body)


LISTS: dict[str, tuple[Answer, str]] = {
    "a list without end": (without_end(head(b"200 OK", 1 << 40), b"x" * 65536), "no list of models came"),
    "a deep list": (saying(head(b"200 OK", 9000) + b"[" * 9000), "no list of models came"),
    "no name": (listing([1]), "no list of models came"),
    "a name that moves the cursor": (listing("a\x1b[1m"), "no list of models came"),
    "silence": (saying(then_close=False), "no answer in 0.3 s"),
    "moved": (saying(head(b"301 Moved", 0, b"location: /v2")), "HTTP 301: moved to /v2; --base-url"),
}


@pytest.mark.parametrize("kind", LISTS)
async def test_a_list_of_models_that_is_none_is_one_line_and_bounded(kind: str) -> None:
    answer, says = LISTS[kind]
    tracemalloc.start()
    try:
        with listening(answer) as url:
            async with Client(url, ApiAccess(), timeout=0.3 if kind == "silence" else 60.0) as client:
                with pytest.raises(ConfigError, match=says) as caught:
                    await client.model()
        assert str(caught.value).isprintable()
        assert tracemalloc.get_traced_memory()[1] < 32 << 20
    finally:
        tracemalloc.stop()


async def test_a_hundred_thousand_pieces_are_counted() -> None:
    answer = saying(STREAM, *[WORD * 25_000] * 4, usage(b"100000") + END)
    call = Call(0.0)
    with listening(answer) as url:
        async with Client(url, ApiAccess(), timeout=60.0) as client:
            await client.ask(client.body("m", "x", 4), call)
    assert call.ok and len(call.times) == call.tokens == 100_000


async def test_an_answer_beyond_all_measure_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvtier.bench.client.MOST_PIECES", 10)
    call = Call(0.0)
    with listening(without_end(STREAM, WORD * 4)) as url:
        async with Client(url, ApiAccess(), timeout=60.0) as client:
            await client.ask(client.body("m", "x", 4), call)
    assert call.fault == "an event is not what the API has: more than 10 pieces" and len(call.times) == 10


async def test_https_where_there_is_no_tls_says_so() -> None:
    with listening(saying(b"HTTP/1.1 400 Bad\r\n\r\n")) as url:
        async with Client(f"https://{url}", ApiAccess()) as client:
            with pytest.raises(ConfigError, match="no TLS there"):
                await client.model()


@pytest.mark.parametrize(
    ("url", "base"),
    [
        ("127.0.0.1:8000", "http://127.0.0.1:8000/v1"),
        ("http://[::1]:8000", "http://[::1]:8000/v1"),
        ("https://h/v1/", "https://h/v1"),
        ("https://h/openai/v1", "https://h/openai/v1"),
        ("http://[::1", None),
        ("http://[nowhere]", None),
        ("http://h:99999", None),
        ("http://h:0", None),
        ("http://h/v1#x", None),
        ("", None),
    ],
)
def test_base_urls(url: str, base: str | None) -> None:
    if base is None:
        with pytest.raises(ConfigError, match="--base-url"):
            Client(url, ApiAccess())
    else:
        assert Client(url, ApiAccess()).base == base
