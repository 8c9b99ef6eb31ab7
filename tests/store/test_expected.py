"""What shared tiers are asked before a request is matched, so that no step passes without it."""

from __future__ import annotations

import pytest

from kvtier.abc.store import Reason
from kvtier.errors import MediumError
from kvtier.storage_backends.memory import MemoryMedium
from kvtier.store import expected
from kvtier.testing.faults import Faulty, wrapped

from .builders import Bench, chain, make_bench


@pytest.fixture
def bench() -> Bench:
    """With one tier below DRAM, which others share."""
    return make_bench(shared=MemoryMedium())


def test_a_request_that_was_expected_is_answered_at_once(bench: Bench) -> None:
    keys = chain(1, 4)
    known = bench.store.expect("r", keys)
    assert known is not None and not known.done()
    assert bench.workers[1].run_one() and known.done(), "the tier is asked when the request comes"
    match = bench.store.match("r", keys)
    assert not match.pending and match.hits == 0
    assert match.blocks[0].reason is Reason.NEVER_STORED
    assert not bench.workers[1].run_one(), "and not again"


def test_what_is_there_is_read_without_another_question(bench: Bench) -> None:
    keys = chain(1, 4)
    bench.save(keys)
    bench.empty_dram()
    bench.store.expect("r", keys)
    assert bench.workers[1].run_one()
    match = bench.store.match("r", keys)
    assert match.pending
    bench.turn()
    assert not match.pending and match.hits == 4
    bench.store.forget("r")
    bench.idle()


def test_a_match_waits_for_an_answer_that_is_on_its_way(bench: Bench) -> None:
    keys = chain(1, 4)
    bench.store.expect("r", keys)
    match = bench.store.match("r", keys)
    assert match.pending
    assert bench.workers[1].run_one() and not match.pending
    assert not bench.workers[1].run_one()


def test_only_what_no_tier_of_our_own_has_is_asked_for(bench: Bench) -> None:
    keys = chain(1, 4)
    bench.save(keys)
    assert bench.store.expect("r", keys) is None and not bench.workers[1].run_one(), "DRAM has it all"
    bench.store.expect("s", chain(1, 6), 5)
    assert bench.workers[1].run_one()
    match = bench.store.match("s", chain(1, 6), 5)
    assert not match.pending and match.hits == 0


@pytest.mark.parametrize("other", ["later", "longer", "start"])
def test_an_answer_to_another_question_does_not_count(bench: Bench, other: str) -> None:
    keys = chain(1, 4)
    bench.store.expect("r", keys)
    assert bench.workers[1].run_one()
    if other == "later":
        bench.clock.advance(expected.KNOWN_SECONDS + 1)
    match = bench.store.match("r", chain(1, 5) if other == "longer" else keys, int(other == "start"))
    assert match.pending, "it asks by itself"
    assert bench.workers[1].run_one() and not match.pending


def test_requests_that_are_never_matched_leave_nothing(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    waiting = bench.store._promoter.expected
    monkeypatch.setattr(expected, "MOST_EXPECTED", 3)
    for number in range(5):
        bench.store.expect(f"r{number}", chain(number, 2))
        bench.store.expect(f"r{number}", chain(number, 2))
    assert len(waiting) == 3
    bench.turn()
    for number in range(5):
        bench.store.forget(f"r{number}")
    assert len(waiting) == 0
    bench.idle()


def test_a_tier_that_fails_when_it_is_asked_ahead_has_nothing() -> None:
    bench = make_bench(shared=wrapped(MemoryMedium(), Faulty("probe", error=MediumError("no"))))
    keys = chain(1, 4)
    bench.store.expect("r", keys)
    bench.turn()
    match = bench.store.match("r", keys)
    bench.turn()
    assert not match.pending and match.hits == 0
    bench.store.forget("r")
    bench.idle()
