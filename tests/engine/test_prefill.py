"""What the engine says of the time that prefill takes: only what steps really tell."""

from __future__ import annotations

import time

import pytest

from kvtier.engine.prefill import PrefillTimes
from kvtier.engine.scheduler import Work

from .support import DictConnector, greedy, make_engine, prompt

pytestmark = pytest.mark.usefixtures("one_thread")


class Ear(DictConnector):
    """A connector that hears what prefill took."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.heard: list[tuple[int, float]] = []
        self.scheduler.observe_prefill = lambda tokens, seconds: self.heard.append((tokens, seconds))  # type: ignore[method-assign]


def test_each_step_of_a_prompt_is_told_and_no_step_of_decoding() -> None:
    connector = Ear()
    engine = make_engine(connector=connector, tokens=16)
    engine.run([greedy("a", prompt(1, 40), tokens=12)])
    assert [tokens for tokens, _ in connector.heard] == [16, 16, 8]
    assert all(0 < seconds < 60 for _, seconds in connector.heard)


def test_a_step_counts_while_others_decode_only_where_prompt_tokens_outnumber_them_by_far() -> None:
    connector = Ear()
    engine = make_engine(connector=connector, tokens=64)
    engine.add_request(greedy("decoding", prompt(1, 4), tokens=30))
    engine.step()
    connector.heard.clear()
    engine.add_request(greedy("few", prompt(2, 5), tokens=1))
    engine.step()
    assert connector.heard == []
    engine.add_request(greedy("many", prompt(3, 50), tokens=1))
    engine.step()
    assert [tokens for tokens, _ in connector.heard] == [51]
    engine.abort_all()
    assert engine.settle(5.0)


def test_waiting_for_loads_is_not_prefill() -> None:
    connector, patience = Ear(), 0.5
    engine = make_engine(connector=connector)
    engine.run([greedy("a", prompt(1, 41), tokens=1)])
    engine.settle(5.0)
    engine.reset_prefix_cache()
    connector.heard.clear()
    arrives = connector.worker.wait_for_layer_load

    def late(layer: int) -> None:
        if layer == 0:
            time.sleep(patience)
        arrives(layer)

    connector.worker.wait_for_layer_load = late  # type: ignore[method-assign]
    began = time.perf_counter()
    engine.run([greedy("b", prompt(1, 41), tokens=1)])
    whole = time.perf_counter() - began
    ((tokens, seconds),) = connector.heard
    assert tokens == 1 and whole > patience
    assert seconds <= whole - patience


def part(count: int, *, last: bool) -> Work:
    """``count`` prompt tokens of a sequence, up to its last one or not."""
    engine = make_engine()
    engine.add_request(greedy("a", prompt(1, count + (not last))))
    engine._read_inbox()
    return Work(engine.sequences()[0], 0, count)


def test_steps_of_a_device_that_runs_behind_are_told_once_their_logits_are_there() -> None:
    heard: list[tuple[int, float]] = []
    times = PrefillTimes(lambda tokens, seconds: heard.append((tokens, seconds)), behind=True)

    def step(work: Work, *, loads: bool = False) -> None:
        now = time.perf_counter()
        times.computed([work], now, now, 0.0, loads=loads)
        times.noted()

    step(part(32, last=False))
    assert heard == []
    step(part(16, last=True))
    ((tokens, seconds),) = heard
    assert tokens == 24 and 0 < seconds < 60
    step(part(32, last=False), loads=True)
    step(part(16, last=True))
    assert len(heard) == 1, "the device waited for loads where nobody sees it"
    step(part(16, last=True))
    assert len(heard) == 2
