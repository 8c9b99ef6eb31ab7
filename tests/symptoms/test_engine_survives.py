"""Clients that go, tiers that are full, broken, silent or mad: every request ends with the tokens of a run without cache."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from kvtier.abc.medium import Arrived, Iovec, Outcome, Status
from kvtier.connectors.bundled import BundledScheduler
from kvtier.engine.engine import Engine
from kvtier.engine.request import Request
from kvtier.key import Address
from kvtier.storage_backends.memory import MemoryMedium
from tests.engine.support import BLOCK, expected, greedy, prompt
from tests.support import until

from .engine import IDENTITY, TurnedEngine, connected
from .support import Tiers, dram

pytestmark = pytest.mark.usefixtures("one_thread")

PATIENCE = 0.2
"""The store's deadline, where a test lets something hang (seconds)."""
HANGS_SECONDS = 60.0
"""How long what hangs does so: much longer than a loaded machine takes for what does not wait for it."""


def alone(requests: Sequence[Request]) -> list[tuple[int, ...]]:
    return [continuations[0] for continuations in expected(requests).values()]


def served(engine: Engine, requests: Sequence[Request]) -> list[tuple[int, ...]]:
    return [each.tokens for each in engine.run(requests)]


def renamed(requests: Sequence[Request], round_: int) -> list[Request]:
    return [replace(each, id=f"{each.id} again {round_}") for each in requests]


# -- clients that go


def state_of(turned: TurnedEngine, name: str) -> str:
    """What a request that has come before the last step is at."""
    saving = any(each == name for each, _ in turned.engine._exchange._held)
    scheduler = turned.connector.scheduler
    assert isinstance(scheduler, BundledScheduler)
    match = scheduler._matches.get(name)
    for sequence in turned.engine.sequences():
        if sequence.id == name:
            if sequence.slots:
                return "decoding" if sequence.generated else "filling"
            if sequence.group.stats.preemptions:
                return "preempted"
            return "waiting for blocks" if match is not None and match.pending else "queued"
    return "saving" if saving else "finished"


STATES = ["just come", "queued", "waiting for blocks", "filling", "decoding", "preempted", "saving", "finished"]


@pytest.mark.parametrize("state", STATES)
def test_a_client_that_goes_takes_nothing_along(state: str, caplog: pytest.LogCaptureFixture) -> None:
    """In every state of its request; copies end in any order, also much later."""
    reached = [attempt for attempt in range(3) if goes_when(state, random.Random(attempt), caplog)]
    assert reached, f"no request was ever {state}"


def goes_when(state: str, rng: random.Random, caplog: pytest.LogCaptureFixture) -> bool:
    """Whether the client's request was ever in ``state``: there it goes, and the others are served as if it had not been."""
    seats = {"queued": 1, "preempted": 4}.get(state, 3)
    turned = TurnedEngine(shared=MemoryMedium(), blocks=20 if seats == 4 else 26, tokens=20, sequences=seats)
    requests = [greedy(f"r{number}", prompt(number, 26), tokens=12) for number in range(3)]
    want = alone(requests)
    assert turned.serve(requests) == want
    turned.forget_hbm()
    turned.bench.empty_dram()
    turned.ended.clear()
    victim = greedy("victim", prompt(0, 20) + prompt(8, 6 if state == "preempted" else 40), tokens=12)
    again = renamed(requests, 1)
    got: dict[str, tuple[int, ...]] = {each.id: () for each in again}
    place = 3 if seats != 3 else rng.randrange(1, 3)  # the last to come waits for a seat, or gives way
    for request in (*again[:place], victim, *again[place:]):
        turned.engine.add_request(request)
    steps, gone = 0, False
    while turned.engine.open_requests or not gone:
        now = state_of(turned, "victim") if steps else "just come"
        if now == state and not gone:
            turned.engine.abort("victim")
            turned.engine.abort("nobody")
            gone = True
        elif now == "finished":
            break
        for output in turned.engine.step():
            if output.request_id in got:
                got[output.request_id] += output.tokens
        for _ in range(rng.randrange(3)):
            turned.bench.hand.run_one(rng.randrange)
        assert turned.engine.check_integrity() == []
        assert turned.store.check_integrity() == []
        steps += 1
        assert steps < 2000
    for output in turned.run():
        if output.request_id in got:
            got[output.request_id] += output.tokens
    assert list(got.values()) == want
    turned.expect_idle()
    assert "not under way" not in caplog.text, "no copy was reported twice"
    assert turned.bench.arena.pool.referenced == 0
    return gone


# -- tiers that are full or broken


def test_dram_of_four_blocks_under_64_prompts() -> None:
    requests = [greedy(f"r{number}", prompt(number % 8, 8) + prompt(number, 20)) for number in range(64)]
    want = alone(requests)
    with Tiers(dram(4, IDENTITY), identity=IDENTITY) as tiers:
        engine, _ = connected(tiers.store, 64)
        assert served(engine, requests) == want
        assert engine.settle(5.0)
        assert tiers.count("saves_dropped", "dram", reason="no_room") > 0, "and it says so"
        engine.reset_prefix_cache()
        assert served(engine, renamed(requests, 1)) == want
        assert engine.settle(5.0)
        assert engine.cache_fault is None
        assert engine.check_integrity() == []
        assert engine.pool.referenced == 0
        tiers.expect_idle()


class Mad(MemoryMedium):
    """Works until it is told ``how`` to fail: from then on every call raises, hangs or answers garbage."""

    how: str = ""

    def __init__(self) -> None:
        super().__init__()
        self.free = threading.Event()

    def fails(self, garbage: Any) -> Any:
        if self.how == "raises":
            raise RuntimeError("out of luck")
        if self.how == "hangs":
            self.free.wait(HANGS_SECONDS)
            raise TimeoutError("it took too long")
        return garbage

    def probe(self, names: Sequence[Address]) -> int:
        return int(self.fails(10**12)) if self.how else super().probe(names)

    def read(self, names: Sequence[Address], into: Sequence[Iovec], arrived: Arrived | None = None) -> list[Outcome]:
        if not self.how:
            return super().read(names, into, arrived)
        for buffers in into:
            for buffer in buffers:
                buffer[:] = b"\xc3" * len(buffer)
        lies = [Outcome(Status.DONE, sum(map(len, buffers))) for buffers in into]
        if arrived is not None:
            lies = [arrived(index, outcome) for index, outcome in enumerate(lies)]
        answer: list[Outcome] = self.fails(lies)
        return answer

    def write(self, names: Sequence[Address], data: Sequence[Iovec]) -> list[Outcome]:
        if not self.how:
            return super().write(names, data)
        answer: list[Outcome] = self.fails([Outcome(Status.DONE, -1)] * (len(names) + 2))
        return answer

    def touch(self, names: Sequence[Address]) -> None:
        self.fails(None)

    def delete(self, names: Sequence[Address]) -> None:
        self.fails("?")

    def ping(self) -> None:
        self.fails(None)


@pytest.mark.parametrize("how", ["raises", "hangs", "garbage"])
def test_a_medium_whose_every_call_goes_wrong_costs_only_its_hits(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    mad = Mad()
    monkeypatch.setattr(MemoryMedium, "open", classmethod(lambda *_: mad))
    monkeypatch.setattr("kvtier.tier.lower.SILENT_SECONDS", PATIENCE)
    requests = [greedy(f"r{number}", prompt(number, 24)) for number in range(12)]
    want = alone(requests)
    with Tiers(dram(64, IDENTITY), "memory://?write=through", identity=IDENTITY, deadline=PATIENCE) as tiers:
        engine, _ = connected(tiers.store, 64)
        assert served(engine, requests) == want
        assert engine.settle(5.0)
        tiers.only_below()
        engine.reset_prefix_cache()
        mad.how = how
        began = time.monotonic()
        assert served(engine, renamed(requests, 1)) == want
        seconds = time.monotonic() - began
        assert engine.settle(5.0)
        print(f"{len(requests)} requests took {seconds:.2f} s while every call {how}")
        assert seconds < HANGS_SECONDS / 2
        if how != "garbage":
            assert tiers.store.health()["memory"].startswith("degraded: "), tiers.store.health()
        engine.reset_prefix_cache()
        assert served(engine, renamed(requests, 2)) == want
        assert engine.cache_fault is None
        mad.how = ""
        mad.free.set()
        until(lambda: tiers.store.health()["memory"] == "ok", HANGS_SECONDS, "it is used again")
        assert engine.settle(5.0)
        tiers.expect_idle()
        assert engine.check_integrity() == []


# -- waits


def test_a_load_that_is_never_answered_costs_its_deadline_and_no_more() -> None:
    """One read goes into a black hole; the same blocks are wanted by a second request, and come after all, too late."""
    shared = MemoryMedium()
    turned = TurnedEngine(shared=shared)
    ids = prompt(1, 6 * BLOCK + 1)
    (want,) = alone([greedy("a", ids)])
    assert turned.serve([greedy("a", ids)]) == [want]
    turned.forget_hbm()
    turned.bench.empty_dram()
    turned.bench.hand.stall(1)
    for name in ("first", "second"):
        turned.engine.add_request(greedy(name, ids))
    for _ in range(5):
        assert turned.engine.step() == [], "both wait"
        turned.bench.turn()
    turned.bench.clock.advance(2.1)
    got: dict[str, tuple[int, ...]] = {"first": (), "second": ()}
    for output in turned.run(turned.bench.turn):
        got[output.request_id] += output.tokens
    assert got == {"first": want, "second": want}
    assert turned.bench.store.stats()["matches"] == 0
    turned.bench.hand.release()
    turned.expect_idle()
    turned.forget_hbm()
    assert turned.serve([greedy("later", ids)]) == [want]
    assert turned.loads, "the late answer has been kept, or the blocks were saved again"
    turned.expect_idle()


def test_a_store_that_never_ends_holds_up_nobody_who_wants_its_blocks() -> None:
    """The copy of the first request is stuck; a second one with the same prompt computes at once, and the copy still lands."""
    turned = TurnedEngine()
    ids = prompt(1, 6 * BLOCK + 1)
    (want,) = alone([greedy("a", ids)])
    turned.bench.hand.stall(0)
    assert turned.serve([greedy("a", ids)], between=lambda: None) == [want]
    saving = turned.store.stats()["saving"]
    assert saving == turned.bench.arena.pool.writing == (len(ids) + len(want) - 1) // BLOCK
    turned.engine.reset_prefix_cache()
    assert turned.serve([greedy("b", ids)], between=lambda: None) == [want]
    assert turned.store.stats()["saving"] == turned.bench.arena.pool.writing == saving, "nothing is saved twice"
    turned.bench.hand.release()
    turned.expect_idle()
    turned.forget_hbm()
    assert turned.serve([greedy("c", ids)]) == [want]
    assert turned.loads
    turned.expect_idle()


def test_silence_below_is_bounded_in_real_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """With real threads and a real clock: the request is there within its deadline and what computing takes."""
    mad = Mad()
    monkeypatch.setattr(MemoryMedium, "open", classmethod(lambda *_: mad))
    request = greedy("a", prompt(1, 40))
    want = alone([request])
    with Tiers(dram(64, IDENTITY), "memory://?write=through", identity=IDENTITY, deadline=PATIENCE) as tiers:
        engine, _ = connected(tiers.store, 64)
        assert served(engine, [request]) == want
        assert engine.settle(5.0)
        tiers.only_below()
        engine.reset_prefix_cache()
        mad.how = "hangs"
        began = time.monotonic()
        assert served(engine, renamed([request], 1)) == want
        seconds = time.monotonic() - began
        mad.how = ""
        mad.free.set()
    assert PATIENCE * 0.9 < seconds < 40 * PATIENCE, "not a minute for each second of it, however loaded the machine is"
