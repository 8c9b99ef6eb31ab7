"""``kvtier warm``: a running server computes system prompts and pins them, so that the first who uses them finds them there.

What all conversations with a system prompt have in common is found by asking the server for the tokens of two that differ in
what the user says: so it is right for any chat template, also for one that puts the system prompt into the first user's turn.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any

from kvtier.abc.store import MOST_PIN_SECONDS, Hints
from kvtier.cli.ask import ANSWER_SECONDS, Refused, add_server_arguments, asked, fetched
from kvtier.errors import ConfigError
from kvtier.params import nearest
from kvtier.quantity import counted, parse_seconds

DONE, SOME_FAILED = 0, 1
SERVER = "http://127.0.0.1:8000"
PREFILL_SECONDS = 600.0
SAVING_SECONDS = 5.0
"""How long is waited, once all is computed, for what is still being saved."""
POLL_SECONDS = 0.05
LEAST_SECONDS = 0.001
"""For an answer, where no time is left."""
SAMPLE = re.compile(
    r"^kvtier_tier_(pinned_blocks|pins_refused_total|queue_depth)\{([^}]*)\} (\d{1,20}(?:\.\d{1,20})?(?:e\+\d\d)?)$",
    re.MULTILINE,
)
MOST_BYTES = 8 << 20
"""Of a line, or of a text: what the server takes."""
FIELDS = ("system", "prompt", "tools", "cache_salt", "pin_seconds", "priority")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = (
        "A FILE whose name ends in .jsonl has a prompt per line: a JSON text, which is a system prompt, or an object with "
        "one of system (a chat's system prompt, with the chat's tools if any) and prompt (the beginning of a plain "
        "completion), and optionally cache_salt, pin_seconds and priority. Any other FILE is one system prompt as it "
        "stands. Pins last until their time is up or the server ends, and take at most a quarter of a tier: what is over "
        "that is kept as everything else is; the last line tells how much that was. Exit code 0: done. 1: some prompts "
        "failed, each with a line that names it, or the time was up. 2: could not run."
    )
    parser.add_argument("file", nargs="+", metavar="FILE", help="system prompts: JSON lines, or a text")
    add_server_arguments(parser, SERVER)
    parser.add_argument(
        "--pin", default="1h", metavar="TIME", help="how long the prompts stay, such as 30m (default: 1h; at most 7d)"
    )
    parser.add_argument("--timeout", default="1h", metavar="TIME", help="for all of it together (default: 1h)")
    parser.add_argument("--priority", type=int, default=0, help="theirs under policy ttl, -100 to 100 (default: 0)")


def run(args: argparse.Namespace) -> int:
    pin, timeout = _seconds("--pin", args.pin), _seconds("--timeout", args.timeout)
    deadline = time.monotonic() + timeout
    hints = _hints("--pin or --priority", {"pin_seconds": pin, "priority": args.priority})
    warmed = failed = late = 0
    before = _pins(args, _left(deadline))
    for path in map(Path, args.file):
        for where, given in _given(path):
            if time.monotonic() >= deadline:
                late += 1
                continue
            try:
                prompt = Prompt.of(given, hints)
                tokens, cached = _warm(args, prompt, deadline)
            except (Wrong, Refused) as wrong:
                print(f"{where}: {wrong}", file=sys.stderr)
                failed += 1
                continue
            except ConfigError as gone:
                if time.monotonic() >= deadline:
                    late += 1
                    continue
                done = f" ({counted(warmed, 'prompt')} warmed before)" if warmed else ""
                raise ConfigError(f"{where}: {gone}{done}") from gone
            warmed += 1
            print(
                f"{where}: {tokens} tokens, {cached} of them were there; "
                f"their blocks are pinned for {prompt.hints.pin_seconds:g} s, up to a tier's share of pins"
            )
    if not warmed + failed + late:
        raise ConfigError(f"{', '.join(args.file)}: no prompt is in it")
    if late:
        print(f"the time of {timeout:g} s was up: {counted(late, 'prompt')} not warmed", file=sys.stderr)
    if warmed:
        saved = min(time.monotonic() + SAVING_SECONDS, deadline)
        print(_told(before, _pins(args, max(_left(deadline), SAVING_SECONDS), saved)))
    return SOME_FAILED if failed or late else DONE


def _seconds(flag: str, text: str) -> float:
    try:
        return float(parse_seconds(text))
    except ValueError as wrong:
        raise ConfigError(f"{flag}: {wrong}") from None


def _left(deadline: float, most: float = ANSWER_SECONDS) -> float:
    """Seconds in which an answer has to come: at most so many."""
    return max(LEAST_SECONDS, min(most, deadline - time.monotonic()))


@dataclass(frozen=True, slots=True)
class _Pins:
    """What the server's metrics say of pins, in blocks by tier, and how many saves are under way."""

    pinned: dict[str, int]
    refused: dict[str, int]
    saving: int


def _pins(args: argparse.Namespace, seconds: float, until: float = 0.0) -> _Pins | None:
    """As of when no save is under way, at ``until`` at the latest: blocks are pinned when they are saved.

    None where the server does not tell, or not within ``seconds``.
    """
    while True:
        text = fetched(args, "/metrics", seconds)
        samples = [] if text is None else SAMPLE.findall(text)
        if not samples:
            return None
        by_name = {(name, labels): int(float(value)) for name, labels, value in samples}
        pinned, refused = (
            {labels.split('"')[1]: count for (name, labels), count in by_name.items() if name == each and '"' in labels}
            for each in ("pinned_blocks", "pins_refused_total")
        )
        saving = sum(count for (name, labels), count in by_name.items() if name == "queue_depth" and "save" in labels)
        if not saving or time.monotonic() >= until:
            return _Pins(pinned, refused, saving)
        time.sleep(POLL_SECONDS)


def _told(before: _Pins | None, after: _Pins | None) -> str:
    """How much is pinned, as far as the server's counters can say: they are of all requests."""
    if before is None or after is None:
        return "how much is pinned the server does not say"
    refused = {tier: count - before.refused.get(tier, 0) for tier, count in after.refused.items()}
    now, over = (
        ", ".join(f"{tier} {counted(count, 'block')}" for tier, count in each.items() if count) or "nothing"
        for each in (after.pinned, refused)
    )
    late = f"; {counted(after.saving, 'block')} still on the way" if after.saving else ""
    return f"pinned now, by whoever: {now}; over a tier's share and not pinned, since this began: {over}{late}"


class Wrong(Exception):
    """A prompt that is not what its file should have, in words."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt to warm."""

    hints: Hints
    system: str | None = None
    prompt: str | None = None
    tools: list[Any] | None = None
    salt: str | None = None

    @classmethod
    def of(cls, given: object, hints: Hints) -> Prompt:
        """What a line says. Raises `Wrong`."""
        if isinstance(given, Wrong):
            raise given
        fields = {"system": given} if isinstance(given, str) else given
        if not isinstance(fields, dict):
            raise Wrong("neither a text nor an object")
        for name in fields:
            if name not in FIELDS:
                raise Wrong(f"unknown field {name!r}{nearest(name, FIELDS)}")
        system, prompt, salt = (fields.get(name) for name in ("system", "prompt", "cache_salt"))
        if not all(value is None or isinstance(value, str) for value in (system, prompt, salt)):
            raise Wrong("system, prompt and cache_salt are texts")
        if not (system or "").strip() and not (prompt or "").strip():
            raise Wrong("the prompt is empty")
        if system is not None and prompt is not None:
            raise Wrong("either system or prompt, not both")
        if prompt is not None and fields.get("tools"):
            raise Wrong("tools go with system")
        return cls(_own_hints(fields, hints), system, prompt, fields.get("tools"), salt)


def _own_hints(fields: dict[str, Any], hints: Hints) -> Hints:
    """The hints of a line that may have some of its own."""
    own: dict[str, Any] = {name: fields[name] for name in ("pin_seconds", "priority") if name in fields}
    for name, value in own.items():
        if type(value) not in (int, float):
            raise Wrong(f"{name} is no number")
    try:
        return _hints("its hints", {"pin_seconds": hints.pin_seconds, "priority": hints.priority, **own})
    except ConfigError as wrong:
        raise Wrong(str(wrong)) from None


def _hints(where: str, given: dict[str, Any]) -> Hints:
    try:
        hints = Hints(**given, store_generated=False)
    except ValueError as wrong:
        raise ConfigError(f"{where}: {wrong}") from None
    if not hints.pin_seconds:
        raise ConfigError(f"{where}: pin_seconds must be above 0 and at most {MOST_PIN_SECONDS:g}")
    return hints


def _given(path: Path) -> Iterator[tuple[str, object]]:
    """What a file has: where each prompt stands, and what stands there, or what is wrong with it (`Wrong`)."""
    try:
        with path.open("rb") as file:
            if path.suffix != ".jsonl":
                yield str(path), _text(file.read(MOST_BYTES + 1))
                return
            number = 0
            while line := file.readline(MOST_BYTES + 1):
                number += 1
                if not line.isspace():
                    yield f"{path}:{number}", _value(_text(line))
                if len(line) > MOST_BYTES:
                    return  # where the next line begins is anybody's guess
    except OSError as failed:
        raise ConfigError(f"{path}: {failed.strerror}") from failed


def _text(raw: bytes) -> str | Wrong:
    if len(raw) > MOST_BYTES:
        return Wrong(f"longer than the {MOST_BYTES >> 20} MiB that a server takes")
    try:
        return raw.decode()
    except UnicodeDecodeError as wrong:
        return Wrong(f"not UTF-8: {wrong.reason} at byte {wrong.start}")


def _value(line: str | Wrong) -> object:
    if isinstance(line, Wrong):
        return line
    try:
        return json.loads(line)
    except (ValueError, RecursionError) as wrong:
        return Wrong(f"no JSON: {wrong}")


def _warm(args: argparse.Namespace, prompt: Prompt, deadline: float) -> tuple[int, int]:
    """Have the server compute and pin one prompt: its tokens, and how many of them were there already."""
    hints = {
        "pin_seconds": prompt.hints.pin_seconds,
        "priority": prompt.hints.priority,
        "store_generated": prompt.hints.store_generated,
    }
    beginning = prompt.prompt if prompt.prompt is not None else _common(args, prompt, deadline)
    body = {"prompt": beginning, "max_tokens": 1, "temperature": 0, "kv_hints": hints, "cache_salt": prompt.salt}
    usage = asked(args, "/v1/completions", body, "usage", "completion", _left(deadline, PREFILL_SECONDS))["usage"]
    try:
        return int(usage["prompt_tokens"]), int(usage["prompt_tokens_details"]["cached_tokens"])
    except (TypeError, LookupError, ValueError, OverflowError):
        raise ConfigError(f"{args.server_uds or args.server_url}: its usage is no kvtier server's") from None


def _common(args: argparse.Namespace, prompt: Prompt, deadline: float) -> list[int]:
    """The tokens that all conversations with this system prompt and these tools begin with."""
    one, other = (
        asked(
            args,
            "/tokenize",
            {
                "messages": [{"role": "system", "content": prompt.system}, {"role": "user", "content": said}],
                "tools": prompt.tools,
            },
            "tokens",
            "tokens",
            _left(deadline),
        )["tokens"]
        for said in ("a", "b")
    )
    if not (isinstance(one, list) and isinstance(other, list)):
        raise ConfigError(f"{args.server_uds or args.server_url}: its tokens are no list")
    return [token for token, _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False))]
