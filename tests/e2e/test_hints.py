"""One server as its users meet it: a system prompt that was warmed outlives the traffic, hints do what they say, and all of
it is in the trace that it records."""

from __future__ import annotations

import random
import stat
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from kvtier.sim.traces import open_trace
from tests.support import until

from .support import TINY_BLOCK_BYTES, Server, kvtier, make_tiny_model

pytestmark = pytest.mark.slow

BLOCK, HBM, DRAM = 16, 24, 64
SYSTEM = "You answer in verse, and never in prose. " * 4
SEED = 7


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("record") / "trace.jsonl"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, trace: Path) -> Iterator[Server]:
    """HBM and DRAM are small, so that traffic pushes everything out of both."""
    model = make_tiny_model(tmp_path_factory.mktemp("hints") / "model")
    flags = [f"--model={model}", f"--hbm-blocks={HBM}", "--max-num-seqs=2", "--threads=1", "--gate=off"]
    tier = f"--tier=dram://?capacity={DRAM * TINY_BLOCK_BYTES}"
    with Server(*flags, tier, f"--record={trace}") as running:
        yield running


def usage(server: Server, prompt: object, tokens: int = 1, **hints: object) -> dict[str, int]:
    """Where a prompt's tokens came from."""
    kind = {"messages": prompt} if isinstance(prompt, list) and isinstance(prompt[0], dict) else {"prompt": prompt}
    path = "/v1/chat/completions" if "messages" in kind else "/v1/completions"
    body = {**kind, "max_tokens": tokens, "temperature": 0, "ignore_eos": True, "kv_hints": hints}
    answer = httpx.post(f"{server.url}{path}", json=body, timeout=60.0)
    assert answer.status_code == 200, answer.text
    found = answer.json()["usage"]
    return {"prompt": found["prompt_tokens"], **found["prompt_tokens_details"]}


def settle(server: Server) -> None:
    until(lambda: server.metric("kvtier_tier_queue_depth", tier="dram", kind="save") == 0, 60.0, "saves have ended")


def flood(server: Server, seed: int) -> None:
    """More prompts than HBM and DRAM hold together."""
    rng = random.Random(seed)
    for _ in range(16):
        usage(server, [rng.randrange(3, 250) for _ in range(8 * BLOCK)])
    settle(server)


def ids(seed: int, blocks: int) -> list[int]:
    rng = random.Random(1000 + seed)
    return [rng.randrange(3, 250) for _ in range(blocks * BLOCK + 1)]


def test_a_warm_prompt_outlives_the_traffic_and_its_first_user_hits(server: Server, tmp_path: Path) -> None:
    print(f"seed {SEED}")
    prompts = tmp_path / "system.txt"
    prompts.write_text(SYSTEM)
    ended = kvtier("warm", str(prompts), f"--base-url={server.url}", "--pin=1h", variables={})
    assert ended.returncode == 0, ended.stderr
    tokens = int(ended.stdout.split(": ")[1].split()[0])
    pinned = tokens // BLOCK
    until(lambda: server.metric("kvtier_tier_pinned_blocks", tier="dram") == pinned, 60.0, "the prompt is pinned")
    flood(server, SEED)
    chat = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": "And you?"}]
    found = usage(server, chat)
    assert found["external_tokens"] == pinned * BLOCK and found["hbm_tokens"] == 0
    assert server.metric("kvtier_tier_pins_refused_total", tier="dram") == 0


def test_pins_over_their_share_are_counted(server: Server) -> None:
    held = server.metric("kvtier_tier_pinned_blocks", tier="dram")
    usage(server, ids(1, 14), pin_seconds=60)
    until(
        lambda: server.metric("kvtier_tier_pins_refused_total", tier="dram") == held + 14 - DRAM // 4,
        60.0,
        "what is over the share is counted",
    )
    assert server.metric("kvtier_tier_pinned_blocks", tier="dram") == DRAM // 4


def test_what_is_not_to_be_stored_is_gone_with_hbm(server: Server) -> None:
    before = server.metric("kvtier_tier_saves_dropped_total", tier="dram", reason="no_store")
    usage(server, ids(2, 4), no_store=True)
    until(
        lambda: server.metric("kvtier_tier_saves_dropped_total", tier="dram", reason="no_store") == before + 4,
        60.0,
        "what is not saved is counted",
    )
    flood(server, SEED + 1)
    assert usage(server, ids(2, 4))["cached_tokens"] == 0
    assert server.metric("kvtier_tier_misses_total", tier="dram", reason="no_store") == 1


def test_a_request_that_loads_nothing_computes(server: Server) -> None:
    usage(server, ids(3, 4), pin_seconds=0)
    settle(server)
    usage(server, [5] * (HBM - 2) * BLOCK, no_store=True)
    alone = usage(server, ids(3, 4), no_load=True)
    assert alone["external_tokens"] == 0 and alone["cached_tokens"] < 4 * BLOCK
    usage(server, [6] * (HBM - 2) * BLOCK, no_store=True)
    loaded = usage(server, ids(3, 4))
    assert loaded["external_tokens"] > 0 and loaded["cached_tokens"] == 4 * BLOCK


def test_generated_blocks_are_saved_unless_they_are_not_to_be(server: Server) -> None:
    for number, keep, saved in ((4, True, 4), (5, False, 2)):
        before = server.metric("kvtier_tier_written_blocks_total", tier="dram")
        usage(server, ids(number, 2), 2 * BLOCK, store_generated=keep)
        settle(server)
        until(
            lambda before=before, saved=saved: (  # type: ignore[misc]  # of this round
                server.metric("kvtier_tier_written_blocks_total", tier="dram") == before + saved
            ),
            60.0,
            f"{saved} blocks are saved",
        )


def test_all_of_it_is_in_the_trace(server: Server, trace: Path) -> None:
    """The last of this file: it stops the server."""
    assert server.terminate() == 0, server.log
    requests = list(open_trace(trace))
    assert stat.S_IMODE(trace.stat().st_mode) == 0o600
    assert len(requests) >= 2 * 16 + 10
    assert all(len(one.chain) == one.input_tokens // BLOCK for one in requests)
    warm, user = requests[0], requests[17]
    assert user.chain[: len(warm.chain)] == warm.chain, "the first user began as the warm prompt does"
    assert max(one.output_tokens for one in requests) == 2 * BLOCK
    assert "verse" not in trace.read_text()
