"""Greedy and seeded choice, and that nobody's neighbours matter."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import pytest
import torch

from kvtier.engine.sampler import Draw, SamplingParams, continuation_seed, logprobs, sample
from kvtier.errors import RequestError

GREEDY = SamplingParams(temperature=0.0)


def rows(count: int, vocab: int = 50, seed: int = 3) -> torch.Tensor:
    return torch.empty(count, vocab).normal_(0.0, 2.0, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -0.1),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("top_p", 0.0),
        ("top_p", 1.5),
        ("top_k", -1),
        ("seed", 1 << 64),
        ("max_tokens", 0),
        ("min_tokens", 17),
        ("stop", ("",)),
        ("stop", ("x",) * 17),
        ("n", 0),
        ("n", 1000),
        ("logprobs", 21),
    ],
)
def test_bad_values_are_refused_by_name(field: str, value: Any) -> None:
    with pytest.raises(RequestError, match=field):
        SamplingParams(**{field: value})


def test_greedy_takes_the_best_and_leaves_logits_alone() -> None:
    logits = rows(4)
    before = logits.clone()
    assert sample(logits, [Draw(GREEDY)] * 4) == logits.argmax(-1).tolist()
    assert torch.equal(logits, before)


def test_a_choice_depends_on_own_logits_seed_and_step_alone() -> None:
    logits = rows(6)
    params = SamplingParams(temperature=0.8, top_p=0.9)
    draws = [Draw(params, seed=11, step=5), Draw(GREEDY), *(Draw(params, seed=i, step=i) for i in range(4))]
    together = sample(logits, draws)
    alone = [sample(logits[i : i + 1].clone(), [draw])[0] for i, draw in enumerate(draws)]
    backwards = sample(logits.flip(0), draws[::-1])[::-1]
    assert together == alone == backwards


def test_seeds_and_steps_draw_different_tokens() -> None:
    logits = rows(1)
    params = SamplingParams(temperature=1.5)
    by_seed = {sample(logits, [Draw(params, seed=s)])[0] for s in range(50)}
    by_step = {sample(logits, [Draw(params, seed=0, step=s)])[0] for s in range(50)}
    assert len(by_seed) > 5
    assert len(by_step) > 5


def test_frequencies_follow_the_softmax_at_the_temperature() -> None:
    logits = torch.tensor([[2.0, 1.0, 0.0, -1.0]])
    params = SamplingParams(temperature=2.0)
    counts = Counter(sample(logits, [Draw(params, seed=7, step=s)])[0] for s in range(4000))
    expected = torch.softmax(logits[0] / 2.0, -1).tolist()
    for token, share in enumerate(expected):
        assert counts[token] / 4000 == pytest.approx(share, abs=0.03)


@pytest.mark.parametrize(
    ("params", "allowed"),
    [
        (SamplingParams(temperature=5.0, top_k=2), {0, 1}),
        (SamplingParams(temperature=1.0, top_p=0.5), {0}),
        (SamplingParams(temperature=1.0, top_p=0.7), {0, 1}),
        (SamplingParams(temperature=1e-6), {0}),
        (SamplingParams(temperature=3.0, top_k=50), {0, 1, 2, 3}),
    ],
)
def test_top_k_and_top_p_keep_the_best_tokens(params: SamplingParams, allowed: set[int]) -> None:
    logits = torch.tensor([[2.0, 1.0, 0.0, -1.0]])
    seen = {sample(logits, [Draw(params, seed=s)])[0] for s in range(300)}
    assert seen == allowed


def test_continuations_have_seeds_of_their_own_and_the_first_keeps_the_requests() -> None:
    seeds = [continuation_seed(-5, i) for i in range(100)]
    assert seeds[0] == -5
    assert len(set(seeds)) == 100
    assert all(-(1 << 63) <= s < 1 << 63 for s in seeds)


def test_logprobs_give_the_chosen_and_the_best_in_order() -> None:
    logits = rows(2)
    chosen = [3, int(logits[1].argmax())]
    for row, token, (own, best) in zip(logits, chosen, logprobs(logits, chosen, 4), strict=True):
        expected = torch.log_softmax(row, -1)
        assert own.token == token
        assert own.value == pytest.approx(float(expected[token]), abs=1e-5)
        assert [b.token for b in best] == expected.topk(4).indices.tolist()


def test_no_rows_no_tokens() -> None:
    assert sample(torch.empty(0, 9), []) == []
