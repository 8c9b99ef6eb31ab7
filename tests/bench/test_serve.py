"""``kvtier bench serve``: its figures, and the command."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from array import array
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeAlias

import pytest

from kvtier.bench.arrivals import MadeUp, Poisson, words
from kvtier.bench.goodput import MOST_RATE, Call, RateSearch, Targets, summary
from kvtier.bench.report import check_json
from kvtier.bench.sender import Plan
from kvtier.bench.serve import _runs, _shown
from kvtier.cli.main import main
from kvtier.testing.completions import MODEL, StubServer
from tests.support import script

OFTEN = Poisson(2000)


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

    plan = Plan(MadeUp(prompt_tokens=1, output_tokens=1), Poisson(8.0), words, 1, 10)
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
        out, err = process.communicate(timeout=60)
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


async def test_the_load_benchmark_measures(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = script("benchmarks/load_generator.py")
    async with StubServer(keep=False) as server:
        report = await bench.measure(server.url, 200.0, 0.2, 1)
    assert report["requests"] == 40 and report["limit_streams_s"] > 0 and 1000 < report["body_bytes"] < 1400
