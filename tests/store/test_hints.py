"""What a request may ask of the store for its own blocks: what is kept, what is loaded, how long it waits, who goes first."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import pytest

from kvtier.abc.store import Hints, Reason
from kvtier.config import WriteMode
from kvtier.key import Span
from kvtier.testing.rig import SMALL_NVME
from kvtier.tier.pins import PIN_SHARE
from kvtier.tier.slot import SlotTier

from .builders import Bench, Told, chain, make_bench

HOUR = Hints(pin_seconds=3600)
NO_STORE = Hints(no_store=True)


def in_dram(bench: Bench, keys: Span) -> int:
    """Length of the prefix that DRAM has."""
    return len(bench.arena.pool.lookup(bench.store.geometry.addresses(keys)))


def in_nvme(bench: Bench, keys: Span) -> int:
    tier = bench.tiers[0]
    assert isinstance(tier, SlotTier)
    return len(tier.pool.lookup(bench.store.geometry.addresses(keys)))


def flood(bench: Bench, blocks: int, first: int = 100) -> None:
    """Save ``blocks`` single blocks that nobody asks for again."""
    for number in range(first, first + blocks):
        bench.save(chain(number, 1))


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (lambda: Hints(priority=101), "priority must be from -100 to 100, got 101"),
        (lambda: Hints(pin_seconds=-1), "pin_seconds must be from 0 to 604800"),
        (lambda: Hints(pin_seconds=math.nan), "pin_seconds"),
        (lambda: Hints(max_wait_ms=math.inf), "max_wait_ms"),
        (lambda: Hints(max_wait_ms=-0.5), "max_wait_ms"),
        (lambda: Hints(pin_seconds=1, no_store=True), "pin_seconds and no_store contradict"),
    ],
)
def test_a_hint_that_means_nothing_is_refused(wrong: Callable[[], Hints], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        wrong()


def test_what_is_not_to_be_stored_is_not_and_a_later_miss_says_why(tmp_path: Path) -> None:
    bench = make_bench(nvme=tmp_path / "n")
    keys = chain(1, 3)
    outcomes = bench.save(keys, NO_STORE).result(0)
    assert [outcome.done for outcome in outcomes] == [False] * 3
    assert outcomes[0].detail == "the request asked not to store it"
    assert bench.load(keys) == 0
    assert bench.store.explain("r")[0].reason is Reason.NO_STORE
    assert bench.metrics.value("kvtier_tier_saves_dropped_total", tier="dram", reason="no_store") == 3
    bench.save(keys)
    assert bench.load(keys) == 3


def test_what_is_there_stays_although_a_request_stores_nothing() -> None:
    bench = make_bench()
    bench.save(chain(1, 2))
    assert all(outcome.done for outcome in bench.save(chain(1, 2), NO_STORE).result(0))
    assert bench.load(chain(1, 2)) == 2
    assert bench.metrics.value("kvtier_tier_saves_dropped_total", tier="dram", reason="no_store") == 0


def test_who_will_not_wait_gets_what_dram_has(tmp_path: Path) -> None:
    bench = make_bench(nvme=tmp_path / "n")
    keys = chain(1, 4)
    bench.save(keys)
    bench.empty_dram()
    bench.load(keys.head(2))
    match = bench.store.match("r", keys, hints=Hints(max_wait_ms=0))
    assert not match.pending and match.hits == 2
    assert [block.reason for block in match.blocks[2:]] == [Reason.DEADLINE, Reason.BEHIND_A_MISS]
    assert not bench.turn(), "nothing was sent for"
    match.release()
    bench.idle()


def test_the_wait_of_a_request_is_bounded_by_what_it_said(tmp_path: Path) -> None:
    bench = make_bench(nvme=tmp_path / "n")
    keys = chain(1, 2)
    bench.save(keys)
    bench.empty_dram()
    patient, hurried = bench.store.match("patient", keys), bench.store.match("r", keys, hints=Hints(max_wait_ms=50))
    bench.clock.advance(0.049)
    assert hurried.pending and patient.pending
    bench.clock.advance(0.001)
    assert not hurried.pending and hurried.blocks[0].reason is Reason.DEADLINE
    assert patient.pending
    bench.turn()
    assert patient.hits == 2
    patient.release()


def test_a_long_wait_is_the_stores_own(tmp_path: Path) -> None:
    bench = make_bench(nvme=tmp_path / "n")
    bench.save(chain(1, 2))
    bench.empty_dram()
    match = bench.store.match("r", chain(1, 2), hints=Hints(max_wait_ms=600_000))
    bench.clock.advance(2.0)
    assert not match.pending and match.hits == 0


def test_waiting_in_line_for_room_is_bounded_as_well(tmp_path: Path) -> None:
    """The half of DRAM that leases may hold is taken: others wait in line, whose patience is longer than a read's."""
    bench = make_bench(8, nvme=tmp_path / "n")
    bench.save(chain(1, 4))
    bench.save(chain(2, 4))
    holder = bench.match(chain(2, 4), "holder")
    waiting = bench.store.match("r", chain(1, 4), hints=Hints(max_wait_ms=500))
    assert waiting.pending
    bench.clock.advance(0.4)
    assert waiting.pending
    bench.clock.advance(0.1)
    assert not waiting.pending
    waiting.release()
    holder.release()
    bench.idle()


# -- pins


def test_pinned_blocks_outlive_a_flood_until_their_time_is_up() -> None:
    bench = make_bench(16)
    keys = chain(1, 3)
    bench.save(keys, Hints(pin_seconds=60))
    flood(bench, 40)
    assert in_dram(bench, keys) == 3
    assert bench.store.stats()["pinned"] == {"dram": 3}
    assert bench.metrics.value("kvtier_tier_pinned_blocks", tier="dram") == 3
    bench.clock.advance(61)
    bench.store.keep()
    assert bench.store.stats()["pinned"] == {"dram": 0}
    flood(bench, 40)
    assert in_dram(bench, keys) == 0
    bench.idle()


def test_pins_take_their_share_of_a_tier_and_no_more() -> None:
    bench = make_bench(16)
    most = int(16 * PIN_SHARE)
    keys = chain(1, most + 3)
    bench.save(keys, HOUR)
    assert bench.metrics.value("kvtier_tier_pins_refused_total", tier="dram") == 3
    flood(bench, 40)
    assert in_dram(bench, keys) == most, "the head of the chain is what is pinned"
    assert bench.load(keys) == most
    bench.idle()


def test_pins_do_not_keep_a_request_from_half_of_dram(tmp_path: Path) -> None:
    bench = make_bench(16, nvme=tmp_path / "n", nvme_write=WriteMode.BACK)
    bench.save(chain(2, 8))
    assert bench.store.drain(0.0) or bench.turn()
    bench.save(chain(1, 4), HOUR)
    flood(bench, 30)
    assert in_dram(bench, chain(2, 8)) < 8
    match = bench.store.match("r", chain(2, 8))
    while match.pending:
        assert bench.turn(), "it waits for nothing"
    assert match.hits == 8
    assert in_dram(bench, chain(1, 4)) == 4
    match.release()
    bench.idle()


@pytest.mark.parametrize("through", ["dram", "nvme"])
def test_a_match_pins_what_is_there_already(tmp_path: Path, through: str) -> None:
    bench = make_bench(16, nvme=tmp_path / "n")
    keys = chain(1, 3)
    bench.save(keys)
    if through == "nvme":
        bench.empty_dram()
    bench.match(keys, hints=HOUR).release()
    flood(bench, 40)
    assert in_dram(bench, keys) == 3
    bench.idle()


def test_an_engine_that_has_the_blocks_itself_pins_them_below() -> None:
    bench = make_bench(16)
    keys = chain(1, 3)
    bench.save(keys)
    bench.match(keys, start=3, hints=HOUR).release()
    flood(bench, 40)
    assert in_dram(bench, keys) == 3


def test_a_block_that_is_just_being_saved_is_pinned_too() -> None:
    bench = make_bench(16)
    keys = chain(1, 2)
    first = bench.store.save(keys, bench.source(keys))
    second = bench.store.save(keys, bench.source(keys), hints=HOUR)
    bench.turn()
    assert all(outcome.done for outcome in [*first.result(0), *second.result(0)])
    flood(bench, 40)
    assert in_dram(bench, keys) == 2


def test_a_pin_goes_down_with_its_block(tmp_path: Path) -> None:
    bench = make_bench(8, nvme=tmp_path / "n", nvme_capacity=SMALL_NVME)
    tier = bench.tiers[0]
    assert isinstance(tier, SlotTier)
    keys = chain(1, 2)
    bench.save(keys, HOUR)
    assert in_nvme(bench, keys) == 2
    flood(bench, 2 * tier.pool.capacity)
    assert in_nvme(bench, keys) == 2
    assert bench.store.stats()["pinned"] == {"dram": 2, "nvme": 2}
    bench.clock.advance(3602)
    bench.store.keep()
    assert bench.store.stats()["pinned"] == {"dram": 0, "nvme": 0}
    flood(bench, 2 * tier.pool.capacity, first=1000)
    assert in_nvme(bench, keys) == in_dram(bench, keys) == 0
    bench.idle()


def test_what_is_dropped_or_cleared_is_pinned_no_more(tmp_path: Path) -> None:
    bench = make_bench(8, nvme=tmp_path / "n")
    bench.save(chain(1, 2), HOUR)
    bench.store.drop(chain(1, 2), Reason.CLEARED)
    bench.turn()
    assert bench.store.stats()["pinned"] == {"dram": 0, "nvme": 0}
    bench.idle()


def test_a_later_pin_lengthens_and_never_shortens() -> None:
    bench = make_bench(16)
    keys = chain(1, 1)
    bench.save(keys, Hints(pin_seconds=100))
    bench.match(keys, hints=Hints(pin_seconds=1)).release()
    bench.clock.advance(50)
    flood(bench, 40)
    assert in_dram(bench, keys) == 1, "a shorter pin leaves the longer one as it is"
    bench.match(keys, hints=Hints(pin_seconds=100)).release()
    bench.clock.advance(60)
    flood(bench, 40)
    assert in_dram(bench, keys) == 1


# -- priority


def test_the_priority_reaches_the_policy_of_every_tier_with_slots(tmp_path: Path) -> None:
    made: list[Told] = []

    def policy(capacity: int) -> Told:
        made.append(Told(capacity))
        return made[-1]

    bench = make_bench(16, nvme=tmp_path / "n", policy=policy)
    keys, ordinary = chain(1, 2), chain(2, 1)
    bench.save(keys, Hints(priority=7))
    bench.save(ordinary)
    for told in made:
        assert sorted(meta.priority for meta in told.told.values()) == [0, 7, 7]
    bench.empty_dram()
    made[0].told.clear()
    bench.match(keys, hints=Hints(priority=-3)).release()
    assert [meta.priority for meta in made[0].told.values()] == [-3, -3], "what comes up has that of who asked for it"
    bench.idle()
