"""The engine and its connector: what comes back, what fails, and what is owed, with the tokens of a run without any cache."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future

import pytest

from kvtier.abc.store import Hints
from kvtier.engine import exchange
from kvtier.engine.engine import MOST_GRACE_SECONDS, Engine
from kvtier.engine.request import FinishReason, Request
from kvtier.metrics import Metrics

from .support import (
    BLOCK,
    CONFIG,
    DictConnector,
    Faults,
    assert_idle,
    drain,
    expected,
    greedy,
    make_engine,
    prompt,
    tokens_of,
)

pytestmark = pytest.mark.usefixtures("one_thread")


def run_twice(
    faults: Faults, requests: Sequence[Request], blocks: int = 64, **limits: int
) -> tuple[Engine, DictConnector]:
    """Serve, empty HBM, serve again: the second round finds its blocks through the connector."""
    connector = DictConnector(faults)
    engine = make_engine(blocks, connector=connector, **limits)  # type: ignore[arg-type]
    want = expected(requests)
    for _ in range(2):
        assert tokens_of(engine, requests) == want
        assert_idle(engine, connector)
        engine.reset_prefix_cache()
    return engine, connector


def test_blocks_come_back_through_the_connector_layer_by_layer() -> None:
    connector = DictConnector()
    engine = make_engine(connector=connector)
    cold = engine.run([greedy("a", prompt(1, 21), tokens=6)])[0]
    assert_idle(engine, connector)
    assert engine.reset_prefix_cache() == 6
    warm = engine.run([greedy("b", prompt(1, 21), tokens=6)])[0]
    assert warm.tokens == cold.tokens
    assert (warm.stats.hbm_tokens, warm.stats.external_tokens, warm.stats.computed_tokens) == (0, 20, 1)
    assert connector.worker.layers_waited == list(range(CONFIG.layers))
    again = engine.run([greedy("c", prompt(1, 21), tokens=6)])[0]
    assert again.stats.hbm_tokens == 20, "what was loaded is in HBM now"


def test_what_comes_is_told_before_any_step() -> None:
    connector = DictConnector()
    engine = make_engine(connector=connector)
    engine.run([greedy("a", prompt(1, 13), tokens=1)])
    told = connector.scheduler.expected
    assert told == [("a", 3, 0)]
    engine.add_request(greedy("b", prompt(1, 21)))
    assert told[1:] == [("b", 5, 3)], "with what HBM has of it"
    engine.add_request(greedy("c", prompt(1, 13)))
    engine.add_request(greedy("d", prompt(2, 21), hints=Hints(no_load=True)))
    assert len(told) == 2, "not where there is nothing to ask for"
    drain(engine)
    assert_idle(engine, connector)


def test_a_step_waits_a_moment_for_what_is_known_of_a_request_that_has_come(monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[tuple[list[Future[None]], float]] = []
    monkeypatch.setattr(exchange, "wait", lambda *waited: waits.append(waited))
    connector = DictConnector()
    engine = make_engine(connector=connector)
    engine.run([greedy("a", prompt(1, 13), tokens=2)])
    assert not waits
    answer: Future[None] = Future()
    connector.scheduler.answer = answer
    engine.add_request(greedy("b", prompt(2, 21)))
    engine.step()
    engine.step()
    ((waited, seconds),) = waits
    assert waited == [answer] and 0 < seconds <= MOST_GRACE_SECONDS, "once, and by a share of the step before"
    drain(engine)
    assert_idle(engine, connector)


def test_the_engines_own_hit_is_never_loaded_over() -> None:
    connector = DictConnector()
    engine = make_engine(connector=connector)
    engine.run([greedy("long", prompt(1, 40))])
    engine.settle(5.0)
    engine.reset_prefix_cache()
    engine.run([greedy("head", prompt(1, 13), tokens=1)])
    loaded = connector.worker.loaded_blocks
    mixed = engine.run([greedy("mixed", prompt(1, 40))])[0]
    assert mixed.stats.hbm_tokens == 12 and mixed.stats.external_tokens == 24
    assert connector.worker.loaded_blocks - loaded == 6
    assert mixed.tokens == expected([greedy("mixed", prompt(1, 40))])["mixed"][0]


@pytest.mark.parametrize("share", [0.3, 1.0])
def test_failed_loads_are_computed_and_counted(share: float) -> None:
    requests = [greedy(f"r{i}", prompt(1, 9) + prompt(i, 17 + i)) for i in range(6)]
    run_twice(Faults(fail_loads=share, seed=4), requests)


@pytest.mark.parametrize("position", [0, 2, 5])
def test_a_failed_block_voids_itself_and_what_is_behind_it(position: int) -> None:
    connector = DictConnector()
    engine = make_engine(connector=connector)
    cold = engine.run([greedy("a", prompt(1, 25))])[0]
    engine.settle(5.0)
    engine.reset_prefix_cache()
    engine.add_request(greedy("b", prompt(1, 25)))

    def fail_one(layer: int) -> None:
        slot = connector.worker.loading[position][0]
        connector.worker.failed = frozenset({slot})
        arrives(layer)
        connector.worker._view(slot)[:] = bytes(len(connector.worker._view(slot)))

    arrives, connector.worker.wait_for_layer_load = connector.worker.wait_for_layer_load, fail_one  # type: ignore[method-assign]
    assert engine.step() == [], "no token comes of garbage"
    outputs = drain(engine)
    assert tuple(token for output in outputs for token in output.tokens) == cold.tokens
    stats = outputs[-1].stats
    assert stats.failed_tokens == (6 - position) * BLOCK
    assert stats.external_tokens == position * BLOCK
    assert stats.external_tokens + stats.computed_tokens == 25


def test_what_failed_to_load_and_was_computed_is_saved_again() -> None:
    connector = DictConnector()
    engine = make_engine(connector=connector)
    engine.run([greedy("a", prompt(1, 25), tokens=1)])
    engine.settle(5.0)
    engine.reset_prefix_cache()
    before = connector.worker.saved_blocks
    connector.faults.fail_loads = 1.0
    engine.run([greedy("b", prompt(1, 25), tokens=1)])
    assert_idle(engine, connector)
    assert connector.worker.saved_blocks - before == 6


def test_whoever_asks_later_lets_others_pass() -> None:
    connector = DictConnector(Faults(never_answer=1.0))
    engine = make_engine(connector=connector)
    engine.add_request(greedy("stuck", prompt(1, 20), tokens=2))
    engine.step()
    assert not engine.progressed
    connector.faults.never_answer = 0.0
    engine.add_request(greedy("free", prompt(2, 20), tokens=2))
    ended = [output.request_id for _ in range(3) for output in engine.step() if output.last]
    assert ended == ["free"]
    engine.abort("stuck")
    assert_idle(engine, connector)


def test_a_connector_that_never_answers_costs_a_bounded_wait() -> None:
    connector = DictConnector(Faults(never_answer=1.0))
    engine = make_engine(connector=connector, ask_seconds=0.02)
    requests = [greedy(f"r{i}", prompt(i, 20)) for i in range(3)]
    assert tokens_of(engine, requests) == expected(requests)
    assert_idle(engine, connector)


VERBS = [
    "expect",
    "get_num_new_matched_tokens",
    "update_state_after_alloc",
    "offer",
    "build_connector_meta",
    "request_finished",
    "start_load_kv",
    "wait_for_layer_load",
    "get_block_ids_with_load_errors",
    "save_kv_layer",
    "wait_for_save",
]


@pytest.mark.parametrize("verb", VERBS)
def test_a_connector_that_raises_is_left_alone_and_serving_goes_on(verb: str) -> None:
    requests = [greedy(f"r{i}", prompt(1, 9) + prompt(i, 20)) for i in range(4)]
    want = expected(requests)
    connector = DictConnector()
    engine = make_engine(connector=connector)
    assert tokens_of(engine, requests) == want
    engine.settle(5.0)
    engine.reset_prefix_cache()
    connector.faults.raise_in = verb
    assert tokens_of(engine, requests) == want
    assert engine.cache_fault is not None and "is broken" in engine.cache_fault
    assert engine.check_integrity() == []
    assert verb == "wait_for_save" or engine.settle(5.0), "only who may have begun to read slots still holds them"


@pytest.mark.parametrize("verb", ["wait_for_layer_load", "save_kv_layer"])
def test_a_load_has_ended_before_its_slots_are_anybodys_again(verb: str) -> None:
    """Another verb raises while it is under way. What still comes of it lands in slots that the next request has by then."""
    first, second = greedy("a", prompt(1, 24), tokens=2), greedy("b", prompt(2, 24), tokens=12)
    connector = DictConnector()
    engine = make_engine(9, connector=connector)
    engine.run([first])
    assert_idle(engine, connector)
    engine.reset_prefix_cache()
    connector.faults.raise_in = verb
    assert tokens_of(engine, [first]) == expected([first])
    assert engine.cache_fault is not None
    engine.reset_prefix_cache()
    engine.add_request(second)
    outputs = engine.step()
    connector.faults.raise_in = ""
    for layer in range(CONFIG.layers):
        connector.worker.wait_for_layer_load(layer)
    outputs += drain(engine)
    assert {"b": [tuple(token for output in outputs for token in output.tokens)]} == expected([second])


def test_saved_slots_are_held_until_the_copy_has_ended() -> None:
    """The copy reads its slots at its end: had they been reused, the second round would load other blocks' bytes."""
    requests = [greedy(f"r{i}", prompt(i, 30), tokens=10) for i in range(8)]
    _, connector = run_twice(Faults(save_ticks=40, save_cap=12, seed=5), requests, blocks=26, sequences=3)
    assert connector.worker.loaded_blocks > 0


def test_blocks_that_were_not_taken_are_offered_again() -> None:
    connector = DictConnector(Faults(save_cap=1))
    engine = make_engine(connector=connector)
    engine.run([greedy("a", prompt(1, 24), tokens=30)])
    assert_idle(engine, connector)
    assert connector.worker.saved_blocks == 13 and engine.saves_dropped == 0


def test_what_was_never_taken_is_counted() -> None:
    engine = make_engine(connector=DictConnector(Faults(save_cap=0)))
    engine.run([greedy("a", prompt(1, 24), tokens=2)])
    assert engine.saves_dropped == 6
    assert_idle(engine)


def test_preempted_sequences_find_their_blocks_again() -> None:
    requests = [greedy(f"r{i}", prompt(i, 24), tokens=20) for i in range(4)]
    connector = DictConnector()
    engine = make_engine(24, connector=connector, sequences=4)
    done = engine.run(requests)
    assert {each.request_id: [each.tokens] for each in done} == expected(requests)
    assert sum(each.stats.preemptions for each in done) > 0
    assert connector.worker.loaded_blocks > 0, "their slots had been given to others meanwhile"
    assert_idle(engine, connector)


def test_loads_that_fit_together_while_the_rest_of_their_prompts_does_not() -> None:
    """Two prompts each load most of the pool's half and then need more than what is left: one of them goes first."""
    connector = DictConnector()
    long = [prompt(i, 40 * BLOCK) for i in (1, 2)]
    warm = make_engine(128, connector=connector)
    warm.run([greedy(f"w{i}", ids[: 20 * BLOCK + 1], tokens=1) for i, ids in enumerate(long)])
    warm.settle(5.0)
    engine = make_engine(48, connector=connector, tokens=16)
    requests = [greedy(f"r{i}", ids, tokens=4) for i, ids in enumerate(long)]
    for request in requests:
        engine.add_request(request)
    steps, got = 0, dict[str, tuple[int, ...]]()
    while engine.open_requests:
        for output in engine.step():
            got[output.request_id] = (*got.get(output.request_id, ()), *output.tokens)
        steps += 1
        assert steps < 60, "no progress"
    assert {name: [tokens] for name, tokens in got.items()} == expected(requests)
    assert_idle(engine, connector)


def test_a_save_that_never_ends_fails_one_request_and_not_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    connector = DictConnector(Faults(save_cap=12))
    monkeypatch.setattr(connector.random, "randint", lambda low, high: 1 << 30)  # polls until a save ends
    engine = make_engine(14, connector=connector, ask_seconds=0.01, stall_seconds=0.02)
    engine.run([greedy("fills", prompt(1, 46), tokens=2)])
    done = engine.run([greedy("stuck", prompt(2, 46), tokens=2)])[0]
    assert done.finish is FinishReason.ERROR


@pytest.mark.parametrize("forgets", [True, False])
def test_wrong_blocks_are_computed_although_the_connector_gives_them_again(
    forgets: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests = [greedy(f"r{i}", prompt(1, 24) + prompt(i, 9 + i)) for i in range(4)]
    want = expected(requests)
    connector = DictConnector(Faults(wrong_loads=1.0))
    if not forgets:
        monkeypatch.setattr(connector.scheduler, "drop", lambda *_: None)
    metrics = Metrics()
    engine = make_engine(connector=connector, recompute_sample=1.0, metrics=metrics.engine)
    for _ in range(2):
        assert tokens_of(engine, requests) == want
        assert_idle(engine, connector)
        engine.reset_prefix_cache()
    assert metrics.value("kvtier_recheck_mismatches_total") == metrics.value("kvtier_rechecks_total") > 0
