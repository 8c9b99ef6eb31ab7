"""``kvtier bench serve`` against a stub that answers, refuses, lies and dies."""

from __future__ import annotations

import gzip
import ipaddress
import itertools
import json
import os
import signal
import ssl
import subprocess
import sys
from array import array
from collections.abc import Callable, Iterator
from datetime import datetime, timedelta, timezone
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeAlias

import pytest

from kvtier.bench.arrivals import WORDS, MadeUp, OfTrace, Poisson, Recorded, Users, ids_below, words
from kvtier.bench.client import Client, clock
from kvtier.bench.goodput import MOST_RATE, Call, RateSearch, Targets, summary
from kvtier.bench.report import check_json
from kvtier.bench.sender import GONE_AFTER, Plan, Sender
from kvtier.bench.serve import _runs, _shown
from kvtier.bench.sse import MOST_EVENT_BYTES, EventStream
from kvtier.cli.main import main
from kvtier.config import ApiAccess
from kvtier.sim.traces import open_trace
from kvtier.testing.completions import MODEL, Reply, StubServer
from kvtier.testing.requirements import require_installed
from tests.support import script

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
    timeout: float = 5.0,
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
        report = summary(calls, Targets(1.0, 1.0))
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
    "silence": (Reply(stall=True), "no answer in 0.2 s", 0),
}


@pytest.mark.parametrize("kind", FAILURES)
async def test_failures_are_noted_and_what_came_before_is_kept(kind: str) -> None:
    reply, why, pieces = FAILURES[kind]
    async with StubServer(reply=lambda number: reply if number == 1 else Reply(newline=b"\r\n")) as server:
        _, calls = await sent(server, arrivals=Users(1), requests=3, timeout=0.2)
        assert [call.ok for call in calls] == [True, False, True]
        assert calls[1].fault is not None and calls[1].fault.startswith(why) and "\n" not in calls[1].fault
        assert len(calls[1].times) == pieces
        report = summary(calls, Targets(1.0, 1.0))
        assert (report["requests"], report["ok"]) == (3, 2) and report["failed"] == {calls[1].fault: 1}
        assert report["goodput"]["share"] == pytest.approx(2 / 3)  # type: ignore[index]


async def test_a_server_that_has_gone_ends_the_run() -> None:
    async with StubServer(reply=lambda number: Reply() if number < 5 else Reply(500, "dying")) as server:
        sender, calls = await sent(server, arrivals=Users(1), requests=1000)
        assert sender.ended == f"{GONE_AFTER} requests in a row failed, the last one: HTTP 500: dying"
        assert sum(call.ok for call in calls) == 5 and len(calls) == 5 + GONE_AFTER


@pytest.mark.parametrize("arrivals", [OFTEN, Users(2)], ids=str)
async def test_nothing_is_sent_after_its_duration(arrivals: Poisson | Users) -> None:
    async with StubServer(gap=0.001) as server:
        sender, calls = await sent(server, arrivals=arrivals, requests=100_000, duration=0.05)
        assert sender.ended is None and 0 < len(calls) < 1000 and all(call.ok for call in calls)
        assert calls[-1].due - calls[0].due <= 0.051


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


# -- figures


def call(due: float, *times: float, ended: float, sent_at: float | None = None, fault: str | None = None) -> Call:
    return Call(due, due if sent_at is None else sent_at, ended, array("d", times), fault=fault)


def test_figures_are_those_counted_by_hand() -> None:
    calls = [
        call(0.0, 0.1, 0.2, 0.3, ended=0.3),  # TTFT 0.1, TPOT 0.1
        call(1.0, 1.6, 1.7, ended=1.7, sent_at=1.1),  # TTFT 0.5: too late
        call(2.0, 2.1, 2.5, ended=2.5),  # TPOT 0.4: too slow
        call(3.0, 3.1, ended=4.0),  # one token: no TPOT to miss
        call(3.5, 3.6, ended=5.0, fault="cut"),
    ]
    calls[1].completion_tokens = 6  # in two pieces: TPOT 0.02
    report: dict[str, Any] = summary(calls, Targets(ttft=0.2, tpot=0.2))
    assert report["goodput"] == {"ttft_target_s": 0.2, "tpot_target_s": 0.2, "share": 0.4, "requests_per_s": 0.4}
    assert report["ttft_s"] == pytest.approx({"p50": 0.1, "p90": 0.5, "p99": 0.5})
    assert report["tpot_s"] == pytest.approx({"p50": 0.1, "p90": 0.4, "p99": 0.4})
    assert report["late_s"] == pytest.approx({"p50": 0.0, "p90": 0.1, "p99": 0.1})
    assert report["seconds"] == 5.0 and report["requests_per_s"] == 0.8 and report["output_tokens_per_s"] == 13 / 5.0
    assert report["failed"] == {"cut": 1}
    assert summary([], Targets(1, 1))["ttft_s"] is None


@pytest.mark.parametrize("limit", [0.05, 0.7, 3.3, 40.0])
def test_the_search_finds_the_rate_within_a_tenth(limit: float) -> None:
    search = RateSearch(1.0, most_runs=20)
    while (rate := search.next_rate()) is not None:
        search.note(rate, 0.95 if rate <= limit else 0.5)
    assert search.held is not None and search.broken is not None
    assert search.held <= limit < search.broken and search.broken - search.held < 0.1 * search.broken


def test_the_search_is_bounded_and_says_what_it_does_not_know() -> None:
    always, never = RateSearch(1.0, most_runs=5), RateSearch(1.0, most_runs=5)
    for search, share in ((always, 1.0), (never, 0.0)):
        while (rate := search.next_rate()) is not None:
            search.note(rate, share)
        assert len(search.runs) == 5
    assert (always.held, always.broken) == (16.0, None)
    assert (never.held, never.broken) == (None, 1 / 16)
    just = RateSearch(3.0, share=0.9)
    just.note(3.0, 0.9)
    assert (just.held, just.broken) == (3.0, None)
    fast = RateSearch(MOST_RATE / 3, most_runs=20)
    while (rate := fast.next_rate()) is not None:
        Poisson(rate)  # would refuse what cannot be sent
        fast.note(rate, 1.0)
    assert (fast.held, len(fast.runs)) == (MOST_RATE / 3 * 2, 2)


def ran(calls: list[Call]) -> Any:
    """A sender whose runs come to ``calls``."""

    async def run(arrivals: Poisson) -> list[Call]:
        del arrivals
        return calls

    plan = Plan(SMALL, Poisson(8.0), words, 1, 10)
    return SimpleNamespace(plan=plan, run=run, ended=None, interrupted=None, cpu_seconds=0.1)


async def test_a_rate_holds_by_all_that_was_sent(capsys: pytest.CaptureFixture[str]) -> None:
    calls = [call(0.0, 0.1, ended=0.2), call(0.1, ended=0.3, fault="HTTP 503")]
    report = await _runs(ran(calls), SimpleNamespace(find_rate=True, most_runs=1), Targets(1.0, 1.0))  # type: ignore[arg-type]
    assert report["find_rate"] == {
        "share": 0.9, "requests_per_s": None, "no_longer_at": 8.0, "runs": [{"requests_per_s": 8.0, "share": 0.5}],
    }  # fmt: skip
    assert "at no rate that was tried; at 8 they do not" in capsys.readouterr().out


@pytest.mark.parametrize(("late", "ttft", "says"), [(0.02, 0.1, True), (0.008, 0.1, False), (0.004, 0.001, False)])
def test_a_generator_that_is_late_says_so(
    late: float, ttft: float, says: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    calls = [call(0.0, late + ttft, sent_at=late, ended=1.0)]
    assert _shown(ran(calls), calls, OFTEN, Targets(1.0, 1.0))["generator_late"] == says
    assert ("the generator itself was late" in capsys.readouterr().out) == says


def test_failures_of_many_kinds_are_not_all_shown(capsys: pytest.CaptureFixture[str]) -> None:
    calls = [call(0.0, ended=1.0, fault=f"no {number}") for number in range(50)]
    report = _shown(ran(calls), calls, OFTEN, Targets(1.0, 1.0))
    assert len(report["failed"]) == 50
    shown = capsys.readouterr().out
    assert shown.count(" x no ") == 10 and "of 40 more kinds" in shown


# -- the command


StubProcess: TypeAlias = "subprocess.Popen[str]"


@pytest.fixture
def stub_process() -> Iterator[StubProcess]:
    """A stub in a process of its own: the command runs an event loop itself. Lines: its address; "busy" at the tenth request."""
    code = """
import asyncio
from kvtier.testing.completions import Reply, StubServer

def reply(number):
    if number == 10:
        print("busy", flush=True)
    return Reply()

async def main():
    async with StubServer(gap=0.002, reply=reply) as server:
        print(server.url, flush=True)
        await asyncio.Event().wait()

asyncio.run(main())
"""
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as process:
        yield process
        process.kill()


def line(process: StubProcess) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def test_the_command_prints_and_writes_its_figures(
    stub_process: StubProcess, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, url = tmp_path / "out.json", line(stub_process)
    flags = ["--requests", "10", "--prompt-tokens", "8", "--output-tokens", "3", "--json", str(out)]
    assert main(["bench", "serve", "--base-url", url, "--users", "5", *flags]) == 0
    shown, report = capsys.readouterr().out, json.loads(out.read_text())
    assert "TTFT" in shown and "sent - due" in shown and f"seed {report['seed']}" in shown
    assert report["complete"] and report["requests"] == report["ok"] == 10 and report["model"] == MODEL
    first, flags[1] = report["seed"], "5"
    search = ["--find-rate", "--rate", "200", "--most-runs", "2"]
    assert main(["bench", "serve", "--base-url", url, *search, *flags]) == 0
    report = json.loads(out.read_text())
    found = report["find_rate"]
    assert report["seed"] != first  # what an earlier run has left in the server's cache is not asked for again
    assert found["runs"][0]["requests_per_s"] == 200 and len(found["runs"]) == 2
    assert "meet both targets" in capsys.readouterr().out


def test_a_server_that_is_down_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "serve", "--base-url", "http://127.0.0.1:9"]) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and "http://127.0.0.1:9/v1: Connection refused" in err


def test_a_server_that_dies_in_the_run_leaves_partial_figures(stub_process: StubProcess, tmp_path: Path) -> None:
    done = _cut_short(stub_process, tmp_path, lambda _: stub_process.kill())
    report = json.loads((tmp_path / "out.json").read_text())
    assert done.returncode == 1 and "ended early" in done.stderr and done.stderr.count("\n") == 1
    assert not report["complete"] and "in a row failed" in report["ended"] and report["ok"] > 0


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_prints_what_there_is(stub_process: StubProcess, tmp_path: Path, number: signal.Signals) -> None:
    done = _cut_short(stub_process, tmp_path, lambda process: process.send_signal(number))
    report = json.loads((tmp_path / "out.json").read_text())
    assert done.returncode == 128 + number and "ended early: interrupted" in done.stderr and "TTFT" in done.stdout
    assert not report["complete"] and report["ended"] == "interrupted" and report["ok"] > 0


def _cut_short(
    stub: StubProcess, folder: Path, cut: Callable[[subprocess.Popen[str]], None]
) -> subprocess.CompletedProcess[str]:
    """The command, cut short once the server has seen ten requests."""
    command = [sys.executable, "-m", "kvtier", "bench", "serve", "--base-url", line(stub), "--users", "2"]
    command += ["--requests", "100000", "--output-tokens", "2", "--json", str(folder / "out.json")]
    env = {**os.environ, "KVTIER_API_KEY": "sk-secret"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env) as process:
        assert line(stub) == "busy"
        cut(process)
        out, err = process.communicate(timeout=20)
        assert "sk-secret" not in out + err
        return subprocess.CompletedProcess(command, process.returncode, out, err)


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--base-url", "ftp://x"], "--base-url ftp://x: give the server's address"),
        (["--base-url", "http://user:secret@x"], "KVTIER_API_KEY holds the key"),
        (["--base-url", "http://[::1"], "--base-url: give the server's address"),
        *(
            (["--base-url", "http://x", "--rate", rate], f"a rate of {rate} requests")
            for rate in ("0", "-1", "nan", "inf")
        ),
        (["--base-url", "http://x", "--users", "0"], "0 users cannot ask"),
        (["--base-url", "http://x", "--requests", "0"], "--requests 0"),
        (["--base-url", "http://x", "--seed", "-1"], "--seed -1"),
        (["--base-url", "http://x", "--shared-tokens", "300"], "300 shared tokens are more than the 256"),
        (["--base-url", "http://x", "--token-ids", "9", "--chat"], "a chat endpoint takes no token ids"),
        (["--base-url", "http://x", "--find-rate", "--users", "2"], "leave --users out"),
        (["--base-url", "http://x", "--json", "/no/such/folder/x"], "--json /no/such/folder/x"),
        (["--base-url", "http://x", "--json", "/proc/x"], "--json /proc/x: No such file or directory"),
        (["--base-url", "http://x", "--json", "x" * 300], "File name too long"),
        (["--base-url", "http://x", "--find-rate", "--most-runs", "0"], "--most-runs 0"),
        (["--base-url", "http://x", "--token-ids", "0"], "--token-ids 0"),
        (["--base-url", "http://x", "--prompt-tokens", "999999999"], "at most 4,194,304 tokens"),
        (["--base-url", "http://x", "--users", "10001"], "10001 users cannot ask"),
        (["--base-url", "http://x", "--trace", "/no/such/trace"], "/no/such/trace"),
    ],
)
def test_wrong_settings_are_one_line(flags: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "serve", *flags]) == 2
    err = capsys.readouterr().err
    assert says in err and err.count("\n") == 1 and "secret@" not in err


@pytest.mark.parametrize("flag", ["--timeout", "--duration", "--ttft-target", "--tpot-target"])
@pytest.mark.parametrize("value", ["0", "nan", "-1", "9" * 400])
def test_a_time_is_above_nothing_and_below_infinity(flag: str, value: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        main(["bench", "serve", "--base-url", "http://x", f"{flag}={value}"])
    err = capsys.readouterr().err
    assert left.value.code == 2 and flag in err and err.count("\n") == 1


def test_a_file_that_is_there_stays_until_there_is_a_report(tmp_path: Path) -> None:
    """Whether it can be written is seen before the run; neither a byte nor an empty file comes of that."""
    (tmp_path / "there").write_text("earlier")
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    os.mkfifo(tmp_path / "pipe")
    for name in ("there", "new", "link", "pipe"):
        check_json(tmp_path / name)
    assert (tmp_path / "there").read_text() == "earlier" and (tmp_path / "link").is_symlink()
    assert not (tmp_path / "new").exists()


def test_words_are_distinct() -> None:
    assert len(set(WORDS)) == len(WORDS) > 100


async def test_the_load_benchmark_measures(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = script("benchmarks/load_generator.py")
    async with StubServer(keep=False) as server:
        report = await bench.measure(server.url, 200.0, 0.2, 1)
    assert report["requests"] == 40 and report["limit_streams_s"] > 0 and 1000 < report["body_bytes"] < 1400
