"""A sequence that gives way: its blocks are demoted or computed again, whichever is cheaper, and its tokens are the same."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvtier.abc.store import Hints, Reason
from kvtier.config import Preemption
from kvtier.cost import DRAM, KEPT, FittedGate
from kvtier.engine.request import Completion, Request
from kvtier.engine.scheduler import Schedule
from kvtier.engine.sequence import Sequence
from kvtier.metrics import Metrics
from kvtier.testing.hand import ManualClock
from tests.store.builders import make_bench
from tests.symptoms.engine import GEOMETRY, connected

from .support import BLOCK, DictConnector, Faults, expected, greedy, make_engine, prompt

pytestmark = pytest.mark.usefixtures("one_thread")

REQUESTS = [greedy(f"r{i}", prompt(i, 24), tokens=20) for i in range(4)]
"""Four that fit into `BLOCKS` at first, and not with all that they generate."""
BLOCKS = 28


class Judge(DictConnector):
    """A connector that says what a test says of giving way, and remembers what it was asked."""

    def __init__(self, answer: bool, faults: Faults | None = None) -> None:
        super().__init__(faults or Faults())
        self.asked: list[tuple[int, int]] = []

        def demotes(blocks: int, unsaved: int) -> bool:
            self.asked.append((blocks, unsaved))
            return answer

        self.scheduler.demotes = demotes  # type: ignore[method-assign]


def served(done: list[Completion], requests: list[Request] = REQUESTS) -> list[Completion]:
    """The completions, whose tokens are right and of which some had to give way."""
    assert {each.request_id: [each.tokens] for each in done} == expected(requests)
    assert any(each.stats.preemptions for each in done)
    return done


@pytest.mark.parametrize("answer", [True, False])
def test_what_is_cheaper_is_asked_and_done_and_counted(answer: bool) -> None:
    metrics, connector = Metrics(), Judge(answer)
    engine = make_engine(BLOCKS, connector=connector, sequences=4, metrics=metrics.engine)
    done = served(engine.run(REQUESTS))
    assert connector.asked and all(0 <= unsaved <= blocks for blocks, unsaved in connector.asked)
    assert len(connector.asked) == sum(each.stats.preemptions for each in done)
    demoted = sum(each.stats.demoted_tokens for each in done)
    assert (demoted > 0) == answer
    assert metrics.value("kvtier_preempted_tokens_total", fate="demoted") == demoted
    assert metrics.value("kvtier_preempted_tokens_total", fate="freed") > 0, "its last, partly filled block at least"
    assert engine.settle(5.0) and engine.check_integrity() == [] and connector.idle() == []


@pytest.mark.parametrize("answer", [True, False])
def test_blocks_that_nobody_took_yet_are_offered_when_their_sequence_is_demoted(answer: bool) -> None:
    """One block may be saved at a time, so that whoever gives way has blocks that nobody took."""
    connector = Judge(answer, Faults(save_cap=1))
    engine = make_engine(BLOCKS, connector=connector, sequences=4)
    preempt, taken = engine._scheduler._preempt, []

    def noted(victim: Sequence, step: Schedule) -> None:
        before = victim.offered
        preempt(victim, step)
        taken.append(victim.offered - before)

    engine._scheduler._preempt = noted  # type: ignore[method-assign]
    served(engine.run(REQUESTS))
    assert any(unsaved for _, unsaved in connector.asked)
    assert any(taken) == answer
    assert engine.settle(5.0) and engine.check_integrity() == []


@pytest.mark.parametrize("mode", [Preemption.RECOMPUTE, Preemption.DEMOTE])
def test_either_can_be_ordered(mode: Preemption) -> None:
    connector = Judge(mode is Preemption.RECOMPUTE)
    engine = make_engine(BLOCKS, connector=connector, sequences=4, preemption=mode)
    done = served(engine.run(REQUESTS))
    assert connector.asked == []
    demoted = sum(each.stats.demoted_tokens for each in done)
    if mode is Preemption.RECOMPUTE:
        assert demoted == connector.worker.loaded_blocks == 0
    else:
        assert demoted > 0 and connector.worker.loaded_blocks > 0
    assert engine.settle(5.0) and engine.check_integrity() == [] and connector.idle() == []


def test_who_stores_nothing_is_demoted_by_no_order() -> None:
    requests = [replace(request, hints=Hints(no_store=True)) for request in REQUESTS]
    connector = Judge(answer=True)
    engine = make_engine(BLOCKS, connector=connector, sequences=4, preemption=Preemption.DEMOTE)
    done = served(engine.run(requests), requests)
    assert sum(each.stats.demoted_tokens for each in done) == 0, "what nobody keeps is freed, and counted so"
    assert engine.settle(5.0) and engine.check_integrity() == []


@pytest.mark.parametrize("slow", [False, True])
def test_the_gate_of_a_store_decides_it(slow: bool) -> None:
    gate = FittedGate()
    for tokens in (BLOCK, 16 * BLOCK):
        for _ in range(KEPT):
            gate.observe_prefill(tokens, 0.001 * tokens)
            gate.observe_load(DRAM, tokens * GEOMETRY.block_bytes // BLOCK, (10.0 if slow else 1e-5) * tokens)
    bench = make_bench(64, geometry=GEOMETRY, gate=gate)
    engine, _ = connected(bench.store, BLOCKS, sequences=4)
    for request in REQUESTS:
        engine.add_request(request)
    got: dict[str, tuple[int, ...]] = {request.id: () for request in REQUESTS}
    stats = {}
    worker = engine._exchange._connector.worker  # type: ignore[union-attr]
    start = worker.start_load_kv

    def start_load_kv(plan: object) -> None:
        start(plan)  # type: ignore[arg-type]
        bench.turn()

    worker.start_load_kv = start_load_kv  # type: ignore[method-assign]
    while engine.open_requests:
        for output in engine.step():
            got[output.request_id] += output.tokens
            stats[output.request_id] = output.stats
        bench.turn()
    assert {name: [tokens] for name, tokens in got.items()} == expected(REQUESTS)
    assert any(each.preemptions for each in stats.values())
    assert (sum(each.demoted_tokens for each in stats.values()) > 0) != slow
    reasons = {block.reason for request in REQUESTS for block in bench.store.explain(request.id)}
    assert (Reason.BELOW_BREAK_EVEN in reasons) == slow
    assert engine.settle(5.0) and engine.check_integrity() == []
    bench.idle()


# -- longest prefix first


def test_whoever_shares_a_prefix_with_what_is_being_computed_goes_before_who_shares_less() -> None:
    engine = make_engine(longest_prefix_first=True, sequences=2, tokens=8)
    engine.add_request(greedy("running", prompt(1, 60), tokens=2))
    engine.step()
    assert engine.pool.ready == 2, "most of its prompt is still to be computed"
    engine.add_request(greedy("stranger", prompt(2, 40), tokens=2))
    engine.add_request(greedy("little", prompt(1, 12) + prompt(3, 28), tokens=2))
    engine.add_request(greedy("much", prompt(1, 48) + prompt(4, 4), tokens=2))
    order: list[str] = []
    while engine.open_requests:
        engine.step()
        order += [each.id for each in engine._scheduler.running if each.id not in order]
    assert order == ["running", "much", "little", "stranger"]


def test_nobody_starves_behind_ever_new_requests_that_share_more() -> None:
    """One seat, and always someone newer with a longer shared prefix: the stranger waits for its patience and no longer."""
    clock = ManualClock()
    engine = make_engine(longest_prefix_first=True, sequences=1, clock=clock)
    engine.run([greedy("seed", prompt(1, 40), tokens=2)])
    engine.add_request(greedy("stranger", prompt(2, 40), tokens=2))
    began = clock()
    for number in range(200):
        engine.add_request(greedy(f"sharer {number}", prompt(1, 40), tokens=2))
        if "stranger" in {output.request_id for output in engine.step()}:
            break
        clock.advance(0.5)
    assert 5.0 <= clock() - began < 8.0
    engine.abort_all()
    assert engine.settle(5.0)


def test_in_order_of_arrival_unless_it_is_asked_for() -> None:
    engine = make_engine(sequences=1)
    engine.run([greedy("seed", prompt(1, 40), tokens=2)])
    for name, ids in (("stranger", prompt(2, 40)), ("sharer", prompt(1, 40))):
        engine.add_request(greedy(name, ids, tokens=2))
    assert {output.request_id for output in engine.step()} == {"stranger"}
    engine.abort_all()
    assert engine.settle(5.0)
