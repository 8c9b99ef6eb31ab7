"""The load generator against a stub that answers, refuses, lies and dies: what it sends, and what it notes."""

from __future__ import annotations

import gzip
import ipaddress
import itertools
import json
import ssl
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest

from kvtier.bench.arrivals import TOGETHER, WORDS, MadeUp, OfTrace, Poisson, Recorded, Users, ids_below, words
from kvtier.bench.client import Client, clock
from kvtier.bench.goodput import Call, Targets, summary
from kvtier.bench.sender import GONE_AFTER, Plan, Sender
from kvtier.bench.sse import MOST_EVENT_BYTES, EventStream
from kvtier.config import ApiAccess
from kvtier.sim import traces
from kvtier.sim.traces import open_trace
from kvtier.testing.completions import MODEL, Reply, StubServer
from kvtier.testing.requirements import require_installed

OFTEN, NO_KEY = Poisson(2000), ApiAccess()
SMALL = MadeUp(prompt_tokens=12, output_tokens=4, shared_tokens=8, prefixes=2)


async def sent(
    server: StubServer,
    *,
    source: MadeUp | OfTrace = SMALL,
    arrivals: Poisson | Recorded | Users = OFTEN,
    requests: int = 20,
    chat: bool = False,
    access: ApiAccess = NO_KEY,
    timeout: float = 60.0,
    vocab: int | None = None,
    duration: float | None = None,
) -> tuple[Sender, list[Call]]:
    async with Client(server.url, access, chat=chat, timeout=timeout) as client:
        plan = Plan(source, arrivals, words if vocab is None else ids_below(vocab), 1, requests, duration)
        sender = Sender(client, MODEL, plan)
        return sender, await sender.run(arrivals)


# -- events


@pytest.mark.parametrize("newline", [b"\n", b"\r\n"])
def test_events_are_the_same_however_they_are_cut(newline: bytes) -> None:
    raw = b': hello\n\ndata: {"a": 1}\n\nevent: x\ndata:one\ndata: two\n\ndata: [DONE]\n\n'.replace(b"\n", newline)
    for cut in range(len(raw) + 1):
        for second in range(cut, len(raw) + 1, 7):
            stream = EventStream()
            got = stream.feed(raw[:cut]) + stream.feed(raw[cut:second]) + stream.feed(raw[second:])
            assert got == [b'{"a": 1}', b"one\ntwo", b"[DONE]"]


def test_an_event_without_an_end_is_given_up() -> None:
    stream = EventStream()
    assert stream.feed(b"data: " + b"x" * (MOST_EVENT_BYTES // 2)) == []
    with pytest.raises(ValueError, match="more than"):
        stream.feed(b"x" * (MOST_EVENT_BYTES // 2))


# -- what is sent


async def test_poisson_requests_are_streamed_and_counted() -> None:
    async with StubServer(cached_tokens=8) as server:
        sender, calls = await sent(server)
        report = summary(calls, Targets(60.0, 60.0))
        assert sender.ended is None
        assert len(server.seen) == report["requests"] == report["ok"] == 20
        assert all(body["stream"] and body["stream_options"] == {"include_usage": True} for body in server.seen)
        assert all(len(call.times) == 4 == call.completion_tokens for call in calls)
        assert (report["prompt_tokens"], report["cached_tokens"], report["output_tokens"]) == (240, 160, 80)
        assert report["goodput"]["share"] == 1.0  # type: ignore[index]
        beginnings = {tuple(body["prompt"].split()[:8]) for body in server.seen}
        assert len(beginnings) == 2
        assert len({body["prompt"] for body in server.seen}) == 20
        assert [call.due for call in calls] == sorted(call.due for call in calls)
        gaps = [b.due - a.due for a, b in itertools.pairwise(calls)]
        assert len(set(gaps)) > 10 and 0.1e-3 < sum(gaps) / len(gaps) < 2e-3


async def test_the_same_seed_sends_the_same_prompts() -> None:
    texts = []
    for _ in range(2):
        async with StubServer() as server:
            await sent(server, arrivals=Users(1))
            texts.append([body["prompt"] for body in server.seen])
    assert texts[0] == texts[1]


async def test_chat_and_token_ids() -> None:
    async with StubServer() as server:
        _, calls = await sent(server, chat=True, requests=3)
        assert all(call.ok and len(call.times) == 4 for call in calls)
        assert all(len(body["messages"][0]["content"].split()) == 12 for body in server.seen)
        _, calls = await sent(server, vocab=50, requests=3)
        assert all(call.ok for call in calls)
        assert all(len(body["prompt"]) == 12 and max(body["prompt"]) < 50 for body in server.seen[3:])


async def test_users_wait_for_their_answers() -> None:
    async with StubServer(gap=0.002) as server:
        _, calls = await sent(server, arrivals=Users(3), requests=12)
        assert len(calls) == 12
        moments = sorted((moment, step) for each in calls for moment, step in ((each.sent, 1), (each.ended or 0, -1)))
        open_now = most = 0
        for _, step in moments:
            open_now += step
            most = max(most, open_now)
        assert most == 3
        dues, ends = sorted(each.due for each in calls), sorted(each.ended or 0 for each in calls)
        assert all(due >= end for due, end in zip(dues[3:], ends, strict=False)), "due when answered"


MOONCAKE: list[dict[str, Any]] = [
    {"timestamp": 0, "input_length": 1100, "output_length": 40, "hash_ids": [0, 1, 2]},
    {"timestamp": 40, "input_length": 1536, "output_length": 20, "hash_ids": [0, 1, 3]},
    {"timestamp": 80, "input_length": 600, "output_length": 10, "hash_ids": [7, 8]},
]


def write_trace(path: Path, records: list[Any]) -> Path:
    text = "".join((each if isinstance(each, str) else json.dumps(each)) + "\n" for each in records)
    path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())
    return path


@pytest.mark.parametrize("name", ["trace.jsonl", "trace.jsonl.gz"])
async def test_a_trace_is_sent_at_its_times_with_its_shared_prefixes(tmp_path: Path, name: str) -> None:
    later = [
        {**each, "timestamp": each["timestamp"] + 100_000} for each in MOONCAKE
    ]  # its first request is not waited for
    trace = open_trace(write_trace(tmp_path / name, later))
    async with StubServer() as server:
        began = clock()
        _, calls = await sent(server, source=OfTrace(trace, shrink=8), arrivals=Recorded(speed=2.0))
        assert calls[0].due - began < 20
        texts = [body["prompt"].split() for body in server.seen]
        assert [len(each) for each in texts] == [137, 192, 75]  # an eighth of the trace's
        assert [body["max_tokens"] for body in server.seen] == [5, 2, 1]
        assert texts[0][:128] == texts[1][:128] and texts[0][128:137] != texts[1][128:137]
        assert texts[2][:64] != texts[0][:64]
        assert [round(call.due - calls[0].due, 6) for call in calls] == [0.0, 0.02, 0.04]


async def test_a_block_has_its_words_whenever_it_comes(tmp_path: Path) -> None:
    """Also after more others than are remembered."""
    ids = [*range(5000), 0]
    records = [
        {"timestamp": at, "input_length": 512, "output_length": 1, "hash_ids": [one]} for at, one in enumerate(ids)
    ]
    trace = open_trace(write_trace(tmp_path / "trace.jsonl", records))
    texts = [prompt.tokens async for prompt in OfTrace(trace, shrink=64).prompts(words, 1)]
    assert texts[0] == texts[-1] and len(set(texts)) == 5000


async def test_a_trace_is_read_a_few_requests_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    records = [
        {"timestamp": at, "input_length": 512, "output_length": 1, "hash_ids": [at]} for at in range(4 * TOGETHER)
    ]
    trace = open_trace(write_trace(tmp_path / "trace.jsonl", records))
    lines, record = list[int](), traces._record

    def noted(path: Path, number: int, line: bytes) -> traces.Record:
        lines.append(number)
        return record(path, number, line)

    monkeypatch.setattr(traces, "_record", noted)
    prompts = OfTrace(trace, shrink=64).prompts(words, 1)
    assert [(await anext(prompts)).time_s, len(lines)] == [0.0, TOGETHER]
    assert len([prompt async for prompt in prompts]) == 4 * TOGETHER - 1 and len(lines) == 4 * TOGETHER


async def test_a_broken_line_ends_the_run_and_keeps_what_was_sent(tmp_path: Path) -> None:
    path = write_trace(tmp_path / "trace.jsonl", [*MOONCAKE[:2], '{"timestamp": "soon"}'])
    async with StubServer() as server:
        sender, calls = await sent(server, source=OfTrace(open_trace(path), shrink=64), arrivals=Recorded())
        assert sender.ended is not None and f"{path}: line 3" in sender.ended and "\n" not in sender.ended
        assert [call.ok for call in calls] == [True, True], "what stands before that line is sent"


async def test_times_that_go_back_and_prompts_beyond_measure_end_the_run(tmp_path: Path) -> None:
    back = {"timestamp": 10, "input_length": 512, "output_length": 1, "hash_ids": [9]}
    long = {"timestamp": 90, "input_length": (1 << 53) - 1, "output_length": 1, "hash_ids": []}
    async with StubServer() as server:
        for name, last, says in (("back", back, "line 4: its time"), ("long", long, "tokens at 0.09 s; --shrink")):
            path = write_trace(tmp_path / name, [*MOONCAKE, last])
            sender, calls = await sent(server, source=OfTrace(open_trace(path), shrink=64), arrivals=Recorded())
            assert sender.ended is not None and says in sender.ended and str(path) in sender.ended
            assert [call.ok for call in calls] == [True] * 3


async def test_a_trace_that_a_run_ended_with_begins_again_in_the_next(tmp_path: Path) -> None:
    trace = open_trace(write_trace(tmp_path / "trace.jsonl", MOONCAKE))
    async with StubServer() as server, Client(server.url, NO_KEY) as client:
        sender = Sender(client, MODEL, Plan(OfTrace(trace, shrink=64), OFTEN, words, 1, requests=3))
        assert [len(await sender.run(OFTEN)) for _ in range(3)] == [3, 3, 3]


# -- what goes wrong


FAILURES = {
    "busy": (Reply(503, "too many requests"), "HTTP 503: too many requests", 0),
    "refused": (Reply(400, "no such model"), "HTTP 400: no such model", 0),
    "cut": (Reply(cut_after=2), "cut off mid-stream: ", 2),
    "cut before the first": (Reply(cut_after=0), "", 0),
    "error event": (Reply(error_after=3), "failed mid-stream: the engine has failed", 3),
    "no end": (Reply(unfinished=True), "the stream ended before its end", 4),
    "no stream": (Reply(content_type="text/html"), "answered text/html", 0),
    "no JSON": (Reply(garbled=True), "an event is not what the API has: Expecting", 0),
    "silence": (Reply(stall=True), "no answer in 1 s", 0),
}


@pytest.mark.parametrize("kind", FAILURES)
async def test_failures_are_noted_and_what_came_before_is_kept(kind: str) -> None:
    reply, why, pieces = FAILURES[kind]
    async with StubServer(reply=lambda number: reply if number == 1 else Reply(newline=b"\r\n")) as server:
        _, calls = await sent(server, arrivals=Users(1), requests=3, timeout=1.0 if reply.stall else 60.0)
        assert [call.ok for call in calls] == [True, False, True]
        assert calls[1].fault is not None and calls[1].fault.startswith(why) and "\n" not in calls[1].fault
        assert len(calls[1].times) == pieces
        report = summary(calls, Targets(60.0, 60.0))
        assert (report["requests"], report["ok"]) == (3, 2) and report["failed"] == {calls[1].fault: 1}
        assert report["goodput"]["share"] == pytest.approx(2 / 3)  # type: ignore[index]


async def test_a_server_that_has_gone_ends_the_run() -> None:
    async with StubServer(reply=lambda number: Reply() if number < 5 else Reply(500, "dying")) as server:
        sender, calls = await sent(server, arrivals=Users(1), requests=1000)
        assert sender.ended == f"{GONE_AFTER} requests in a row failed, the last one: HTTP 500: dying"
        assert sum(call.ok for call in calls) == 5 and len(calls) == 5 + GONE_AFTER


@pytest.mark.parametrize("arrivals", [OFTEN, Users(1), Users(2)], ids=str)
async def test_nothing_is_sent_after_its_duration(arrivals: Poisson | Users) -> None:
    async with StubServer(gap=0.001) as server:
        sender, calls = await sent(server, arrivals=arrivals, requests=100_000, duration=0.05)
        assert sender.ended is None and 0 < len(calls) < 1000 and all(call.ok for call in calls)
        seconds = calls[-1].due - calls[0].due
        assert seconds <= (1.0 if arrivals == Users(2) else 0.051), "users begin one after the other"


async def test_failures_between_answers_do_not_end_the_run() -> None:
    async with StubServer(reply=lambda number: Reply(500) if number % 2 else Reply()) as server:
        sender, calls = await sent(server, arrivals=Users(1), requests=2 * GONE_AFTER + 4)
        assert sender.ended is None and sum(call.ok for call in calls) == GONE_AFTER + 2


async def test_a_key_is_sent_and_never_shown() -> None:
    secret = "sk-very-secret"
    async with StubServer(reply=lambda _: Reply(401, f"no such key: {secret}")) as server:
        _, calls = await sent(server, access=ApiAccess(key=secret), requests=1)
        assert server.headers[0]["authorization"] == f"Bearer {secret}"
        assert calls[0].fault == "HTTP 401: no such key: ***"
        assert secret not in repr(ApiAccess(key=secret))


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    require_installed(True, "")
    x509 = pytest.importorskip("cryptography.x509")
    from cryptography.hazmat.primitives import hashes, serialization  # noqa: PLC0415 - optional
    from cryptography.hazmat.primitives.asymmetric import ec  # noqa: PLC0415 - optional

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "stub")])
    now = datetime.now(timezone.utc)
    made = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(now - timedelta(days=1))
        .not_valid_after(now + timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]), critical=False)
        .sign(key, hashes.SHA256())
    )
    path = tmp_path_factory.mktemp("tls") / "stub.pem"
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    path.write_bytes(private + made.public_bytes(serialization.Encoding.PEM))
    return path


async def test_tls_is_trusted_by_the_named_certificates_alone(certificate: Path) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate)
    async with StubServer(context=context) as server:
        _, calls = await sent(server, access=ApiAccess(ca_file=str(certificate)), requests=3)
        assert all(call.ok for call in calls)
        _, calls = await sent(server, requests=1)
        assert calls[0].fault is not None and "KVTIER_CA_FILE" in calls[0].fault


def test_words_are_distinct() -> None:
    assert len(set(WORDS)) == len(WORDS) > 100
