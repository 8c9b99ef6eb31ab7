"""Slots, queue and connector under pressure: whatever happens, the tokens are those of a run without any cache."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtier.engine.engine import Engine
from kvtier.engine.request import FinishReason, Output, Request
from kvtier.engine.sampler import SamplingParams
from kvtier.metrics import Metrics

from .support import BLOCK, CONFIG, DictConnector, Faults, expected, greedy, make_engine, prompt

pytestmark = pytest.mark.usefixtures("one_thread")


def assert_idle(engine: Engine, connector: DictConnector | None = None) -> None:
    assert engine.settle(5.0)
    assert engine.check_integrity() == []
    spare = int(engine.config.recompute_sample > 0)
    assert (engine.pool.referenced, engine.pool.writing, engine.pool.retiring) == (spare, spare, 0)
    if connector is not None:
        assert connector.idle() == []


def tokens_of(engine: Engine, requests: Sequence[Request]) -> dict[str, list[tuple[int, ...]]]:
    answers: dict[str, list[tuple[int, ...]]] = {request.id: [] for request in requests}
    for completion in engine.run(requests):
        answers[completion.request_id].append(completion.tokens)
    return answers


# -- the prefix cache in HBM


def test_a_repeated_prompt_is_found_in_hbm_up_to_its_last_token() -> None:
    engine = make_engine()
    cold = engine.run([greedy("cold", prompt(1, 4 * BLOCK))])[0]
    warm = engine.run([greedy("warm", prompt(1, 4 * BLOCK))])[0]
    assert cold.stats.computed_tokens == 16 and cold.stats.cached_tokens == 0
    assert warm.stats.hbm_tokens == 3 * BLOCK, "the block of the last token is computed"
    assert warm.stats.hbm_tokens + warm.stats.computed_tokens == warm.stats.prompt_tokens
    assert warm.tokens == cold.tokens
    assert_idle(engine)


@pytest.mark.parametrize("length", [1, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK, 2 * BLOCK + 1])
def test_every_length_around_a_block_boundary(length: int) -> None:
    request = greedy("a", prompt(2, length))
    engine = make_engine()
    first, second = tokens_of(engine, [request]), tokens_of(engine, [request])
    assert first == second == expected([request])


def test_generated_blocks_are_found_again_by_the_next_turn() -> None:
    engine = make_engine()
    turn = engine.run([greedy("one", prompt(3, 10), tokens=11)])[0]
    follow = (*prompt(3, 10), *turn.tokens, *prompt(4, 5))
    again = engine.run([greedy("two", follow)])[0]
    assert again.stats.hbm_tokens == 20, "10 prompt and 10 generated tokens with KV, of which 20 fill blocks"
    assert again.tokens == expected([greedy("two", follow)])["two"][0]


@pytest.mark.parametrize(
    ("first", "second", "shared"),
    [
        ({}, {}, True),
        ({"salt": "a"}, {"salt": "a"}, True),
        ({"salt": "a"}, {"salt": "b"}, False),
        ({}, {"salt": ""}, False),
        ({"tenant": b"x"}, {"tenant": b"y"}, False),
    ],
)
def test_salt_and_tenant_separate_equal_prompts(first: dict[str, Any], second: dict[str, Any], shared: bool) -> None:
    engine = make_engine()
    engine.run([greedy("a", prompt(5, 20), **first)])
    assert (engine.run([greedy("b", prompt(5, 20), **second)])[0].stats.hbm_tokens > 0) == shared


def test_without_prefix_cache_nothing_is_found_and_nothing_stays() -> None:
    engine = make_engine(prefix_cache=False)
    for name in ("a", "b"):
        assert engine.run([greedy(name, prompt(6, 20))])[0].stats.cached_tokens == 0
    assert engine.pool.ready == 0
    assert_idle(engine)


def test_reset_drops_what_nobody_holds() -> None:
    engine = make_engine()
    engine.run([greedy("a", prompt(7, 20))])
    engine.add_request(greedy("b", prompt(7, 20), tokens=4))
    engine.step()
    held = engine.pool.referenced
    assert engine.reset_prefix_cache() > 0
    assert engine.pool.ready <= held
    engine.settle(5.0)
    engine.reset_prefix_cache()
    assert engine.pool.free == engine.pool.capacity
    assert_idle(engine)


# -- batching, chunks, preemption


@pytest.mark.parametrize("budget", [3, 7, 16, 64])
def test_chunked_prefill_changes_nothing(budget: int) -> None:
    requests = [greedy(f"r{i}", prompt(i, 5 + 9 * i)) for i in range(5)]
    engine = make_engine(128, tokens=budget, sequences=4)
    assert tokens_of(engine, requests) == expected(requests)
    assert_idle(engine)


def test_decodes_come_before_prompts_in_a_step() -> None:
    engine = make_engine(tokens=8)
    engine.add_request(greedy("short", prompt(1, 4), tokens=20))
    engine.step()
    engine.add_request(greedy("long", prompt(2, 60), tokens=2))
    for _ in range(5):
        assert "short" in {output.request_id for output in engine.step()}, "a long prompt must not stop a decode"


def test_when_slots_run_out_the_last_to_arrive_gives_way_and_comes_back() -> None:
    requests = [greedy(f"r{i}", prompt(i, 20), tokens=24) for i in range(4)]
    engine = make_engine(20, sequences=4)
    done = engine.run(requests)
    assert {each.request_id: [each.tokens] for each in done} == expected(requests)
    by_id = {each.request_id: each.stats for each in done}
    assert by_id["r0"].preemptions == 0, "who came first is never preempted"
    assert sum(stats.preemptions for stats in by_id.values()) > 0
    assert_idle(engine)


def test_at_most_one_partly_filled_block_per_sequence() -> None:
    """Slots that a sequence holds are those that its tokens need: waste is bounded by one block each."""
    engine = make_engine(60, tokens=13, sequences=6)
    for i in range(6):
        engine.add_request(greedy(f"r{i}", prompt(i, 3 + 7 * i), tokens=9))
    engine.add_request(Request("fork", prompt(9, 18), SamplingParams(temperature=1.0, max_tokens=9, n=4, seed=1)))
    while engine.open_requests:
        engine.step()
        for sequence in engine.sequences():
            assert len(sequence.slots) == -(-sequence.computed // BLOCK)


def test_longest_prefix_first_starts_who_has_most_in_hbm() -> None:
    engine = make_engine(longest_prefix_first=True, sequences=1)
    engine.run([greedy("seed", prompt(1, 40))])
    first: list[str] = []
    for name, ids in (("none", prompt(2, 40)), ("some", prompt(1, 12) + prompt(3, 20)), ("most", prompt(1, 40))):
        engine.add_request(greedy(name, ids, tokens=2))
    while engine.open_requests:
        first += [output.request_id for output in engine.step() if output.request_id not in first]
    assert first == ["most", "some", "none"]


# -- forks


def test_forks_share_full_blocks_and_copy_the_partly_filled_one() -> None:
    engine = make_engine(64, sequences=8)
    stats = engine.add_request(
        Request(
            "f", prompt(1, 5 * BLOCK + 2), SamplingParams(temperature=1.0, max_tokens=3, n=8, seed=3, ignore_eos=True)
        )
    )
    engine.step()
    assert engine.pool.referenced == 6, "eight continuations on the prompt's six blocks"
    engine.step()
    assert engine.pool.referenced == 5 + 8, "five shared, and one last block each"
    engine.settle(5.0)
    assert stats.completion_tokens == 24
    assert_idle(engine)


def test_each_fork_is_what_its_seed_gives_alone() -> None:
    sampling = SamplingParams(temperature=0.9, max_tokens=6, n=4, seed=11, ignore_eos=True)
    request = Request("f", prompt(2, 2 * BLOCK + 2), sampling)
    forks = [each.tokens for each in make_engine().run([request])]
    assert forks == expected([request])["f"]
    assert len(set(forks)) > 1
    tight = make_engine(9, sequences=4)
    assert [each.tokens for each in tight.run([request])] == forks, "and preemption draws nothing anew"
    assert_idle(tight)


# -- the connector


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


def drain(engine: Engine) -> list[Output]:
    outputs: list[Output] = []
    while engine.open_requests:
        outputs += engine.step()
    return outputs


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


# -- rechecks


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


# -- aborts in every state


@pytest.mark.parametrize("after", range(9))
def test_abort_in_every_state(after: int) -> None:
    """Queued, asking, filling, decoding, preempted, saving or finished: nothing is left, and the others do not notice."""
    requests = [greedy(f"r{i}", prompt(i, 26), tokens=8) for i in range(3)]
    want = expected(requests)
    connector = DictConnector(Faults(ask_later=2, save_ticks=6, save_cap=8, seed=after))
    engine = make_engine(22, connector=connector, tokens=10, sequences=3)
    victim = greedy("victim", prompt(0, 20) + prompt(8, 12), tokens=8)
    for request in (requests[0], victim, *requests[1:]):
        engine.add_request(request)
    outputs: list[Output] = []
    for _ in range(after):
        outputs += engine.step()
    engine.abort("victim")
    engine.abort("nobody")
    outputs += drain(engine)
    for request in requests:
        assert tuple(t for o in outputs if o.request_id == request.id for t in o.tokens) == want[request.id][0]
    assert sum(output.last for output in outputs) == 4
    assert_idle(engine, connector)


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 10_000))
def test_anything_goes(seed: int) -> None:
    """Random prompts with shared heads, forks, aborts, a tiny pool and a connector that fails, is late and never answers."""
    rng = random.Random(seed)
    anything(rng, rng.choice([0.0, 0.5, 1.0]), wrong_loads=0.0)


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 10_000))
def test_wrong_blocks_amid_anything(seed: int) -> None:
    """The same where a connector gives wrong blocks: rechecks drop chains under running sequences, and all accounts hold."""
    rng = random.Random(seed)
    anything(rng, rng.choice([0.5, 1.0]), wrong_loads=rng.choice([0.1, 0.5, 1.0]))


def anything(rng: random.Random, recompute_sample: float, wrong_loads: float) -> None:
    requests = []
    for number in range(rng.randint(2, 9)):
        ids = prompt(1, 40)[: rng.randint(0, 40)] + prompt(number, rng.randint(1, 30))
        if rng.random() < 0.2:
            sampling = SamplingParams(temperature=1.0, max_tokens=rng.randint(1, 9), n=3, seed=number, ignore_eos=True)
            requests.append(Request(f"r{number}", ids, sampling))
        else:
            requests.append(greedy(f"r{number}", ids, tokens=rng.randint(1, 14)))
    want = expected(requests)
    faults = Faults(
        seed=rng.randrange(10_000),
        wrong_loads=wrong_loads,
        fail_loads=rng.choice([0.0, 0.2, 1.0]),
        ask_later=rng.choice([0, 3]),
        never_answer=rng.choice([0.0, 0.2]),
        save_ticks=rng.choice([0, 5, 30]),
        save_cap=rng.choice([1, 6, 10]),
    )
    connector = DictConnector(faults)
    engine = make_engine(
        rng.choice([32, 48]),
        connector=connector,
        tokens=rng.choice([5, 24, 80]),
        sequences=4,
        ask_seconds=0.01,
        recompute_sample=recompute_sample,
    )
    for _ in range(2):
        fuzz_round(engine, requests, want if not wrong_loads else None, rng)
        assert_idle(engine, connector)
        if rng.random() < 0.5:
            engine.reset_prefix_cache()
    assert engine.cache_fault is None


def fuzz_round(
    engine: Engine, requests: Sequence[Request], want: dict[str, list[tuple[int, ...]]] | None, rng: random.Random
) -> None:
    """``want`` is None where not every wrong block is found."""
    arriving = list(requests)
    rng.shuffle(arriving)
    aborted: set[str] = set()
    got: dict[tuple[str, int], tuple[int, ...]] = {}
    ends: dict[str, int] = {}
    while arriving or engine.open_requests:
        if arriving and rng.random() < 0.4:
            engine.add_request(arriving.pop())
        if rng.random() < 0.05:
            name = rng.choice(requests).id
            if name not in ends and all(request.id != name for request in arriving):
                aborted.add(name)
            engine.abort(name) if name in aborted else None
        for output in engine.step():
            key = (output.request_id, output.index)
            got[key] = (*got.get(key, ()), *output.tokens)
            ends[output.request_id] = ends.get(output.request_id, 0) + output.last
        assert engine.check_integrity() == []
    assert all(count == 1 for count in ends.values()) and len(ends) == len(requests)
    for request in requests:
        for index, tokens in enumerate(want[request.id] if want else ()):
            mine = got.get((request.id, index), ())
            assert mine == (tokens[: len(mine)] if request.id in aborted else tokens), request.id
