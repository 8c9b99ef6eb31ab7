"""One life of ``kvtier stress``: a real engine over real tiers under random load, every answer of which is checked.

Orders come as lines on standard input (``full-disk on``, ``flip-dram``, ``end``), reports go as JSON lines to standard output.
"""

from __future__ import annotations

import json
import queue
import random
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from kvtier.abc.medium import KeyMedium, Medium, PersistentSlotMedium, SlotMedium
from kvtier.assembly.assemble import Assembly, assemble
from kvtier.config import EngineSettings, GateMode, LoadFormat, Settings, StoreSettings, TierUrl
from kvtier.engine.engine import IDLE_SECONDS
from kvtier.engine.request import FinishReason, Request, RequestStats
from kvtier.engine.sampler import SamplingParams
from kvtier.errors import MediumError, MediumFull
from kvtier.machine import resident_bytes
from kvtier.quantity import Seconds
from kvtier.testing.faults import Faulty, Slow, wrapped

OPEN_REQUESTS = 12
STUCK_SECONDS = 60.0
"""A request that has not ended by then never will."""
REPORT_SECONDS = 0.5
SETTLE_SECONDS = 60.0
ABORTED_SHARE = 0.15


@dataclass(frozen=True, slots=True)
class Plan:
    """What the worker is told in a file."""

    model: str
    tiers: tuple[str, ...]
    prompts: tuple[tuple[int, ...], ...]
    expected: tuple[tuple[int, ...], ...]
    """What each prompt gives without any cache."""
    seed: int
    aborts: bool
    hbm_blocks: int

    @classmethod
    def read(cls, path: Path) -> Plan:
        raw = json.loads(path.read_text(encoding="utf-8"))
        raw |= {name: tuple(map(tuple, raw[name])) for name in ("prompts", "expected")}
        return cls(**(raw | {"tiers": tuple(raw["tiers"])}))

    def engine(self, **more: object) -> EngineSettings:
        return EngineSettings(
            model=self.model,
            load_format=LoadFormat.DUMMY,
            hbm_blocks=self.hbm_blocks,
            max_num_seqs=8,
            max_num_batched_tokens=256,
            threads=1,
            **more,  # type: ignore[arg-type]  # fields by name
        )


@dataclass(slots=True)
class Report:
    """What has happened so far in this life."""

    answers: int = 0
    aborted: int = 0
    preemptions: int = 0
    stuck: int = 0
    wrong: list[str] = field(default_factory=list)
    flipped: int = 0


@dataclass(slots=True)
class _Open:
    prompt: int
    stats: RequestStats
    since: float
    tokens: list[int] = field(default_factory=list)
    abort_at: float | None = None


class Media:
    """Faults that can be switched on around each tier's medium, and the DRAM behind them."""

    def __init__(self) -> None:
        self.switches: dict[str, list[Faulty | Slow]] = {"full-disk": [], "slow-disk": [], "failing-redis": []}
        self.dram: SlotMedium | None = None

    def around(self, name: str, medium: Medium) -> Medium:
        if isinstance(medium, PersistentSlotMedium):
            full = Faulty("write", error=MediumFull("no space left on device"))
            return self._switched(self._switched(medium, "full-disk", full), "slow-disk", Slow(0.2, "read", "write"))
        if isinstance(medium, KeyMedium):
            failing = Faulty("read", "write", "probe", "ping", error=MediumError("the connection broke"))
            return self._switched(medium, "failing-redis", failing)
        assert isinstance(medium, SlotMedium), name
        self.dram = medium
        return medium

    def _switched(self, medium: Medium, switch: str, fault: Faulty | Slow) -> Medium:
        fault.active = False
        self.switches[switch].append(fault)
        return wrapped(medium, fault)

    def flip(self, dice: random.Random) -> None:
        """One bit of DRAM."""
        assert self.dram is not None, "the first tier is DRAM"
        view = self.dram.view(dice.randrange(self.dram.slots))
        assert view is not None, "DRAM is addressable"
        at = dice.randrange(self.dram.slot_bytes)
        view[at] ^= 1 << dice.randrange(8)


class Load:
    """Random requests, some of them aborted, and what became of them."""

    def __init__(self, plan: Plan, assembly: Assembly) -> None:
        self.report = Report()
        self._plan, self._engine = plan, assembly.engine
        self._dice = random.Random(plan.seed)  # noqa: S311 - chooses requests, guards nothing
        self._open: dict[str, _Open] = {}
        self._count = 0

    @property
    def open(self) -> int:
        return len(self._open)

    @property
    def oldest(self) -> float:
        """Seconds since the oldest open request came."""
        now = time.monotonic()
        return max((now - one.since for one in self._open.values()), default=0.0)

    def add(self) -> None:
        number = self._dice.randrange(len(self._plan.prompts))
        name, tokens = f"r{self._count}", len(self._plan.expected[number])
        self._count += 1
        sampling = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
        stats = self._engine.add_request(Request(name, self._plan.prompts[number], sampling))
        now = time.monotonic()
        doomed = self._plan.aborts and self._dice.random() < ABORTED_SHARE
        self._open[name] = _Open(number, stats, now, abort_at=now + self._dice.random() * 0.3 if doomed else None)

    def step(self) -> None:
        for output in self._engine.step():
            one = self._open.get(output.request_id)
            if one is None:
                continue
            one.tokens += output.tokens
            if output.finish is not None:
                del self._open[output.request_id]
                self._ended(one, output.finish)
        now = time.monotonic()
        for name, one in list(self._open.items()):
            if one.abort_at is not None and now > one.abort_at:
                one.abort_at = None
                self._engine.abort(name)
            elif now - one.since > STUCK_SECONDS:
                self.report.stuck += 1
                del self._open[name]
                self._engine.abort(name)
        if not self._engine.progressed:
            time.sleep(IDLE_SECONDS)

    def _ended(self, one: _Open, how: FinishReason) -> None:
        self.report.preemptions += one.stats.preemptions
        if how is FinishReason.ABORT:
            self.report.aborted += 1
            return
        self.report.answers += 1
        expected = self._plan.expected[one.prompt]
        if how is not FinishReason.LENGTH or tuple(one.tokens) != expected:
            self.report.wrong.append(
                f"prompt {one.prompt} ({one.stats.hbm_tokens} tokens from HBM, {one.stats.external_tokens} from below): "
                f"{how.value}, got {one.tokens}, expected {list(expected)}"
            )


def tell(assembly: Assembly, report: Report, **more: object) -> None:
    """One line of JSON."""
    assert assembly.store is not None
    hits = {name: int(assembly.metrics.value("kvtier_tier_hits_total", tier=name)) for name in assembly.store.health()}
    body = {
        "answers": report.answers,
        "aborted": report.aborted,
        "preemptions": report.preemptions,
        "stuck": report.stuck,
        "wrong": report.wrong,
        "flipped": report.flipped,
        "hits": hits,
        "resident": resident_bytes(),
        **more,
    }
    print(json.dumps(body), flush=True)


def left_over(assembly: Assembly) -> list[str]:
    """What is still held although nothing runs any more, and every disagreement of the books."""
    store, engine = assembly.store, assembly.engine
    assert store is not None
    found: list[str] = []
    if not engine.settle(SETTLE_SECONDS):
        found.append("the engine's saves did not end")
    if not store.drain(SETTLE_SECONDS):
        found.append("the store's transfers did not end")
    found += engine.check_integrity() + store.check_integrity()
    stats = store.stats()
    held = {name: stats[name] for name in ("matches", "leased", "arriving", "saving", "loading") if stats[name]}
    if held:
        found.append(f"still held: {held}")
    if engine.pool.referenced:
        found.append(f"{engine.pool.referenced} HBM slots are still referenced")
    if engine.cache_fault is not None:
        found.append(f"the cache took itself out of use: {engine.cache_fault}")
    return found


def _orders() -> queue.SimpleQueue[str]:
    orders: queue.SimpleQueue[str] = queue.SimpleQueue()

    def listen() -> None:
        for line in sys.stdin:
            orders.put(line.strip())
        orders.put("end")

    threading.Thread(target=listen, name="kvtier-orders", daemon=True).start()
    return orders


def main(argv: Sequence[str]) -> int:
    plan = Plan.read(Path(argv[0]))
    media = Media()
    tiers = tuple(TierUrl.parse(tier) for tier in plan.tiers)
    store = StoreSettings(
        deadline=Seconds(1.0), gate=GateMode.OFF
    )  # to a model as small as this no tier would be worth it
    settings = Settings(tiers=tiers, engine=plan.engine(), store=store)
    assembly = assemble(settings, around=media.around)
    load, orders = Load(plan, assembly), _orders()
    dice = random.Random(plan.seed + 1)  # noqa: S311 - chooses bits, guards nothing
    tell(assembly, load.report, ready=True)
    due, ending = time.monotonic() + REPORT_SECONDS, False
    while not ending or load.open:
        while not orders.empty():
            order, _, state = orders.get().partition(" ")
            if order == "end":
                ending = True
            elif order == "flip-dram":
                media.flip(dice)
                load.report.flipped += 1
            else:
                for fault in media.switches[order]:
                    fault.active = state == "on"
        while not ending and load.open < OPEN_REQUESTS:
            load.add()
        load.step()
        if time.monotonic() > due:
            tell(assembly, load.report, oldest=load.oldest)
            due = time.monotonic() + REPORT_SECONDS
    for switch in media.switches.values():
        for fault in switch:
            fault.active = False
    left = left_over(assembly)
    tell(assembly, load.report, left=left)
    assembly.close()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
