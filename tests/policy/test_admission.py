"""Which blocks a tier takes, and what it learns from having been wrong."""

from __future__ import annotations

import random

import pytest

from kvtier.config import AdmissionRule, TierOptions, TierUrl, tier_options
from kvtier.errors import ConfigError
from kvtier.policy.admission import (
    DAY,
    MOST_USES,
    Admission,
    RegretDriven,
    SecondHit,
    Verdict,
    WriteBudget,
    make_admission,
)
from kvtier.storage_backends.nvme import NvmeMedium
from kvtier.testing.policies import entry, reachable

ADMITTED, DECLINED, OVER_BUDGET = Verdict.ADMITTED, Verdict.DECLINED, Verdict.OVER_BUDGET


def test_no_day_has_more_writes_than_its_budget() -> None:
    seed = 3
    print(f"seed {seed}")
    rng = random.Random(seed)
    budget = WriteBudget(24_000)
    written: list[tuple[float, int]] = []
    now = 0.0
    while now < 3 * DAY:
        nbytes = rng.randrange(1, 500)
        if budget.left(now) >= nbytes:
            budget.spend(nbytes)
            written.append((now, nbytes))
        now += rng.choice([0.0, 1.0, 400.0, 10.0])
    totals = [sum(nbytes for at, nbytes in written if since <= at < since + DAY) for since, _ in written]
    assert max(totals) <= 24_000
    assert max(totals) > 22_000, "much of the budget is not to be had"


def test_the_second_time_is_an_offer_or_a_use_before() -> None:
    rule = SecondHit(None, 10)
    rule.used([entry(2)])
    assert [rule.offered(entry(number), 1, 0.0) for number in (1, 2, 1)] == [DECLINED, ADMITTED, ADMITTED]


def test_an_offer_over_the_budget_is_told_from_one_that_nobody_wants() -> None:
    rule = SecondHit(WriteBudget(24 * 100), 10)
    rule.used([entry(1), entry(2)])
    assert [rule.offered(entry(number), 60, 0.0) for number in (1, 2, 3)] == [ADMITTED, OVER_BUDGET, DECLINED]
    assert rule.left(0.0) == 40.0


def test_regrets_are_counted_once_and_for_what_they_are() -> None:
    rule = SecondHit(None, 10)
    rule.used([entry(1)])
    assert [rule.offered(entry(number), 1, 0.0) for number in (1, 2, 3)] == [ADMITTED, DECLINED, DECLINED]
    assert rule.wanted([entry(1), entry(2), entry(9)]) == 1, "1 was taken, 9 never offered"
    assert rule.wanted([entry(2)]) == 0
    assert rule.evicted([entry(3), entry(1)]) == 1, "3 was never taken"
    rule.offered(entry(1), 1, 0.0)
    rule.read([entry(1)])
    assert rule.evicted([entry(1)]) == 0


def test_the_adaptive_rule_spends_its_budget_on_what_is_asked_for_again() -> None:
    """Blocks seen twice before come back nine times in ten, others seldom: with a tight budget these are what is written."""
    seed = 8
    print(f"seed {seed}")
    rng = random.Random(seed)
    rule = RegretDriven(WriteBudget(24 * 1000), 500)
    taken = {0: 0, 2: 0}
    for step in range(6000):
        now = step * 10.0
        one, uses = entry(step), rng.choice([0, 0, 0, 2])
        rule.used([one] * uses)
        verdict = rule.offered(one, 10, now)
        if step >= 2000:
            taken[uses] += verdict is ADMITTED
        if rng.random() < (0.9 if uses else 0.05):
            rule.read([one]) if verdict is ADMITTED else rule.wanted([one])
    print(taken)
    assert taken[2] > 5 * taken[0], "the budget went to blocks that do not come back"
    assert taken[2] + taken[0] > 900, "the budget was not used"


def test_with_room_in_its_budget_the_adaptive_rule_takes_everything() -> None:
    rule = RegretDriven(WriteBudget(10**12), 100)
    assert {rule.offered(entry(number), 10, float(number)) for number in range(1000)} == {ADMITTED}


@pytest.mark.parametrize("rule", list(AdmissionRule))
def test_what_a_rule_remembers_is_bounded(rule: AdmissionRule) -> None:
    admission = make_admission(rule, 24_000, 50)
    assert admission is not None
    for number in range(5000):
        admission.used([entry(number)])
        admission.offered(entry(number + 1), 1, float(number))
    alive = [one for one in reachable(admission) if isinstance(one, bytes) and len(one) == len(entry(0))]
    assert len(alive) <= 3 * 50 + 2


def test_without_rule_and_budget_there_is_nothing_to_ask() -> None:
    assert make_admission(AdmissionRule.ALL, None, 10) is None
    limited = make_admission(AdmissionRule.ALL, 24_000, 10)
    assert type(limited) is Admission
    assert [limited.offered(entry(number), 600, 0.0) for number in range(2)] == [ADMITTED, OVER_BUDGET]


def options(query: str) -> TierOptions:
    return tier_options(TierUrl.parse(f"nvme:///x?capacity=1GiB{query}"), NvmeMedium.Params)[0]


def test_the_options_stand_in_the_url() -> None:
    assert (options("").admission, options("").write_budget) == (AdmissionRule.ALL, None)
    chosen = options("&admission=adaptive&write_budget=500GB")
    assert (chosen.admission, chosen.write_budget) == (AdmissionRule.ADAPTIVE, 500 * 10**9)


@pytest.mark.parametrize(
    ("query", "says"),
    [
        ("&admission=third", "admission: 'third' is not one of all, second, adaptive"),
        ("&admision=all", "did you mean 'admission'?"),
        ("&admission=adaptive", "give one, as in write_budget=500GB"),
        ("&write_budget=much", "write_budget: 'much' is not a size"),
    ],
)
def test_what_makes_no_sense_is_refused(query: str, says: str) -> None:
    with pytest.raises(ConfigError) as wrong:
        options(query)
    assert says in str(wrong.value)


def test_uses_are_counted_up_to_a_limit() -> None:
    rule = RegretDriven(WriteBudget(10**9), 10)
    rule.used([entry(1)] * 100)
    rule.offered(entry(1), 1, 0.0)
    assert rule._decisions[MOST_USES] == 1.0


def test_a_clock_that_goes_back_takes_nothing_from_the_budget() -> None:
    budget = WriteBudget(24_000)
    assert budget.left(1000.0) == budget.left(10.0) == 1000.0


def test_a_quiet_week_saves_up_no_more_than_an_hour_may_spend() -> None:
    budget = WriteBudget(24_000)
    assert budget.left(0.0) == 1000.0
    budget.spend(1000)
    assert budget.left(0.0) == 0.0
    assert budget.left(7 * DAY) == 1000.0
