"""Tools through the chat template, log probabilities, and /tokenize, with the real ``openai`` client where it knows them."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from kvtier.engine.request import Request
from kvtier.engine.sampler import SamplingParams

from .serving import CHAT, Running
from .support import make_engine, make_tokenizer

TEMPLATE = (
    "{% for tool in tools or [] %}[{{ tool | tojson }}]{% endfor %}"
    "{% for message in messages %}<{{ message.role }}>{{ message.content }}"
    "{% for call in message.tool_calls or [] %}{{ call.function.name }}={{ call.function.arguments.city }}{% endfor %}"
    ";{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)
TOOL: dict[str, Any] = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
CALL = {
    "id": "c1",
    "type": "function",
    "function": {"name": "weather", "arguments": json.dumps({"city": "Oslo"})},
}
LOOP: list[Any] = [
    *CHAT,
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "c1", "content": "rain"},
]


@pytest.fixture(scope="module")
def running(one_thread: None) -> Iterator[Running]:
    with Running(template=TEMPLATE) as server:
        yield server


@pytest.fixture(scope="module")
def plain(one_thread: None) -> Iterator[Running]:
    """Its template knows nothing of tools."""
    with Running() as server:
        yield server


@pytest.fixture
def client(running: Running) -> Iterator[Any]:
    """An ``openai.OpenAI``, taken for whatever a test makes of it."""
    with openai.OpenAI(base_url=f"{running.url}/v1", api_key="none", max_retries=0) as made:
        yield made


def tokens_of(running: Running, **body: object) -> str:
    """The prompt that the server makes of a conversation."""
    answer = running.post("/tokenize", body)
    assert answer.status_code == 200, answer.text
    return make_tokenizer().decode(answer.json()["tokens"], skip_special=False)


# -- tools


def test_tools_reach_the_model_as_its_template_writes_them(running: Running, client: Any) -> None:
    shown = tokens_of(running, messages=CHAT, tools=[TOOL])
    assert shown == f"[{json.dumps(TOOL)}]<user>hello there;<assistant>"
    asked: dict[str, Any] = {"model": "tiny", "messages": CHAT, "max_tokens": 4, "temperature": 0}
    with_tools = client.chat.completions.create(**asked, tools=[TOOL], tool_choice="auto")
    assert with_tools.usage is not None and with_tools.usage.prompt_tokens == len(shown)
    unchosen = client.chat.completions.create(**asked, tools=[TOOL], tool_choice="none")
    assert unchosen.usage is not None and unchosen.usage.prompt_tokens == len("<user>hello there;<assistant>")


def test_a_loop_of_calls_and_answers_is_shown(running: Running, client: Any) -> None:
    assert tokens_of(running, messages=LOOP) == "<user>hello there;<assistant>weather=Oslo;<tool>rain;<assistant>"
    done = client.chat.completions.create(model="tiny", messages=LOOP, tools=[TOOL], max_tokens=3, temperature=0)
    assert done.usage is not None and done.usage.completion_tokens == 3


def test_a_template_that_ignores_tools_is_no_silent_drop(plain: Running) -> None:
    for body, param, said in (
        ({"messages": CHAT, "tools": [TOOL]}, "tools", "shows it no tools"),
        ({"messages": LOOP}, "messages", "tool_calls"),
    ):
        for path in ("/v1/chat/completions", "/tokenize"):
            answer = plain.post(path, body)
            assert answer.status_code == 400, answer.text
            assert answer.json()["error"]["param"] == param and said in answer.json()["error"]["message"]
    assert plain.post("/v1/chat/completions", {"messages": CHAT, "tools": [], "max_tokens": 1}).status_code == 200


def test_a_template_that_ignores_answers_of_tools_is_told() -> None:
    with Running(
        template="{% for m in messages if m.role != 'tool' %}{{ m.content }}{{ m.tool_calls }}{% endfor %}"
    ) as server:
        answer = server.post("/v1/chat/completions", {"messages": LOOP})
        assert answer.status_code == 400 and "what tools answer" in answer.text


@pytest.mark.parametrize(
    "message",
    [
        {"role": "user", "content": "x", "tool_calls": [CALL]},
        {"role": "assistant", "content": "x", "tool_call_id": "c1"},
        {"role": "tool", "content": "x"},
        {"role": "assistant", "content": None, "tool_calls": []},
        {"role": "assistant", "tool_calls": [{**CALL, "function": {"name": "weather", "arguments": "{"}}]},
        {"role": "assistant", "tool_calls": [{**CALL, "function": {"name": "weather", "arguments": "[" * 100_000}}]},
        {"role": "assistant", "tool_calls": [{**CALL, "type": "custom"}]},
    ],
)
def test_a_wrong_turn_of_a_loop_is_named(running: Running, message: dict[str, object]) -> None:
    answer = running.post("/v1/chat/completions", {"messages": [*CHAT, message]})
    assert answer.status_code == 400 and answer.json()["error"]["param"] == "messages", answer.text


def test_too_many_tools_and_too_deep_ones_are_refused(running: Running) -> None:
    deep: dict[str, Any] = {}
    for _ in range(400):
        deep = {"deeper": deep}
    nested = {"type": "function", "function": {"name": "f", "parameters": deep}}
    for tools, codes in (([TOOL] * 129, {400}), ([nested], {200, 400})):
        answer = running.post("/v1/chat/completions", {"messages": CHAT, "tools": tools, "max_tokens": 1})
        assert answer.status_code in codes, answer.text[:300]


# -- log probabilities


def told(prompt: list[int], count: int, best: int, **more: Any) -> list[tuple[int, float, list[tuple[int, float]]]]:
    """What the engine itself says of its tokens."""
    engine = make_engine(96)
    sampling = SamplingParams(max_tokens=count, logprobs=best, ignore_eos=True, **more)
    engine.add_request(Request("r", tuple(prompt), sampling))
    found = []
    while engine.has_work:
        for output in engine.step():
            assert output.logprob is not None
            chosen, others = output.logprob
            found.append((chosen.token, chosen.value, [(each.token, each.value) for each in others]))
    return found


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("best", [0, 3])
def test_completions_tell_log_probabilities(client: Any, best: int, streamed: bool) -> None:
    ids = make_tokenizer().encode("some words")
    ask: dict[str, Any] = {"model": "tiny", "prompt": ids, "max_tokens": 12, "seed": 5, "logprobs": best}
    ask["extra_body"] = {"ignore_eos": True}
    if streamed:
        chunks = [chunk.choices[0] for chunk in client.completions.create(**ask, stream=True)]
        text, parts = "".join(chunk.text for chunk in chunks), [chunk.logprobs for chunk in chunks]
    else:
        choice = client.completions.create(**ask).choices[0]
        text, parts = choice.text, [choice.logprobs]
    tokens = [token for part in parts if part for token in part.tokens or []]
    values = [value for part in parts if part for value in part.token_logprobs or []]
    tops = [top for part in parts if part for top in part.top_logprobs or []]
    offsets = [offset for part in parts if part for offset in part.text_offset or []]
    expected = told(ids, 12, best, seed=5)
    tokenizer = make_tokenizer()
    assert tokens == [tokenizer.token_text(token) for token, _, _ in expected]
    assert values == pytest.approx([value for _, value, _ in expected], abs=1e-5)
    for (token, value, others), top in zip(expected, tops, strict=True):
        names = {tokenizer.token_text(token): value, **{tokenizer.token_text(each): v for each, v in others}}
        assert top == pytest.approx(names, abs=1e-5)
    assert offsets == sorted(offsets) and offsets[0] == 0 and offsets[-1] <= len(text)
    for token, offset in zip(tokens, offsets, strict=True):
        if token.isascii() and not token.startswith("bytes:"):
            assert token in text[offset : offset + 3], "where it stands in the text"


@pytest.mark.parametrize("streamed", [False, True])
def test_chats_tell_log_probabilities(client: Any, streamed: bool) -> None:
    ask: dict[str, Any] = {"model": "tiny", "messages": CHAT, "max_tokens": 10, "temperature": 0, "logprobs": True}
    ask |= {"top_logprobs": 2, "n": 2, "extra_body": {"ignore_eos": True}}
    entries: dict[int, list[Any]] = {0: [], 1: []}
    if streamed:
        for chunk in client.chat.completions.create(**ask, stream=True):
            for part in chunk.choices:
                entries[part.index] += (part.logprobs and part.logprobs.content) or []
    else:
        for choice in client.chat.completions.create(**ask).choices:
            entries[choice.index] += (choice.logprobs and choice.logprobs.content) or []
    tokenizer = make_tokenizer()
    expected = told(tokenizer.encode("<user>hello there;<assistant>"), 10, 2, temperature=0.0)
    for found in entries.values():
        assert [entry.token for entry in found] == [tokenizer.token_text(token) for token, _, _ in expected]
        assert [bytes(entry.bytes) for entry in found] == [tokenizer.token_bytes(token) for token, _, _ in expected]
        for entry, (_, value, others) in zip(found, expected, strict=True):
            assert entry.logprob == pytest.approx(value, abs=1e-5)
            assert [top.logprob for top in entry.top_logprobs] == pytest.approx([v for _, v in others], abs=1e-5)
            assert all(math.exp(top.logprob) <= 1 for top in entry.top_logprobs)


def test_who_asks_for_none_is_told_none(client: Any) -> None:
    done = client.completions.create(model="tiny", prompt="a", max_tokens=2)
    assert done.choices[0].logprobs is None
    chat = client.chat.completions.create(model="tiny", messages=CHAT, max_tokens=2, logprobs=False)
    assert chat.choices[0].logprobs is None
    assert client.completions.create(model="tiny", prompt="a", max_tokens=2, logprobs=False).choices[0].logprobs is None


def test_the_token_that_ends_a_choice_is_told_too(running: Running) -> None:
    """One entry for each generated token, as the usage counts them."""
    ids = make_tokenizer().encode("some words")
    second = told(ids, 2, 0, temperature=0.0)[1][0]
    body = {"prompt": ids, "max_tokens": 8, "temperature": 0, "logprobs": 0, "stop_token_ids": [second]}
    answer = running.post("/v1/completions", body).json()
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert len(answer["choices"][0]["logprobs"]["tokens"]) == answer["usage"]["completion_tokens"] == 2


# -- /tokenize


def test_tokenize_says_what_a_text_is(running: Running) -> None:
    answer = running.post("/tokenize", {"model": "tiny", "prompt": "aü", "return_token_strs": True}).json()
    assert answer == {
        "count": 3,
        "max_model_len": running.core.max_length,
        "tokens": make_tokenizer().encode("aü"),
        "token_strs": ["a", "bytes:\\xc3", "bytes:\\xbc"],
    }
    assert tokens_of(running, messages=CHAT, add_generation_prompt=False) == "<user>hello there;"


@pytest.mark.parametrize(
    ("body", "status", "param"),
    [
        ({}, 400, "prompt"),
        ({"prompt": "a", "messages": CHAT}, 400, "prompt"),
        ({"prompt": "a", "tools": [TOOL]}, 400, "tools"),
        ({"prompt": "a" * ((2 << 20) + 1)}, 400, "prompt"),
        ({"prompt": ["a"]}, 400, "prompt"),
        ({"prompt": "a", "temperature": 1}, 400, "temperature"),
        ({"messages": []}, 400, "messages"),
        ({"prompt": "a", "model": "other"}, 404, None),
    ],
)
def test_a_wrong_tokenize_is_named(running: Running, body: dict[str, object], status: int, param: str | None) -> None:
    answer = running.post("/tokenize", body)
    assert answer.status_code == status and answer.json()["error"]["param"] == param, answer.text
