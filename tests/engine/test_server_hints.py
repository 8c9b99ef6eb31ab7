"""``kv_hints`` of a request, from its body to what the connector is told."""

from __future__ import annotations

from collections.abc import Iterator

import openai
import pytest

from kvtier.abc.store import NO_HINTS, Hints
from kvtier.engine.request import Request
from kvtier.engine.sampler import SamplingParams

from .serving import CHAT, Running
from .support import BLOCK, DictConnector, Faults, make_engine

PROMPT = list(range(1, 3 * BLOCK + 2))
"""Three whole blocks, and a token that is always computed."""


@pytest.fixture(scope="module")
def running(one_thread: None) -> Iterator[Running]:
    with Running(DictConnector()) as server:
        yield server


def told(running: Running, kind: str) -> list[tuple[int, Hints]]:
    """Blocks and hints of every match or offer so far; forgets them."""
    assert isinstance(running.connector, DictConnector)
    heard = running.connector.scheduler.hints
    found = [(blocks, hints) for what, blocks, hints in heard if what == kind]
    heard[:] = [each for each in heard if each[0] != kind]
    return found


def complete(running: Running, salt: str, tokens: int = 1, **hints: object) -> None:
    answer = running.complete(prompt=PROMPT, max_tokens=tokens, cache_salt=salt, kv_hints=hints, ignore_eos=True)
    assert answer.status_code == 200, answer.text
    running.until_idle()


def test_hints_reach_the_connector_with_match_and_offer(running: Running) -> None:
    told(running, "match"), told(running, "offer")
    complete(running, "a", priority=5, max_wait_ms=250, pin_seconds=60)
    wanted = Hints(priority=5, pin_seconds=60, max_wait_ms=250)
    assert told(running, "match") == [(3, wanted)]
    assert told(running, "offer") == [(3, wanted)]
    complete(running, "b")
    assert told(running, "offer") == [(3, NO_HINTS)]


def test_the_openai_client_sends_them_in_its_extra_body(running: Running) -> None:
    with openai.OpenAI(base_url=f"{running.url}/v1", api_key="none", max_retries=0) as client:
        extra = {"kv_hints": {"no_store": True, "no_load": True}, "cache_salt": "client"}
        client.chat.completions.create(model="tiny", messages=CHAT, max_tokens=1, extra_body=extra)  # type: ignore[arg-type]
        with pytest.raises(openai.BadRequestError, match="unknown hint 'no_stoer'; did you mean 'no_store'"):
            client.completions.create(model="tiny", prompt="a", extra_body={"kv_hints": {"no_stoer": True}})
    running.until_idle()
    assert {hints for _, hints in told(running, "match")} >= {Hints(no_store=True, no_load=True)}
    assert told(running, "offer")[-1][1] == Hints(no_store=True, no_load=True)


def test_generated_blocks_are_told_apart_where_that_matters(running: Running) -> None:
    told(running, "offer")
    complete(running, "c", tokens=2 * BLOCK, store_generated=False, pin_seconds=60)
    offers = told(running, "offer")
    prompt = Hints(store_generated=False, pin_seconds=60)
    generated = Hints(store_generated=False, no_store=True)
    assert [each for each in offers if each[1] == prompt] == [(3, prompt)]
    assert sum(blocks for blocks, hints in offers if hints == generated) == 2
    assert len(offers) == 1 + 2, "each generated block by itself, as it fills"
    complete(running, "d", tokens=2 * BLOCK)
    assert sum(blocks for blocks, hints in told(running, "offer") if hints == NO_HINTS) == 5


def test_what_is_pinned_is_offered_although_hbm_has_it(running: Running) -> None:
    """A prompt that was saved, and has left the tiers since, is below again once it is pinned."""
    complete(running, "e")
    told(running, "offer")
    complete(running, "e")
    assert told(running, "offer") == [], "what HBM has need not be saved again"
    complete(running, "e", pin_seconds=60)
    assert told(running, "offer") == [(3, Hints(pin_seconds=60))]


def test_patience_is_for_all_matches_of_a_request_together() -> None:
    """HBM gains blocks of a prompt while it waits: it asks anew, with what is left of its patience."""
    connector = DictConnector(Faults(never_answer=1.0))
    engine = make_engine(connector=connector)
    now = [100.0]
    engine._exchange._clock = lambda: now[0]
    waiting = Request("r", tuple(PROMPT), SamplingParams(max_tokens=1), hints=Hints(max_wait_ms=1000))
    engine.add_request(waiting)
    engine.step()
    now[0] += 0.4
    engine._exchange._starts["r"] = 2  # as if HBM had had two blocks of it when it asked first
    connector.scheduler.matches.pop("r")
    engine.step()
    heard = [hints.max_wait_ms for what, _, hints in connector.scheduler.hints if what == "match"]
    assert heard[0] == 1000 and heard[-1] == pytest.approx(600)
    engine.abort("r")
    engine.step()


@pytest.mark.parametrize(
    ("hints", "said"),
    [
        ({"priorty": 1}, "unknown hint 'priorty'; did you mean 'priority'?"),
        ({"zzz": 1}, "valid: max_wait_ms, no_load, no_store, pin_seconds, priority, store_generated"),
        ({"priority": 101}, "priority must be from -100 to 100"),
        ({"priority": 1.5}, "priority"),
        ({"pin_seconds": -1}, "pin_seconds must be from 0 to 604800"),
        ({"pin_seconds": "60"}, "pin_seconds"),
        ({"max_wait_ms": 1e9}, "max_wait_ms must be from 0 to 600000"),
        ({"no_store": 1}, "no_store"),
        ({"pin_seconds": 5, "no_store": True}, "contradict"),
        ([], "kv_hints"),
        ("no_store", "kv_hints"),
    ],
)
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_a_wrong_hint_is_named(running: Running, path: str, hints: object, said: str) -> None:
    body = {"prompt": "a"} if path == "/v1/completions" else {"messages": CHAT}
    answer = running.post(path, {**body, "kv_hints": hints})
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["param"] == "kv_hints" and said in error["message"], error


def test_no_hints_are_hints(running: Running) -> None:
    assert running.complete(kv_hints={}).status_code == 200
    assert running.complete(kv_hints=None).status_code == 200
    assert running.complete(kv_hints={"priority": None, "pin_seconds": 5}).status_code == 200
