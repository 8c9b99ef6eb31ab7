"""Whatever the cache gives, takes late or fails to give, a request's tokens are those of a run without any cache."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch

from kvtier.abc.store import NO_HINTS, Hints
from kvtier.engine.request import Request
from kvtier.engine.scheduler import Schedule
from kvtier.layout import CacheGroup, GroupKind, Layout
from kvtier.pool import Slot
from kvtier.storage_backends.memory import MemoryMedium
from tests.engine.support import BLOCK, expected, greedy, prompt

from .engine import BLOCK_BYTES, GEOMETRY, TurnedEngine

pytestmark = pytest.mark.usefixtures("one_thread")

SENTINEL = 0x5A


def alone(*requests: Request) -> list[tuple[int, ...]]:
    """What each gives without any cache."""
    return [continuations[0] for continuations in expected(requests).values()]


def hbm_bytes(turned: TurnedEngine) -> np.ndarray:
    """The engine's blocks as bytes, ``[slot, byte]``, not a copy."""
    return turned.engine._kv.view(turned.engine.pool.capacity, -1).view(torch.uint8).numpy()


# -- loads that fail


@pytest.mark.parametrize("position", [0, 2, 5], ids=["first", "middle", "last"])
@pytest.mark.parametrize("when", ["found", "copied"])
def test_a_failed_load_is_computed_and_never_served(when: str, position: int) -> None:
    """One of six blocks rots: below DRAM, where the match notices, or in DRAM, where only the copy into HBM does."""
    shared = MemoryMedium()
    turned = TurnedEngine(shared=shared)
    ids = prompt(1, 6 * BLOCK + 1)
    want = alone(greedy("a", ids))
    assert turned.serve([greedy("a", ids)]) == want
    turned.forget_hbm()
    rot(turned, shared if when == "found" else None, ids, position)
    again = greedy("b", ids)
    stats = turned.engine.add_request(again)
    outputs = turned.run()
    assert [tuple(token for output in outputs for token in output.tokens)] == want
    assert stats.external_tokens == position * BLOCK, "exactly what is before it has arrived"
    assert stats.failed_tokens == ((6 - position) * BLOCK if when == "copied" else 0)
    assert stats.external_tokens + stats.computed_tokens == stats.prompt_tokens
    turned.forget_hbm()
    healed = turned.engine.add_request(greedy("c", ids))
    outputs = turned.run()
    assert [tuple(token for output in outputs for token in output.tokens)] == want
    assert healed.external_tokens == 6 * BLOCK, "what was computed instead has been saved again"
    turned.expect_idle()


def rot(turned: TurnedEngine, shared: MemoryMedium | None, ids: tuple[int, ...], position: int) -> None:
    """Flip a bit of the exponent of a key in one block: in ``shared``, DRAM being empty, or in DRAM."""
    name = turned.addresses(ids)[position]
    if shared is not None:
        turned.bench.empty_dram()
        value = bytearray(shared.values[name])
        value[-1] ^= 0x40
        shared.values[name] = bytes(value)
        return
    slot = turned.bench.arena.pool.slot(name)
    assert slot is not None
    view = turned.bench.arena.medium.view(slot)
    assert view is not None
    view[BLOCK_BYTES - 1] ^= 0x40


# -- slots that others want


def test_a_preempted_request_saves_its_own_bytes_or_nothing() -> None:
    """No copy has run when it loses its slots; whatever then may be reused is overwritten; the copies run after that."""
    requests = [greedy(f"r{number}", prompt(number, 24), tokens=20) for number in range(4)]
    want = alone(*requests)
    turned = TurnedEngine(blocks=24, sequences=4)
    overwritten = 0

    def between() -> None:
        nonlocal overwritten
        if any(each.group.stats.preemptions for each in turned.engine.sequences()) or overwritten:
            turned.engine.reset_prefix_cache()
            free = np.flatnonzero([turned.engine.pool.references(slot) == 0 for slot in range(24)])  # type: ignore[arg-type]
            hbm_bytes(turned)[free] = SENTINEL
            overwritten += len(free)
            turned.bench.turn()

    assert turned.serve(requests, between) == want
    assert overwritten > 0, "somebody lost slots, and they were reused"
    turned.settle()
    arena = turned.bench.arena
    saved = [arena.pool.slot(entry) for entry in arena.pool.entries()]
    assert len(saved) > 10
    for slot in saved:
        assert slot is not None
        assert bytes(arena.view(slot)[:BLOCK_BYTES]) != bytes([SENTINEL]) * BLOCK_BYTES
    turned.forget_hbm()
    again = [greedy(f"again {each.id}", each.prompt, tokens=20) for each in requests]
    assert turned.serve(again) == want
    assert turned.loads, "and it is what was saved that gave them"
    turned.expect_idle()


@pytest.mark.parametrize("how", ["preempted", "its id used again"])
def test_blocks_that_are_offered_twice_are_held_until_both_saves_have_ended(how: str) -> None:
    """A pinned request offers what HBM has once more; the store need not copy that again, and so is done with it at once."""
    pinned = greedy("r", prompt(1, 24), tokens=3, hints=Hints(pin_seconds=60))
    turned = TurnedEngine(blocks=32)
    engine = turned.engine
    engine.add_request(pinned)
    engine.step()
    if how == "preempted":
        engine._scheduler._preempt(engine._scheduler.running[0], Schedule())
    turned.run(between=lambda: None)
    if how != "preempted":
        engine.add_request(pinned)
        turned.run(between=lambda: None)
    engine.step()
    assert len(turned.ended) >= 6 and turned.bench.hand.queued, "the second save has ended, and the first has not begun"
    assert engine.check_integrity() == []
    engine.reset_prefix_cache()
    hbm_bytes(turned)[[slot for slot in range(32) if engine.pool.references(Slot(slot)) == 0]] = SENTINEL
    turned.forget_hbm()
    assert turned.serve([replace(pinned, id="again")]) == alone(replace(pinned, hints=NO_HINTS))
    assert turned.loads, "and it is what was saved that gave them"
    turned.expect_idle()


# -- what the engine has, and what the store has


def test_a_load_touches_nothing_that_the_engine_has() -> None:
    """Every length that HBM may know of a prompt, against every length that the store may know of it."""
    ids = prompt(1, 2 * BLOCK + 3)
    want = alone(greedy("a", ids, tokens=3))
    for in_hbm, stored in product(range(2 * BLOCK + 1), repeat=2):
        turned = TurnedEngine()
        if stored:
            turned.serve([greedy("stores", ids[:stored], tokens=1)])
            turned.forget_hbm()
        if in_hbm:
            turned.serve([greedy("fills", ids[:in_hbm], tokens=1)], between=lambda: None)
        held = [slot for slot in map(turned.engine.pool.slot, turned.addresses(ids)) if slot is not None]
        assert len(held) == in_hbm // BLOCK
        before = hbm_bytes(turned)[held].copy()
        turned.loads.clear()
        stats = turned.engine.add_request(greedy("a", ids, tokens=3))
        outputs = turned.run()
        case = f"{in_hbm} tokens in HBM, {stored} in the store"
        assert [tuple(token for output in outputs for token in output.tokens)] == want, case
        assert np.array_equal(hbm_bytes(turned)[held], before), case
        loaded = [slot for load in turned.loads for slot in load.slots]
        assert not set(loaded) & set(held), case
        assert stats.hbm_tokens == len(held) * BLOCK, case
        assert stats.external_tokens == len(loaded) * BLOCK == max(0, stored // BLOCK - len(held)) * BLOCK, case
        assert stats.computed_tokens == len(ids) - stats.hbm_tokens - stats.external_tokens, case
        turned.expect_idle()


@pytest.mark.parametrize("blocks", [1, 2, 5])
@pytest.mark.parametrize("where", ["hbm", "store"])
def test_a_prompt_that_is_cached_whole_still_computes_its_last_token(where: str, blocks: int) -> None:
    turned = TurnedEngine()
    ids = prompt(1, blocks * BLOCK)
    want = alone(greedy("a", ids))
    assert turned.serve([greedy("a", ids)]) == want
    if where == "store":
        turned.forget_hbm()
        assert turned.bench.arena.pool.slot(turned.addresses(ids)[-1]) is not None, "all of it is there"
    stats = turned.engine.add_request(greedy("b", ids))
    outputs = turned.run()
    assert [tuple(token for output in outputs for token in output.tokens)] == want
    assert stats.cached_tokens == (blocks - 1) * BLOCK
    assert stats.computed_tokens == BLOCK
    turned.expect_idle()


def test_a_prompt_of_one_token_is_served() -> None:
    turned = TurnedEngine()
    want = alone(greedy("a", (7,)))
    assert turned.serve([greedy("a", (7,))]) == want
    turned.forget_hbm()
    assert turned.serve([greedy("b", (7,))]) == want
    turned.expect_idle()


def test_salts_of_requests_reach_the_store() -> None:
    """The engine's own cache honours the salt, and so does everything below it."""
    turned = TurnedEngine()
    ids = prompt(1, 4 * BLOCK + 1)
    turned.serve([greedy("stores", ids, salt="x")])
    turned.forget_hbm()
    scopes: dict[str, dict[str, Any]] = {
        "other": {"salt": "y"}, "empty": {"salt": ""}, "none": {}, "tenant": {"tenant": b"t"},
    }  # fmt: skip
    for name, scope in scopes.items():
        stats = turned.engine.add_request(greedy(name, ids, **scope))
        turned.run()
        assert stats.cached_tokens == 0, name
    turned.forget_hbm()
    stats = turned.engine.add_request(greedy("same", ids, salt="x"))
    turned.run()
    assert stats.external_tokens == 4 * BLOCK


OTHERS = {
    "another size": (replace(GEOMETRY, block_bytes=2 * BLOCK_BYTES), None, f"{BLOCK_BYTES} bytes"),
    "heads of half the size": (GEOMETRY, CacheGroup(GroupKind.MHA, 2, 4, 4, "fp32"), "not (2, 2, 4, 4, 4)"),
    "K and V in one axis": (GEOMETRY, CacheGroup(GroupKind.MLA, 2, 1, 32, "fp32"), "not (2, 1, 4, 1, 32)"),
    "another dtype of the same size": (GEOMETRY, CacheGroup(GroupKind.GQA, 2, 2, 16, "bf16"), "torch.float32, not"),
}
"""What the store is told of blocks, what the identity says of them where that is not what the engine has, and what is said."""


@pytest.mark.parametrize("other", OTHERS)
def test_an_engine_with_another_layout_than_the_store_is_left_uncached(
    other: str, caplog: pytest.LogCaptureFixture
) -> None:
    """As after an upgrade that packs blocks in another way: one clear line, and tokens that are right."""
    geometry, group, says = OTHERS[other]
    layout = None if group is None else Layout((group,), BLOCK)
    assert layout is None or layout.block_bytes == BLOCK_BYTES
    turned = TurnedEngine(geometry=geometry, layout=layout)
    request = greedy("a", prompt(1, 4 * BLOCK + 1))
    want = alone(request)
    for round_ in range(2):
        assert turned.serve([replace(request, id=f"round {round_}")]) == want
        turned.bench.turn()
        turned.engine.reset_prefix_cache()
    assert turned.bench.arena.pool.ready == 0
    assert not turned.loads
    (line,) = [record for record in caplog.records if record.levelname == "ERROR"]
    assert "going on without the tiers below HBM" in line.getMessage()
    assert turned.engine.cache_fault is not None
    assert says in turned.engine.cache_fault
    assert "another layout" in turned.engine.cache_fault
