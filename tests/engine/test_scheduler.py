"""Slots and queue under pressure: whatever happens, the tokens are those of a run without any cache."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtier.engine.engine import Engine
from kvtier.engine.request import Output, Request
from kvtier.engine.sampler import SamplingParams

from .support import (
    BLOCK,
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


@pytest.mark.timeout(400)  # seconds of computing, on a machine that may be loaded
@settings(max_examples=25)
@given(seed=st.integers(0, 10_000))
def test_anything_goes(seed: int) -> None:
    """Random prompts with shared heads, forks, aborts, a tiny pool and a connector that fails, is late and never answers."""
    rng = random.Random(seed)
    anything(rng, rng.choice([0.0, 0.5, 1.0]), wrong_loads=0.0)


@pytest.mark.timeout(400)  # seconds of computing, on a machine that may be loaded
@settings(max_examples=25)
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
