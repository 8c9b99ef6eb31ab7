"""``kvtier warm`` against a running server."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvtier.abc.store import Hints
from kvtier.cli.main import main
from kvtier.cli.warm import _warm

from .serving import Running
from .support import BLOCK, DictConnector

TEMPLATE = (
    "{% for tool in tools or [] %}[{{ tool.function.name }}]{% endfor %}"
    "{% for message in messages %}<{{ message.role }}>{{ message.content }};{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
SYSTEM = "You are as brief as a bill"
COMMON = f"<system>{SYSTEM};<user>"
"""What all conversations with that system prompt begin with: one token for each letter."""
NOTHING = "pinned now, by whoever: nothing; over a tier's share and not pinned, since this began: nothing\n"
PINNED = "their blocks are pinned for {} s, up to a tier's share of pins"
TOOL = {"type": "function", "function": {"name": "look"}}


@pytest.fixture(scope="module")
def running(one_thread: None) -> Iterator[Running]:
    with Running(DictConnector(), template=TEMPLATE) as server:
        server.metrics.tier("dram").pinned(0)
        yield server


def warm(running: Running, path: Path, *more: str) -> int:
    code = main(["warm", str(path), f"--base-url={running.url}", *more])
    running.until_idle()
    return code


def offered(running: Running) -> dict[Hints, int]:
    """Blocks that were offered so far, by their hints; forgets them."""
    assert isinstance(running.connector, DictConnector)
    found: dict[Hints, int] = {}
    for what, blocks, hints in running.connector.scheduler.hints:
        if what == "offer":
            found[hints] = found.get(hints, 0) + blocks
    running.connector.scheduler.hints.clear()
    return found


def lines(path: Path, *given: object) -> Path:
    path.write_text("".join((one if isinstance(one, str) else json.dumps(one)) + "\n" for one in given))
    return path


def test_the_first_user_of_a_warm_prompt_finds_it(
    running: Running, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "system.txt"
    path.write_text(SYSTEM)
    offered(running)
    assert warm(running, path, "--pin=2h", "--priority=3") == 0
    told = f"{path}: {len(COMMON)} tokens, 0 of them were there; {PINNED.format(7200)}\n"
    assert capsys.readouterr().out == told + NOTHING
    wanted = Hints(priority=3, pin_seconds=7200, store_generated=False)
    assert offered(running)[wanted] == len(COMMON) // BLOCK
    chat = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": "what now?"}]
    usage = running.post("/v1/chat/completions", {"messages": chat, "max_tokens": 1}).json()["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] == len(COMMON) // BLOCK * BLOCK
    assert warm(running, path) == 0
    there = (len(COMMON) - 1) // BLOCK * BLOCK
    told = f"{path}: {len(COMMON)} tokens, {there} of them were there; {PINNED.format(3600)}\n"
    assert capsys.readouterr().out == told + NOTHING


class Stub(BaseHTTPRequestHandler):
    """Answers as its test says."""

    def log_message(self, *_: object) -> None:
        """Nobody reads it."""


@contextmanager
def stub(answers: type[Stub]) -> Iterator[str]:
    """A server that is none of ours; the flag that names it."""
    with HTTPServer(("127.0.0.1", 0), answers) as server:
        serving = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        serving.start()
        try:
            yield f"--base-url=http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            serving.join()


def test_how_much_is_pinned_is_told_and_how_much_is_not(
    running: Running, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a tier that had refused two before, has four pinned of this prompt, refuses three, and is slow to save one."""
    dram = running.metrics.tier("dram")
    dram.pins_refused(2)
    assert isinstance(running.connector, DictConnector)
    scheduler = running.connector.scheduler
    offer = scheduler.offer

    def pinning(*args: Any) -> int:
        dram.pinned(4)
        dram.pins_refused(3)
        dram.queued("save", 1)
        return offer(*args)

    monkeypatch.setattr(scheduler, "offer", pinning)
    monkeypatch.setattr("kvtier.cli.warm.SAVING_SECONDS", 0.01)
    path = lines(tmp_path / "prompts.jsonl", {"prompt": "twenty letters of it"})
    assert warm(running, path) == 0
    dram.pinned(0)
    dram.queued("save", 0)
    assert capsys.readouterr().out.splitlines()[-1] == (
        "pinned now, by whoever: dram 4 blocks; over a tier's share and not pinned, since this began: dram 3 blocks; "
        "1 block still on the way"
    )


def test_the_time_for_all_of_it_is_bounded(
    running: Running, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 0.0

    def warmed(*given: Any) -> tuple[int, int]:
        nonlocal now
        told = _warm(*given)
        now += 61.0
        return told

    monkeypatch.setattr("kvtier.cli.warm.time", SimpleNamespace(monotonic=lambda: now))
    monkeypatch.setattr("kvtier.cli.warm._warm", warmed)
    path = lines(tmp_path / "prompts.jsonl", {"prompt": "one"}, {"prompt": "two"}, {"prompt": "three"})
    assert warm(running, path, "--timeout=1m") == 1
    shown = capsys.readouterr()
    assert shown.err == "the time of 60 s was up: 2 prompts not warmed\n"
    assert f"{path}:1: 3 tokens" in shown.out and f"{path}:2" not in shown.out


@pytest.mark.parametrize("prompt", [{"prompt": "one"}, {"system": "one"}], ids=["completion", "chat"])
def test_a_server_that_does_not_answer_is_given_no_more_than_that_time(
    prompt: dict[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    go = threading.Event()

    class Silent(Stub):
        def do_POST(self) -> None:
            go.wait(60.0)

    with stub(Silent) as url:
        code = main(["warm", str(lines(tmp_path / "p.jsonl", prompt)), url, "--timeout=100ms"])
        go.set()
    assert code == 1
    shown = capsys.readouterr()
    assert (shown.out, shown.err) == ("", "the time of 0.1 s was up: 1 prompt not warmed\n")


def test_each_line_is_a_prompt_and_each_wrong_one_is_named(
    running: Running, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = lines(
        tmp_path / "prompts.jsonl",
        json.dumps("Be long"),
        {"system": "Be tooled", "tools": [TOOL], "pin_seconds": 5, "cache_salt": "mine"},
        "",
        {"prompt": "Once upon a time"},
        "{",
        "7",
        {"systm": "x"},
        {"system": " "},
        {"system": "x", "prompt": "y"},
        {"prompt": "x", "tools": [TOOL]},
        {"system": "x", "pin_seconds": 0},
        {"system": "x", "priority": 1000},
        {"system": "x", "priority": "high"},
        {"system": 5},
        {"system": "x", "tools": [{}]},
        {"prompt": "x" * 600},
        {"prompt": "and on"},
        '{"prompt": "x", "pin_seconds": 1' + "0" * 400 + "}",
        '{"prompt": "x", "priority": NaN}',
        "[" * 100_000,
    )
    assert warm(running, path) == 1
    shown = capsys.readouterr()
    assert [line.split()[0] for line in shown.out.splitlines()[:-1]] == [
        f"{path}:{number}:" for number in (1, 2, 4, 17)
    ]
    tokens = len("[look]<system>Be tooled;<user>")
    assert f"{path}:2: {tokens} tokens, 0 of them were there; {PINNED.format(5)}" in shown.out
    said = dict(line.removeprefix(f"{path}:").split(": ", 1) for line in shown.err.splitlines())
    expected = {
        5: "no JSON",
        6: "neither a text nor an object",
        7: "unknown field 'systm'; did you mean 'system'?",
        8: "the prompt is empty",
        9: "either system or prompt",
        10: "tools go with system",
        11: "pin_seconds must be above 0",
        12: "priority must be from -100 to 100",
        13: "priority is no number",
        14: "are texts",
        15: "tools",
        16: "the prompt has 600 tokens",
        18: "pin_seconds must be from 0 to 604800, got 1000",
        19: "priority must be from -100 to 100, got nan",
        20: "no JSON",
    }
    assert sorted(map(int, said)) == sorted(expected)
    for number, words in expected.items():
        assert words in said[str(number)], said[str(number)]


def test_what_cannot_run_at_all_is_one_line(
    running: Running, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = lines(tmp_path / "prompts.jsonl", {"prompt": "x"})
    binary = tmp_path / "binary.txt"
    binary.write_bytes(b"ok \xff")
    for argv, code, said in (
        (["warm", str(tmp_path / "missing")], 2, "No such file or directory"),
        (["warm", str(lines(tmp_path / "none.jsonl")), f"--base-url={running.url}"], 2, "no prompt is in it"),
        (["warm", str(path), "--pin=long"], 2, "--pin: 'long' is not a duration"),
        (["warm", str(path), "--pin=8d"], 2, "pin_seconds must be from 0 to 604800"),
        (["warm", str(path), "--base-url=http://127.0.0.1:1"], 2, f"{path}:1: http://127.0.0.1:1: no answer"),
        (["warm", str(path), "--base-url=https://x"], 2, "give the server's address"),
        (["warm", str(path), "--base-url=http://[::1"], 2, f"{path}:1: http://[::1: Invalid IPv6 URL"),
        (["warm", str(binary), f"--base-url={running.url}"], 1, "not UTF-8: invalid start byte at byte 3"),
    ):
        assert main(argv) == code
        (line,) = capsys.readouterr().err.splitlines()
        assert said in line


def test_what_stands_behind_a_line_that_is_too_long_is_no_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("kvtier.cli.warm.MOST_BYTES", 1000)
    path = lines(tmp_path / "prompts.jsonl", "x" * 5000, {"prompt": "x"})
    assert main(["warm", str(path), "--base-url=http://127.0.0.1:1"]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"{path}:1: longer than")


USAGE = {"usage": {"prompt_tokens": 3, "prompt_tokens_details": {"cached_tokens": 0}}}
DEEP = b"[" * 100_000


@pytest.mark.parametrize(
    ("status", "answer", "code", "said"),
    [
        (200, {"usage": None}, 2, "its usage is no kvtier server's"),
        (200, {"usage": {"prompt_tokens": 3, "prompt_tokens_details": None}}, 2, "its usage is no kvtier server's"),
        (200, DEEP, 2, "answered 200 and no completion"),
        (500, DEEP, 2, "answered 500 and no completion"),
        (503, {"error": {"message": "about to\nend"}}, 2, "answered 503 (about to end) and no completion"),
        (400, {"error": {"message": "no \x1b[31m\nroom"}}, 1, ": no [31m room"),
        (None, b"", 2, "no answer"),
    ],
)
def test_a_server_that_fails_midway_is_one_line_and_what_was_done_is_told(
    status: int | None, answer: object, code: int, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    answers = iter([(200, USAGE), (status, answer)])

    class Failing(Stub):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["content-length"]))
            number, what = next(answers)
            if number is not None:
                self.send_response(number)
                self.end_headers()
                self.wfile.write(what if isinstance(what, bytes) else json.dumps(what).encode())

    path = lines(tmp_path / "prompts.jsonl", {"prompt": "one"}, {"prompt": "two"})
    with stub(Failing) as url:
        assert main(["warm", str(path), url]) == code
    shown = capsys.readouterr()
    (line,) = shown.err.splitlines()
    assert f"{path}:2: " in line and said in line and line.isprintable()
    assert shown.out.startswith(f"{path}:1: 3 tokens, ")
    assert ("1 prompt warmed before" in line) == (code == 2)
