"""Clients that mean harm, or are broken: what they cost the server, and the others, is bounded."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Iterator
from typing import Any

import pydantic
import pytest

from kvtier.engine import connection
from kvtier.engine.protocol import (
    MAX_FIELDS,
    MAX_MESSAGES,
    MAX_PROMPTS,
    Body,
    ChatBody,
    CompletionBody,
    TokenizeBody,
    parse,
)
from kvtier.engine.server import MAX_SHOWN
from kvtier.errors import RequestError
from tests.support import until

from .serving import Running

MANY = 10_000


@pytest.fixture(scope="module")
def running(one_thread: None) -> Iterator[Running]:
    with Running() as server:
        server.socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        yield server


@pytest.fixture
def client(running: Running) -> Iterator[socket.socket]:
    with socket.socket() as made:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        made.settimeout(30.0)
        made.connect(running.socket.getsockname())
        yield made


def post(body: bytes, length: int | None = None) -> bytes:
    head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(body) if length is None else length}\r\n\r\n".encode() + body


def answer(client: socket.socket, sent: bytes) -> tuple[int, dict[str, Any]]:
    client.sendall(sent)
    with client.makefile("rb") as file:
        status, length = int(file.readline().split()[1]), 0
        while (line := file.readline()) != b"\r\n":
            name, _, value = line.partition(b":")
            length = int(value) if name.lower() == b"content-length" else length
        return status, json.loads(file.read(length))


def is_closed(client: socket.socket) -> bool:
    """Read to the end of what the server sends; that it has one."""
    try:
        while client.recv(1 << 16):
            pass
    except ConnectionResetError:
        pass
    return True


# -- bodies


def lists(schema: object) -> Iterator[dict[str, Any]]:
    """Every list in a model's schema."""
    if isinstance(schema, dict):
        if schema.get("type") == "list":
            yield schema
        schema = list(schema.values())
    for part in schema if isinstance(schema, (list, tuple)) else ():
        yield from lists(part)


@pytest.mark.parametrize("kind", [ChatBody, CompletionBody, TokenizeBody])
def test_a_list_of_wrong_entries_is_one_error(kind: type[Body]) -> None:
    """8 MiB of them were gigabytes of errors, and a minute in which nobody was answered."""
    found = list(lists(kind.__pydantic_core_schema__))
    assert len(found) >= 3 and all(each.get("fail_fast") for each in found)


@pytest.mark.parametrize(
    "fields",
    [
        {"messages": [1] * MANY},
        {"messages": [{}] * MANY},
        {"messages": [{"role": "user", "content": [1] * 100}] * 100},
        {"messages": [{"role": "user", "content": ""}] * (MAX_MESSAGES + 1)},
        {"prompt": [[""] * MANY]},
        {"prompt": [1, *["a"] * MANY]},
        {"prompt": "a", "stop": [1] * MANY},
    ],
)
def test_errors_do_not_add_up(fields: dict[str, object]) -> None:
    with pytest.raises(pydantic.ValidationError) as wrong:
        (ChatBody if "messages" in fields else CompletionBody).model_validate(fields)
    assert wrong.value.error_count() <= 6, "one per way to read it"


def test_prompts_are_counted_before_they_are_read() -> None:
    with pytest.raises(RequestError, match=f"has {MANY} prompts; at most {MAX_PROMPTS} are taken"):
        parse(CompletionBody, json.dumps({"prompt": [[], *[0.5] * (MANY - 1)]}).encode())


def test_an_object_has_so_many_fields() -> None:
    """Each unknown one is an error, and which of them stands twice was looked for once per field."""
    most = ",".join(f'"{number}":1' for number in range(MAX_FIELDS - 2))
    with pytest.raises(RequestError, match="'z' stands twice"):
        parse(CompletionBody, f'{{{most},"z":1,"z":1}}'.encode())
    for body in (f'{{{most},"a":1,"b":1,"c":1}}', f'{{"prompt":"a","kv_hints":{{{most},"a":1,"b":1,"c":1}}}}'):
        with pytest.raises(RequestError, match=f"{MAX_FIELDS + 1} fields; at most {MAX_FIELDS}"):
            parse(CompletionBody, body.encode())


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (rb'{"prompt":"a","\ud800":1,"\ud800":1}', 400),
        (rb'{"prompt":"a","\ud800":1}', 400),
        (rb'{"prompt":"a","kv_hints":{"\ud800":1}}', 400),
        (rb'{"prompt":"a","model":"\ud800"}', 404),
        (b'{"prompt":"a","' + b"x" * MANY + b'":1}', 400),
        (b'{"prompt":"a","seed":1' + b"0" * 4000 + b"}", 400),
        (b'{"prompt":"a","model":"' + b"x" * MANY + b'"}', 404),
    ],
)
def test_an_error_repeats_little_of_what_was_sent_and_only_text(
    client: socket.socket, body: bytes, status: int, caplog: pytest.LogCaptureFixture
) -> None:
    got, told = answer(client, post(body))
    assert got == status and len(json.dumps(told)) < 3 * MAX_SHOWN
    assert not caplog.records, "nothing of it is the server's fault"


# -- connections


def test_a_body_that_trickles_is_not_waited_for_for_ever(
    client: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvtier.engine.server.BODY_SECONDS", 0.2)
    assert answer(client, post(b"{", length=500))[0] == 408


@pytest.mark.parametrize("served", [False, True], ids=["the first", "a further one"])
def test_a_head_that_does_not_come_is_not_waited_for_for_ever(
    running: Running, monkeypatch: pytest.MonkeyPatch, served: bool
) -> None:
    monkeypatch.setattr(connection, "HEAD_SECONDS", 0.1)
    with socket.create_connection(running.socket.getsockname(), timeout=30.0) as client:
        if served:
            assert answer(client, b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")[0] == 200
        client.sendall(b"POST /v1/completions HTTP/1.1\r\nHo")
        assert is_closed(client)


def test_whoever_asks_in_time_may_wait_for_long(running: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "HEAD_SECONDS", 0.02)
    with socket.create_connection(running.socket.getsockname(), timeout=30.0) as client:
        began = time.monotonic()
        status, _ = answer(client, post(b'{"prompt":"abc","max_tokens":100,"temperature":0}'))
        assert status == 200 and time.monotonic() - began > 0.04


def test_an_answer_that_is_not_taken_is_given_up(
    running: Running, client: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "TAKE_SECONDS", 0.2)
    monkeypatch.setattr(running, "notes", ["x" * (16 << 20)])
    client.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
    assert client.recv(1)
    until(lambda: not running.server.server_state.connections, 30.0, "the connection has ended")


def test_who_goes_in_the_middle_of_his_body_is_no_fault(running: Running, caplog: pytest.LogCaptureFixture) -> None:
    with socket.create_connection(running.socket.getsockname()) as client:
        client.sendall(post(b'{"prompt":', length=500))
        until(lambda: running.server.server_state.tasks, 30.0, "it is being read")
    until(lambda: not running.server.server_state.tasks, 30.0, "it has ended")
    assert not caplog.records
