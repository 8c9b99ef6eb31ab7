"""Fits, and the judgement that rests on them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from kvtier.cost import DRAM, FIRM, KEPT, SHARE, Fit, FittedGate, Gate, Guarded, Line, OpenGate, Run
from kvtier.metrics import Metrics

KB = 1000
"""Bytes of a token's KV in these tests."""


def run(tier: str, tokens: int, **more: int) -> Run:
    return Run(tier, tokens, tokens * KB, **more)  # type: ignore[arg-type]


def knowing(tiers: dict[str, Line], prefill: Line, metrics: Metrics | None = None) -> FittedGate:
    """A gate that has seen loads and steps that take exactly so long."""
    gate = FittedGate(None if metrics is None else metrics.gate)
    for tokens in (16, 64, 256, 512):
        for _ in range(KEPT):
            gate.observe_prefill(tokens, prefill.seconds(tokens))
            for name, line in tiers.items():
                gate.observe_load(name, tokens * KB, line.seconds(tokens * KB))
    return gate


PREFILL = Line(0.010, 0.001)
FREE = Line(0.0, 1e-12)


# -- the fit


NO_TIMES = [float("nan"), float("inf"), float("-inf"), -1e-9, 1e300]


@pytest.mark.parametrize("seconds", NO_TIMES)
def test_what_is_no_time_changes_nothing(seconds: float) -> None:
    fit = Fit()
    fit.observe(1000, 0.5)
    fit.observe(1000, seconds)
    assert (fit.count, fit.seconds(1000)) == (1, 0.5)


@pytest.mark.parametrize("seconds", NO_TIMES)
def test_a_gate_that_was_told_nothing_but_nonsense_admits(seconds: float) -> None:
    gate = FittedGate(Metrics().gate)
    gate.observe_prefill(16, seconds)
    gate.observe_load("nvme", 16 * KB, seconds)
    gate.observe_save(16 * KB, seconds)
    assert gate.keeps([run("nvme", 16)]) == 1
    assert gate.demotes(16, 16 * KB, 16 * KB)


@pytest.mark.parametrize("line", [Line(0.02, 3e-9), Line(0.0, 1e-6), Line(0.5, 1e-12)])
def test_a_line_is_found_from_what_lies_on_it(line: Line) -> None:
    fit = Fit()
    for amount in (3 << 10, 50 << 10, 7 << 20, 1 << 30):
        fit.observe(amount, line.seconds(amount))
    for amount in (1 << 10, 1 << 16, 1 << 24, 1 << 31):
        assert fit.seconds(amount) == pytest.approx(line.seconds(amount), rel=0.01)


def test_neither_part_of_a_line_is_ever_negative() -> None:
    falling, steep = Fit(), Fit()
    for amount, slower, faster in ((1 << 10, 5.0, 1e-6), (1 << 20, 1.0, 10.0)):
        falling.observe(amount, slower)
        steep.observe(amount, faster)
    for fit in (falling, steep):
        assert fit.line.fixed >= 0 and fit.line.each > 0
        assert all(fit.seconds(1 << power) >= 0 for power in range(31))


def test_one_size_alone_gives_every_other_the_benefit_of_the_doubt() -> None:
    fit = Fit()
    fit.observe(1000, 2.0)
    assert fit.seconds(1000) == 2.0
    assert fit.seconds(100) == pytest.approx(0.2), "it may all be bandwidth"
    assert fit.seconds(100_000) == 2.0, "it may all be delay"


def test_long_loads_do_not_make_it_forget_what_short_ones_cost() -> None:
    fit, line = Fit(), Line(0.1, 1e-9)
    fit.observe(1 << 10, line.seconds(1 << 10))
    for _ in range(500):
        fit.observe(1 << 30, line.seconds(1 << 30))
    assert fit.seconds(1 << 10) == pytest.approx(line.seconds(1 << 10), rel=0.05)


def test_one_bad_moment_is_no_trend_and_three_are() -> None:
    fit = Fit()
    for _ in range(KEPT):
        fit.observe(1 << 20, 1.0)
    fit.observe(1 << 20, 1000.0)
    assert fit.seconds(1 << 20) < 2.0
    for _ in range(2):
        fit.observe(1 << 20, 1000.0)
    assert fit.seconds(1 << 20) > 100.0
    for _ in range(KEPT):
        fit.observe(1 << 20, 1.0)
    assert fit.seconds(1 << 20) == 1.0


def test_what_is_measured_as_nothing_divides_by_nothing() -> None:
    fit = Fit()
    for amount in (1, 1, 1 << 30):
        fit.observe(amount, 0.0)
    assert 0 < fit.seconds(1 << 20) < 1e-5


# -- the judgement


def test_what_takes_longer_than_computing_is_declined_and_what_takes_less_is_not() -> None:
    for factor, kept in ((0.1, 0), (0.5, 0), (0.9, 0), (1.1, 1), (2.0, 1), (10.0, 1)):
        gate = knowing({"nvme": Line(0.0, PREFILL.each / factor / KB), DRAM: FREE}, PREFILL)
        assert gate.keeps([run("nvme", 256)]) == kept


def test_what_a_step_costs_beside_its_tokens_is_saved_with_whole_steps_only() -> None:
    gate = knowing({}, PREFILL)
    assert gate.prefill_seconds(256) == pytest.approx(256 * PREFILL.each, rel=0.01), "the rest needs a step as well"
    assert gate.prefill_seconds(1100) == pytest.approx(1100 * PREFILL.each + 2 * PREFILL.fixed, rel=0.01)


def test_a_delay_of_four_times_their_computing_keeps_short_runs_out_and_long_ones_in() -> None:
    short = 32
    gate = knowing({"nvme": Line(4 * PREFILL.each * short, 1e-9), DRAM: FREE}, PREFILL)
    assert gate.keeps([run("nvme", short)]) == 0
    assert gate.keeps([run("nvme", 512)]) == 1


def test_the_copy_out_of_dram_is_part_of_what_a_lower_tier_costs() -> None:
    half = Line(0.0, 0.6 * PREFILL.each / KB)
    assert knowing({"nvme": half, DRAM: FREE}, PREFILL).keeps([run("nvme", 256)]) == 1
    assert knowing({"nvme": half, DRAM: half}, PREFILL).keeps([run("nvme", 256)]) == 0


def test_a_run_that_loses_alone_is_loaded_where_it_leads_to_one_that_wins_more() -> None:
    gate = knowing({"nvme": Line(0.05, 1e-9), DRAM: FREE}, PREFILL)
    bridge, long = run("nvme", 16), run(DRAM, 256)
    assert gate.keeps([bridge]) == 0
    assert gate.keeps([run(DRAM, 16), bridge]) == 1, "cut where it no longer pays"
    assert gate.keeps([run(DRAM, 16), bridge, long]) == 3
    assert gate.keeps([run(DRAM, 16), bridge, run(DRAM, 16)]) == 1


def test_what_a_tier_has_to_deliver_before_counts() -> None:
    gate = knowing({"nvme": Line(0.0, 0.5 * PREFILL.each / KB), DRAM: FREE}, PREFILL)
    assert gate.keeps([run("nvme", 128)]) == 1
    assert gate.keeps([run("nvme", 128, queued=1024 * KB)]) == 0
    assert gate.keeps([run("nvme", 128, queued=64 * KB, arriving=True)]) == 1, "its own bytes are among the queued ones"


def test_a_queue_ahead_does_not_make_a_tier_look_slow() -> None:
    line, gate = Line(0.001, 1e-8), FittedGate()
    for tokens in (64, 256):
        for queued in (0, 10_000_000):
            nbytes = tokens * KB
            gate.observe_load("nvme", nbytes, line.seconds(nbytes + queued), queued)
    assert gate.seconds("nvme", 64 * KB) == pytest.approx(line.seconds(64 * KB), rel=0.05)


# -- before enough is known


def test_nothing_is_declined_before_the_engine_has_timed_enough_steps() -> None:
    gate = FittedGate()
    runs = [run("nvme", 64)]
    for _ in range(1000):
        gate.observe_load("nvme", 64 * KB, 100.0)
        assert gate.keeps(runs) == 1, "whoever reports no prefill gets every hit"
        gate.decided(runs, 1, ())


def test_an_engine_that_only_loads_computes_now_and_then_to_learn_what_that_takes() -> None:
    gate = FittedGate()
    gate.observe_prefill(1, 0.010)
    runs, kept = [run("nvme", 512)], []
    for _ in range(100):
        kept.append(gate.keeps(runs))
        gate.decided(runs, kept[-1], ())
    assert kept[:16] == [1] * 16 and 1 <= kept.count(0) <= 6


def test_a_tier_that_never_answers_is_not_asked_for_ever_on_no_evidence() -> None:
    gate = knowing({DRAM: FREE}, PREFILL)
    runs = [run("nvme", 64)]
    admitted = 0
    for _ in range(100):
        kept = gate.keeps(runs)
        admitted += kept
        gate.decided(runs, kept, ())
    assert admitted == 16


def test_a_first_load_that_was_unlucky_closes_a_tier_for_one_try_only() -> None:
    gate = knowing({DRAM: FREE}, PREFILL)
    runs = [run("nvme", 64)]
    gate.observe_load("nvme", 64 * KB, 10.0)
    assert gate.keeps(runs) == 0
    assert gate.decided(runs, 0, {"nvme"}) == [0], "looked at again at once"
    gate.observe_load("nvme", 64 * KB, 0.001)
    assert gate.keeps(runs) == 1


# -- tries


def tries(gate: FittedGate, runs: Sequence[Run], rounds: int) -> tuple[int, int]:
    """(loaded, tried in the background) of so many requests, none of which changes what is known."""
    loaded = tried = 0
    for _ in range(rounds):
        kept = gate.keeps(runs)
        loaded += kept
        tried += len(gate.decided(runs, kept, {"nvme"}))
    return loaded, tried


def test_a_tier_that_lost_is_tried_on_its_share_by_count() -> None:
    slow = Line(0.0, 10 * PREFILL.each / KB)
    assert tries(knowing({"nvme": slow, DRAM: FREE}, PREFILL), [run("nvme", 64)], 10_000) == (0, 10_000 * SHARE)
    mixed = knowing({"nvme": slow, DRAM: FREE}, PREFILL)
    assert tries(mixed, [run("nvme", 64)], 1000) == (0, 10)
    assert tries(mixed, [run("nvme", 500)], 1000) == (0, 10), "each size has its own share"


def test_dram_that_lost_is_tried_on_its_share_and_never_on_more_than_that_of_the_time() -> None:
    even = PREFILL.each
    rounds = 10_000
    for factor, most in ((0.5, 100), (0.1, 100 / 9)):
        loaded, _ = tries(knowing({DRAM: Line(0.0, even / factor / KB)}, PREFILL), [run(DRAM, 64)], rounds)
        assert 0.8 * most <= loaded <= most + 1


def test_a_tier_that_is_being_tried_is_not_tried_twice_at_once() -> None:
    gate = knowing({"nvme": Line(0.0, 10 * PREFILL.each / KB), DRAM: FREE}, PREFILL)
    runs = [run("nvme", 64)]
    assert not any(gate.decided(runs, 0, ()) for _ in range(500))
    assert gate.decided(runs, 0, {"nvme"}) == [0]
    assert gate.decided(runs, 0, {"nvme"}) == []


def test_a_tier_that_has_become_fast_is_found_out_by_its_tries() -> None:
    gate = knowing({"nvme": Line(0.0, 10 * PREFILL.each / KB), DRAM: FREE}, PREFILL)
    runs, rounds = [run("nvme", 64)], 0
    while not gate.keeps(runs):
        rounds += 1
        if gate.decided(runs, 0, {"nvme"}):
            gate.observe_load("nvme", 64 * KB, 0.0001)
        assert rounds < 1000
    assert rounds <= KEPT / SHARE


def loads_until(gate: FittedGate, tokens: int, line: Line, kept: int) -> tuple[int, int]:
    """(requests, loads) until runs of ``tokens`` of a tier that now takes ``line`` are admitted (1) or declined (0)."""
    runs, loads = [run("nvme", tokens)], 0
    for number in range(2000):
        now = gate.keeps(runs)
        if now == kept:
            return number, loads
        if now or gate.decided(runs, now, {"nvme"}):
            gate.observe_load("nvme", tokens * KB, line.seconds(tokens * KB))
            loads += 1
    raise AssertionError("it never noticed")


@pytest.mark.parametrize("factor", [10, 100, 1000])
@pytest.mark.parametrize("tokens", [16, 128, 512])
def test_a_fall_to_a_hundredth_is_noticed_whatever_was_measured_before_and_so_is_the_recovery(
    factor: int, tokens: int
) -> None:
    """Other sizes were measured while the tier was fast, and not since."""
    fast, slow = (Line(0.0, PREFILL.each / each / KB) for each in (factor, min(0.5, factor / 100)))
    gate = knowing({"nvme": fast, DRAM: FREE}, PREFILL)
    requests, _ = loads_until(gate, tokens, slow, 0)
    assert requests <= FIRM
    requests, loads = loads_until(gate, tokens, fast, 1)
    assert requests <= KEPT / SHARE and loads <= KEPT
    assert loads <= SHARE * requests + 1


@pytest.mark.parametrize("times", [0.1, 10.0])
def test_an_engine_that_computes_at_another_speed_is_noticed_as_soon(times: float) -> None:
    gate = knowing({}, PREFILL)
    for _ in range(KEPT):
        gate.observe_prefill(512, times * PREFILL.seconds(512))
    assert gate.prefill_seconds(512) == pytest.approx(times * PREFILL.seconds(512), rel=0.1)


def test_two_bad_moments_of_five_do_not_lose_a_tier_that_is_twice_as_fast() -> None:
    gate = knowing({"nvme": Line(0.0, 0.5 * PREFILL.each / KB), DRAM: FREE}, PREFILL)
    for _ in range(2):
        gate.observe_load("nvme", 256 * KB, 100.0)
    assert gate.keeps([run("nvme", 256)]) == 1


# -- a gate that fails


class Failing(Gate):
    """Raises whatever it is asked."""

    def keeps(self, runs: Sequence[Run]) -> int:
        raise ZeroDivisionError

    def seconds(self, tier: str, nbytes: int) -> float:
        raise ZeroDivisionError

    decided = patience = demotes = observe_load = observe_save = observe_prefill = keeps  # type: ignore[assignment]


@pytest.mark.parametrize(
    ("ask", "answer"),
    [
        (lambda gate: gate.keeps([run(DRAM, 1)] * 3), 3),
        (lambda gate: gate.decided([run(DRAM, 1)], 1, ()), []),
        (lambda gate: gate.patience([run(DRAM, 1)]), None),
        (lambda gate: gate.seconds(DRAM, 1), 0.0),
        (lambda gate: gate.demotes(1, 1, 1), True),
        (lambda gate: gate.observe_load(DRAM, 1, 1.0), None),
        (lambda gate: gate.observe_save(1, 1.0), None),
        (lambda gate: gate.observe_prefill(1, 1.0), None),
    ],
)
def test_what_a_gate_raises_admits_and_is_logged_once(
    ask: Callable[[Gate], object], answer: object, caplog: pytest.LogCaptureFixture
) -> None:
    gate = Guarded(Failing())
    assert [ask(gate) for _ in range(3)] == [answer] * 3
    assert len(caplog.records) == 1 and "the gate failed" in caplog.records[0].getMessage()


# -- preemption


def test_demoting_wins_where_saving_and_loading_take_less_than_computing() -> None:
    gate = knowing({DRAM: Line(0.003, 1e-10)}, PREFILL)
    gate.observe_save(64 * KB, 0.001)
    assert gate.demotes(512, 512 * KB, 64 * KB)
    assert not gate.demotes(1, KB, KB)
    slow = knowing({DRAM: Line(0.0, 2 * PREFILL.each / KB)}, PREFILL)
    assert not slow.demotes(512, 512 * KB, 0)
    assert FittedGate().demotes(16, 16 * KB, 0), "as long as nothing is known of computing"
    assert OpenGate().demotes(1, KB, KB)


# -- what is counted


def test_verdicts_tokens_and_fits_are_counted() -> None:
    metrics = Metrics()
    gate = knowing({"nvme": Line(0.0, 10 * PREFILL.each / KB), DRAM: Line(0.001, 1e-9)}, PREFILL, metrics)
    runs = [run(DRAM, 128), run("nvme", 64)]
    for _ in range(200):
        gate.decided(runs, gate.keeps(runs), {"nvme"})

    def counted(what: str, tier: str, verdict: str) -> float:
        return metrics.value(f"kvtier_gate_{what}_total", tier=tier, verdict=verdict)

    assert (counted("runs", DRAM, "admitted"), counted("tokens", DRAM, "admitted")) == (200, 200 * 128)
    assert (counted("runs", "nvme", "declined"), counted("tokens", "nvme", "declined")) == (200, 200 * 64)
    assert counted("runs", "nvme", "tried") == 2
    assert metrics.value("kvtier_gate_t0_seconds", tier=DRAM) == pytest.approx(0.001, rel=0.01)
    assert metrics.value("kvtier_gate_bandwidth_bytes", tier=DRAM) == pytest.approx(1e9, rel=0.01)
    assert metrics.value("kvtier_gate_prefill_token_seconds") == pytest.approx(0.001 + 0.010 / 512, rel=0.01)
