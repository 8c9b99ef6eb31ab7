"""The course of ``kvtier stress``: lives of an engine's process, faults in random order, and the books of both."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from kvtier.abc.audit import FindingKind
from kvtier.errors import ConfigError
from kvtier.registry import plan_tier
from kvtier.store.audit import audit_tier
from kvtier.url import TierUrl

if TYPE_CHECKING:
    from kvtier.testing.valkey import ValkeyServer

START_SECONDS, SILENT_SECONDS, END_SECONDS = 60.0, 90.0, 180.0
LIFE_SECONDS = 8.0
"""Least time between two kills: a life must get to use what the one before left behind."""
DOUBT_SECONDS = 10.0
"""A process with a request that old, or silent for so long, is not killed: that would hide that something is stuck."""
KILL_SHARE, KILL_SECONDS = 0.5, 60.0
"""Share of the run in which processes are killed, and the least of it: the last is to live long enough to show a leak."""
FIRST_ANSWERS = 200
"""After so many a process has what it needs once."""
WARM_ANSWERS = 4500
"""After so many every bounded memory of a life (reasons, timings, explanations) is full."""
MOST_GROWTH = 0.05
"""Share by which resident memory may grow from then on."""
MOST_WARMING = 192 << 20
"""Bytes by which it may grow from the first answers on."""


@dataclass(slots=True)
class Verdict:
    """The whole run."""

    seed: int
    faults: dict[str, int] = field(default_factory=dict)
    """How often each was done."""
    lives: int = 0
    answers: int = 0
    aborted: int = 0
    preemptions: int = 0
    stuck: int = 0
    watched: int = 0
    """Answers of warm processes: during these memory may not have grown."""
    hits: dict[str, int] = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)
    leaks: list[str] = field(default_factory=list)
    growth: list[str] = field(default_factory=list)

    @property
    def passed(self) -> bool:
        return not (self.wrong or self.stuck or self.leaks or self.growth) and self.answers > 0

    def take(self, life: Life) -> None:
        """Add what a life has told."""
        last = life.last
        self.answers += last.get("answers", 0)
        self.aborted += last.get("aborted", 0)
        self.preemptions += last.get("preemptions", 0)
        self.stuck += last.get("stuck", 0)
        self.watched += max(0, last.get("answers", 0) - WARM_ANSWERS)
        if "abort" in self.faults:
            self.faults["abort"] = self.aborted
        self.wrong += last.get("wrong", [])
        for tier, count in last.get("hits", {}).items():
            self.hits[tier] = self.hits.get(tier, 0) + count
        if (life.first and life.most > life.first + MOST_WARMING) or (
            life.warm and life.most > life.warm * (1.0 + MOST_GROWTH)
        ):
            grown = f"{life.first >> 20} MiB at the start, {life.warm >> 20} when warm, {life.most >> 20} at most"
            self.growth.append(f"resident memory grew: {grown}")


class Life:
    """One process of the engine."""

    def __init__(self, plan: Path, log: Path) -> None:
        self.started = time.monotonic()
        self.last: dict[str, Any] = {}
        self.told = self.started
        self.first = self.warm = self.most = 0
        self._log = log.open("ab")
        command = [sys.executable, "-m", "kvtier.cli.stress_worker", str(plan)]
        self.process = subprocess.Popen(  # noqa: S603 - this interpreter
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log, text=True
        )
        self._reader = threading.Thread(target=self._read, name="kvtier-stress-reader", daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            with suppress(ValueError):  # a line that a kill has cut
                self.last = json.loads(line)
                self.told = time.monotonic()
                resident = self.last["resident"]
                self.most = max(self.most, resident)
                if self.last["answers"] >= FIRST_ANSWERS:
                    self.first = self.first or resident
                if self.last["answers"] >= WARM_ANSWERS:
                    self.warm = self.warm or resident

    @property
    def doubtful(self) -> bool:
        """Whether something in it may be stuck."""
        return max(float(self.last.get("oldest", 0.0)), time.monotonic() - self.told) > DOUBT_SECONDS

    def order(self, text: str) -> None:
        assert self.process.stdin is not None
        with suppress(BrokenPipeError):
            self.process.stdin.write(text + "\n")
            self.process.stdin.flush()

    def wait_ready(self) -> None:
        until = time.monotonic() + START_SECONDS
        while not self.last:
            if self.process.poll() is not None or time.monotonic() > until:
                raise ConfigError("the engine did not start: see the end of its log above")
            time.sleep(0.02)

    def kill(self) -> None:
        self.process.kill()
        self._join()

    def end(self) -> bool:
        """Let it finish and audit itself; whether it did."""
        self.order("end")
        try:
            code = self.process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            self.kill()
            return False
        self._join()
        return code == 0

    def _join(self) -> None:
        self.process.wait()
        self._reader.join()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                with suppress(BrokenPipeError):
                    pipe.close()
        self._log.close()


class Run:
    """Faults in random order until the time is over."""

    def __init__(
        self,
        folder: Path,
        valkey: ValkeyServer,
        faults: list[str],
        seed: int,
        most_disk: int,
        say: Callable[[str], None],
    ) -> None:
        self.verdict = Verdict(seed, dict.fromkeys(faults, 0))
        self._folder, self._valkey, self._most_disk, self._say = folder, valkey, most_disk, say
        self._dice = random.Random(seed)  # noqa: S311 - chooses faults, guards nothing
        self._plan = folder / "plan.json"
        self._life: Life | None = None
        self._kills_until = 0.0

    @property
    def life(self) -> Life:
        assert self._life is not None, "started"
        return self._life

    def go(self, minutes: float) -> Verdict:
        """Raises ``ConfigError`` where the engine does not start; no process of its outlives this call."""
        try:
            self._start()
            self._kills_until = time.monotonic() + max(60.0 * minutes * KILL_SHARE, KILL_SECONDS)
            end = time.monotonic() + 60.0 * minutes
            while time.monotonic() < end and not (self.verdict.wrong or self.verdict.leaks):
                self._one_fault(end)
                self._look()
            self._finish()
        finally:
            if self._life is not None and self._life.process.poll() is None:
                self._life.kill()
        return self.verdict

    def _start(self) -> None:
        self._life = Life(self._plan, self._folder / "engine.log")
        self.life.wait_ready()
        self.verdict.lives += 1

    def _able(self) -> list[str]:
        """The faults to choose from now."""
        now, life = time.monotonic(), self.life
        spared = {"abort"}  # which the process does by itself
        if now < life.started + LIFE_SECONDS or now > self._kills_until or life.doubtful:
            spared.add("kill")
        return [name for name in self.verdict.faults if name not in spared]

    def _one_fault(self, end: float) -> None:
        able = self._able()
        lasts = min(self._dice.uniform(0.5, 2.5), max(end - time.monotonic(), 0.1))
        if not able:
            time.sleep(lasts)
            return
        name = self._dice.choice(able)
        self.verdict.faults[name] += 1
        self._say(name)
        getattr(self, "_" + name.replace("-", "_"))(lasts)

    def _look(self) -> None:
        life = self.life
        self.verdict.wrong += [text for text in life.last.get("wrong", []) if text not in self.verdict.wrong][:3]
        if life.process.poll() is not None:
            self.verdict.leaks.append(f"the engine's process ended by itself, exit code {life.process.returncode}")
        elif time.monotonic() - life.told > SILENT_SECONDS:
            self.verdict.leaks.append(f"the engine has said nothing for {SILENT_SECONDS:.0f} s")
        on_disk = sum(each.stat().st_blocks * 512 for each in self._nvme.rglob("*") if each.is_file())
        if on_disk > self._most_disk:
            self.verdict.growth.append(f"NVMe takes {on_disk} bytes of disk, {self._most_disk} are allowed")

    def _finish(self) -> None:
        ended = self.life.process.poll() is None and self.life.end()
        self.verdict.wrong.clear()  # the life's own account has all of them
        self.verdict.take(self.life)
        if not ended:
            self.verdict.leaks.append("the engine did not come to an end")
        self.verdict.leaks += self.life.last.get("left", ["the engine gave no account at its end"])
        self.verdict.leaks += self._audited()

    def _audited(self) -> list[str]:
        """What an audit of the tiers at rest finds, but for what the faults themselves have planted."""
        planted = set()
        if self.verdict.faults.get("flip-file") or self.verdict.faults.get("flip-redis"):
            planted.add(FindingKind.FLIPPED_BIT)
        if self.verdict.faults.get("kill"):
            planted.add(FindingKind.ORPHAN_SLOT)  # written, and killed before the row was
        found = []
        for tier in json.loads(self._plan.read_text(encoding="utf-8"))["tiers"]:
            audited = audit_tier(plan_tier(TierUrl.parse(tier)), _unseen, fix=False, most=1_000_000)
            if audited is None:
                continue
            found += [] if audited.error is None else [f"{audited.tier} could not be audited: {audited.error}"]
            found += [
                f"{audited.tier}: {each.finding.kind.value} at {each.finding.place}"
                for each in audited.found
                if each.finding.kind not in planted
            ]
        return found

    @property
    def _nvme(self) -> Path:
        return self._folder / "nvme"

    def _kill(self, lasts: float) -> None:
        del lasts
        life = self.life
        life.kill()
        self.verdict.take(life)
        self._start()

    def _switched(self, fault: str, lasts: float) -> None:
        self.life.order(f"{fault} on")
        time.sleep(lasts)
        self.life.order(f"{fault} off")

    def _full_disk(self, lasts: float) -> None:
        self._switched("full-disk", lasts)

    def _slow_disk(self, lasts: float) -> None:
        self._switched("slow-disk", lasts)

    def _failing_redis(self, lasts: float) -> None:
        self._switched("failing-redis", lasts)

    def _flip_dram(self, lasts: float) -> None:
        for _ in range(8):
            self.life.order("flip-dram")
        time.sleep(lasts / 4)

    def _stall_redis(self, lasts: float) -> None:
        os.kill(self._valkey.pid, signal.SIGSTOP)
        try:
            time.sleep(lasts)
        finally:
            os.kill(self._valkey.pid, signal.SIGCONT)

    def _kill_redis(self, lasts: float) -> None:
        self._valkey.kill()
        time.sleep(lasts)
        self._valkey.start()

    def _flip_file(self, lasts: float) -> None:
        files = [each for each in self._nvme.rglob("*") if each.is_file() and each.stat().st_size >= 1 << 16]
        slabs = [each for each in files if "sqlite" not in each.name]
        for _ in range(4):
            if slabs:
                self._flip_in(self._dice.choice(slabs))
        time.sleep(lasts / 4)

    def _flip_in(self, path: Path) -> None:
        with suppress(OSError), path.open("r+b") as file:
            at = self._dice.randrange(path.stat().st_size)
            file.seek(at)
            byte = file.read(1)
            file.seek(at)
            file.write(bytes([byte[0] ^ (1 << self._dice.randrange(8))]))

    def _flip_redis(self, lasts: float) -> None:
        import redis

        client = redis.Redis(unix_socket_path=str(self._valkey.socket_path), socket_timeout=1.0)
        with suppress(redis.RedisError):
            for _ in range(4):
                key = cast("bytes | None", client.randomkey())
                size = int(client.strlen(key)) if key and client.type(key) == b"string" else 0
                if key and size:
                    at = self._dice.randrange(size)
                    byte = cast("bytes", client.getrange(key, at, at))
                    client.setrange(key, at, bytes([byte[0] ^ (1 << self._dice.randrange(8))]))
        client.close()
        time.sleep(lasts / 4)


def _unseen(done: int, of: int) -> None:
    """An audit's progress that nobody looks at."""
