"""What an engine promises to whoever calls it: limits, ends, text, sampling, statistics, and the asyncio edge."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvtier.engine.async_engine import AsyncEngine
from kvtier.engine.engine import IDLE_SECONDS
from kvtier.engine.request import FinishReason, Output, Request
from kvtier.engine.sampler import SamplingParams
from kvtier.engine.stop import StopMatcher
from kvtier.errors import RequestError
from kvtier.metrics import Metrics
from tests.support import until

from .support import BLOCK, CONFIG, DictConnector, Faults, drain, expected, greedy, make_engine, prompt

pytestmark = pytest.mark.usefixtures("one_thread")


# -- what is refused


@pytest.mark.parametrize(
    ("ids", "sampling", "says"),
    [
        ((), SamplingParams(), "empty"),
        ((CONFIG.vocab,), SamplingParams(), "token ids"),
        ((-1,), SamplingParams(), "token ids"),
        (tuple([1] * 512), SamplingParams(), "512 tokens"),
        (tuple([1] * 500), SamplingParams(max_tokens=13), "max_tokens"),
        ((1,), SamplingParams(n=9), "n must be at most 8"),
    ],
)
def test_what_can_never_be_served_is_refused(ids: tuple[int, ...], sampling: SamplingParams, says: str) -> None:
    engine = make_engine(256)
    with pytest.raises(RequestError, match=says):
        engine.add_request(Request("a", ids, sampling))
    assert not engine.has_work


def test_a_prompt_longer_than_the_pool_is_refused_and_one_that_fills_it_is_served() -> None:
    engine = make_engine(4)
    with pytest.raises(RequestError, match="16 per sequence"):
        engine.add_request(greedy("a", prompt(1, 4 * BLOCK), tokens=1))
    done = engine.run([greedy("a", prompt(1, 4 * BLOCK - 1), tokens=1)])[0]
    assert done.finish is FinishReason.LENGTH
    engine.add_request(greedy("b", (1,)))
    with pytest.raises(RequestError, match="already open"):
        engine.add_request(greedy("b", (1,)))


def test_no_request_is_known_by_the_name_of_anothers_continuation() -> None:
    """The connector keeps its books by name: a match of the one would be given up, or ended, for the other."""
    engine = make_engine()
    forked = Request("r", prompt(1, 9), SamplingParams(max_tokens=4, n=2, seed=1))
    namesake = greedy("r/1", prompt(2, 9))
    for first, second in ((forked, namesake), (namesake, forked)):
        engine.add_request(first)
        with pytest.raises(RequestError, match="known by the same name"):
            engine.add_request(second)
        engine.add_request(greedy("r/2", prompt(2, 9)))
        drain(engine)
    assert len(engine.run([forked])) == 2 and len(engine.run([namesake])) == 1


def test_no_token_limit_means_as_long_as_the_engine_holds() -> None:
    engine = make_engine(4)
    request = Request("a", prompt(1, 5), SamplingParams(temperature=0.0, max_tokens=None, ignore_eos=True))
    done = engine.run([request])[0]
    assert done.finish is FinishReason.LENGTH and len(done.tokens) == 4 * BLOCK - 5


# -- how a sequence ends


def test_stop_token_and_eos_end_a_sequence_and_are_not_shown() -> None:
    free = make_engine().run([greedy("a", prompt(1, 9), tokens=12)])[0]
    stop = free.tokens[5]
    first = free.tokens.index(stop)
    sampling = SamplingParams(temperature=0.0, max_tokens=12, stop_token_ids=(stop,), ignore_eos=True)
    done = make_engine().run([Request("a", prompt(1, 9), sampling)])[0]
    assert done.finish is FinishReason.STOP and done.tokens == free.tokens[: first + 1]
    later = SamplingParams(
        temperature=0.0, max_tokens=12, stop_token_ids=(stop,), ignore_eos=True, min_tokens=first + 2
    )
    assert len(make_engine().run([Request("a", prompt(1, 9), later)])[0].tokens) > first + 1


def test_a_stop_string_never_shows() -> None:
    sampling = SamplingParams(temperature=1.0, seed=4, max_tokens=200, ignore_eos=True)
    free = make_engine().run([Request("a", prompt(1, 9), sampling)])[0]
    readable = next(c for c in free.text if c.isascii() and c.isprintable())
    stop = free.text[free.text.index(readable) :][:2]
    sampling = SamplingParams(temperature=1.0, seed=4, max_tokens=200, ignore_eos=True, stop=("nowhere", stop))
    engine = make_engine()
    engine.add_request(Request("a", prompt(1, 9), sampling))
    shown: list[Output] = []
    while engine.open_requests:
        shown += engine.step()
    text = "".join(output.text for output in shown)
    assert text == free.text[: free.text.index(stop)]
    assert shown[-1].finish is FinishReason.STOP and len(shown) < 200


@given(
    st.text(alphabet="abc", max_size=30),
    st.lists(st.text(alphabet="abc", min_size=1, max_size=4), max_size=3),
    st.data(),
)
def test_stop_matcher_lets_out_exactly_what_precedes_the_stop(text: str, stops: list[str], data: st.DataObject) -> None:
    """Fed in pieces of any size: never a stop string, everything before it, and all of it where there is none."""
    matcher = StopMatcher(stops)
    shown, rest, stopped = "", text, False
    while rest and not stopped:
        size = data.draw(st.integers(1, len(rest)))
        piece, stopped = matcher.push(rest[:size])
        shown, rest = shown + piece, rest[size:]
    if not stopped:
        shown += matcher.finish()
    assert not any(stop in shown for stop in stops)
    assert text.startswith(shown)
    assert stopped == any(stop in text for stop in stops)
    if not stopped:
        assert shown == text


# -- sampling


def test_seeded_sampling_repeats_and_greedy_takes_the_best() -> None:
    def draw(seed: int | None, temperature: float = 1.0) -> tuple[int, ...]:
        sampling = SamplingParams(temperature=temperature, seed=seed, max_tokens=10, ignore_eos=True)
        return make_engine().run([Request("a", prompt(1, 9), sampling)])[0].tokens

    assert draw(1) == draw(1) != draw(2)
    assert draw(None, 0.0) == expected([greedy("a", prompt(1, 9), tokens=10)])["a"][0]


def test_what_is_drawn_does_not_depend_on_the_company() -> None:
    mine = Request("mine", prompt(1, 9), SamplingParams(temperature=1.0, seed=5, max_tokens=10, ignore_eos=True))
    alone = make_engine().run([mine])[0].tokens
    others = [greedy(f"r{i}", prompt(i, 11), tokens=6) for i in range(4)]
    assert next(each for each in make_engine().run([*others, mine]) if each.request_id == "mine").tokens == alone


def test_first_logits_are_kept_on_request_and_tell_the_first_token() -> None:
    engine = make_engine()
    done = engine.run([greedy("a", prompt(1, 9), capture_logits=True), greedy("b", prompt(1, 9))])
    logits = done[0].stats.first_logits
    assert logits is not None and logits.shape == (CONFIG.vocab,)
    assert int(logits.argmax()) == done[0].tokens[0]
    assert done[1].stats.first_logits is None


def test_log_probabilities_come_with_the_token() -> None:
    engine = make_engine()
    engine.add_request(Request("a", prompt(1, 9), SamplingParams(temperature=0.0, max_tokens=1, logprobs=3)))
    (output,) = engine.step()
    assert output.logprob is not None
    chosen, best = output.logprob
    assert chosen.token == output.tokens[0] == best[0].token and chosen.value == best[0].value < 0 and len(best) == 3


# -- statistics


def test_a_scripted_day_counts_what_a_hand_counts() -> None:
    metrics = Metrics()
    connector = DictConnector()
    engine = make_engine(connector=connector, metrics=metrics.engine)
    engine.run([greedy("cold", prompt(1, 21), tokens=2)])
    assert metrics.value("kvtier_requests_running") == 0, "nothing runs any more"
    engine.run([greedy("hbm", prompt(1, 21), tokens=2)])
    engine.settle(5.0)
    engine.reset_prefix_cache()
    engine.run([greedy("loaded", prompt(1, 21), tokens=2)])
    engine.settle(5.0)
    engine.reset_prefix_cache()
    connector.faults.fail_loads = 1.0
    engine.run([greedy("failed", prompt(1, 21), tokens=2)])
    engine.add_request(greedy("aborted", prompt(2, 21), tokens=2))
    engine.abort("aborted")
    engine.settle(5.0)
    counted = {
        source: metrics.value("kvtier_prompt_tokens_total", source=source) for source in ("computed", "hbm", "external")
    }
    assert counted == {"computed": 21 + 1 + 1 + 21, "hbm": 20, "external": 20}
    assert metrics.value("kvtier_requests_total", outcome="length") == 4
    assert metrics.value("kvtier_requests_total", outcome="abort") == 1
    assert metrics.value("kvtier_generated_tokens_total") == 8
    assert metrics.value("kvtier_metric_faults_total") == 0


def test_times_are_in_order_and_steps_are_accounted_for() -> None:
    engine = make_engine()
    stats = engine.run([greedy("a", prompt(1, 30))])[0].stats
    assert stats.scheduled is not None and stats.first_token is not None and stats.finished is not None
    assert stats.submitted <= stats.scheduled <= stats.first_token <= stats.finished
    assert stats.ttft == stats.first_token - stats.submitted
    assert engine.times.steps == 8 and engine.times.tokens == 37
    assert engine.times.total >= engine.times.forward > 0


# -- asyncio


async def gather(engine: AsyncEngine, *requests: Request) -> dict[str, tuple[int, ...]]:
    got: dict[str, tuple[int, ...]] = {}
    with engine.open(requests) as outputs:
        async for output in outputs:
            got[output.request_id] = (*got.get(output.request_id, ()), *output.tokens)
    return got


async def test_streams_from_many_tasks() -> None:
    requests = [greedy(f"r{i}", prompt(i, 12)) for i in range(6)]
    engine = AsyncEngine(make_engine())
    engine.start()
    parts = await asyncio.gather(*(gather(engine, request) for request in requests))
    assert {name: [tokens] for part in parts for name, tokens in part.items()} == expected(requests)
    assert await engine.close(5.0)
    assert engine.engine.check_integrity() == []
    with pytest.raises(RequestError):
        await gather(engine, requests[0])


async def test_who_leaves_a_stream_aborts_its_requests() -> None:
    engine = AsyncEngine(make_engine(connector=DictConnector(Faults(save_ticks=5))))
    engine.start()
    with engine.open([greedy("a", prompt(1, 12), tokens=200)]) as outputs:
        async for _ in outputs:
            break
    assert await engine.close(5.0), "well before the 200 tokens are there"
    assert engine.engine.pool.referenced == 0


def test_an_abort_is_of_whoever_had_the_id_when_it_was_said() -> None:
    """Whoever asks gives an id again as soon as its request has ended, in the same breath in which he says that he has gone."""
    engine, request = make_engine(), greedy("r", prompt(1, 12), tokens=3)
    engine.run([request])
    engine.abort("r")
    assert {"r": [engine.run([request])[0].tokens]} == expected([request])
    engine.add_request(request)
    engine.abort("r")
    assert [output.finish for output in engine.step()] == [FinishReason.ABORT]
    assert engine.check_integrity() == [] and not engine.has_work


async def test_an_id_that_is_given_again_has_the_outputs_of_its_own_request() -> None:
    """Outputs of an aborted request are on their way to the event loop while the next is opened under its id."""
    engine = AsyncEngine(make_engine())
    engine.start()
    want = expected([greedy("r", prompt(2, 12))])
    for _ in range(20):
        with engine.open([greedy("r", prompt(1, 12), tokens=200)]) as outputs:
            await anext(outputs)
            with pytest.raises(RequestError, match="already open"):
                engine.open([greedy("r", prompt(2, 12))])
        while engine.engine.has_work:
            time.sleep(0.001)  # noqa: ASYNC251 - the loop is to stand still until the abort is done and not told yet
        got = await gather(engine, greedy("r", prompt(2, 12)))
        assert {"r": [got["r"]]} == want
    assert await engine.close(5.0)


async def test_one_bad_request_serves_none_of_its_company() -> None:
    engine = AsyncEngine(make_engine())
    engine.start()
    with pytest.raises(RequestError):
        await gather(engine, greedy("good", prompt(1, 5)), greedy("bad", ()))
    assert await engine.close(5.0)
    assert engine.engine.open_requests == 0


async def test_closing_gives_open_requests_their_time_and_then_ends_them() -> None:
    connector = DictConnector(Faults(never_answer=1.0))
    engine = AsyncEngine(make_engine(connector=connector))
    engine.start()
    reader = asyncio.ensure_future(gather(engine, greedy("stuck", prompt(1, 12))))
    await asyncio.sleep(0.02)
    assert not await engine.close(0.05)
    assert await reader == {"stuck": ()}
    assert not [each for each in threading.enumerate() if each.name == "kvtier-steps"]


async def test_waiting_for_a_match_does_not_spin() -> None:
    connector = DictConnector(Faults(never_answer=1.0))
    engine = AsyncEngine(make_engine(connector=connector))
    engine.start()
    began = time.monotonic()
    reader = asyncio.ensure_future(gather(engine, greedy("stuck", prompt(1, 12))))
    await asyncio.to_thread(until, lambda: connector.scheduler.asked >= 20, 30.0, "it is asked again and again")
    asked, seconds = connector.scheduler.asked, time.monotonic() - began
    assert asked <= seconds / IDLE_SECONDS + 2, "between two questions it waits"
    engine.abort("stuck")
    await reader
    assert await engine.close(5.0)


@pytest.mark.parametrize("raised", [RuntimeError, SystemExit])
async def test_a_step_that_fails_ends_every_request_and_says_so(
    raised: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    core = make_engine()
    engine = AsyncEngine(core)
    engine.start()

    def broken(*_: object, **__: object) -> torch.Tensor:
        raise raised("out of luck")

    monkeypatch.setattr(core._model, "forward", broken)
    outputs = [output async for output in engine.open([greedy("a", prompt(1, 5))])]
    assert [output.finish for output in outputs] == [FinishReason.ERROR]
    assert engine.fault is not None and "out of luck" in engine.fault and engine.busy()
    assert not await engine.close(1.0)


async def test_too_many_open_requests_are_refused() -> None:
    engine = AsyncEngine(make_engine(), max_open=2)
    engine.start()
    with pytest.raises(RequestError):
        await gather(engine, *(greedy(f"r{i}", prompt(i, 5)) for i in range(3)))
    assert await engine.close(5.0)
