"""`kvtier serve` on the real model with eight chats at once, whose KV is several times what HBM and DRAM hold."""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import pytest

from kvtier.config import EngineSettings
from tests.support import until

from .support import House, Server, shipped_text, valkey, without_cache

pytestmark = [pytest.mark.model, pytest.mark.timeout(1200)]

CHATS, TURNS, NEW_TOKENS = 8, 4, 16
BLOCK_BYTES = 368_640
HBM_BLOCKS, DRAM_BLOCKS, NVME_BLOCKS = 72, 144, 360
EPS = 0.05
"""Where the two best logits are closer than this, blocks made by decoding may choose the other token."""


@dataclass
class Turn:
    """One request of a chat, and what came back."""

    messages: list[dict[str, str]]
    answer: str
    prompt_tokens: int
    cached_tokens: int


@dataclass
class Chat:
    """A conversation: each turn sends all of it again."""

    questions: list[str]
    turns: list[Turn] = field(default_factory=list)

    async def ask(self, http: httpx.AsyncClient, question: str) -> None:
        messages = [{"role": "user", "content": question}]
        if self.turns:
            last = self.turns[-1]
            messages = [*last.messages, {"role": "assistant", "content": last.answer}, *messages]
        body = {"messages": messages, "temperature": 0, "max_tokens": NEW_TOKENS, "ignore_eos": True}
        got = await http.post("/v1/chat/completions", json=body)
        assert got.status_code == 200, got.text
        usage, answer = got.json()["usage"], got.json()["choices"][0]["message"]["content"]
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        self.turns.append(Turn(messages, answer, usage["prompt_tokens"], cached))


def make_chats(seed: int, count: int = CHATS) -> list[Chat]:
    """Questions about stretches of shipped text: a long one first, then shorter ones."""
    rng = random.Random(seed)
    words = shipped_text().split()

    def stretch(length: int) -> str:
        start = rng.randrange(len(words) - length)
        return " ".join(words[start : start + length])

    return [
        Chat([f"{stretch(120)}\n\nWhat is this about?", *(f"{stretch(50)}\n\nAnd this?" for _ in range(TURNS - 1))])
        for _ in range(count)
    ]


async def talk(url: str, chats: list[Chat]) -> None:
    """All chats at once, turn by turn, so that each comes back when the others have filled the pools."""
    async with httpx.AsyncClient(base_url=url, timeout=300.0) as http:
        for turn in range(max(len(chat.questions) for chat in chats)):
            asked = [chat.ask(http, chat.questions[turn]) for chat in chats if turn < len(chat.questions)]
            await asyncio.gather(*asked)


def serve(*tiers: str) -> Server:
    flags = [f"--hbm-blocks={HBM_BLOCKS}", f"--max-num-seqs={CHATS}", *(f"--tier={tier}" for tier in tiers)]
    return Server("--model=smollm2", *flags)


def hits(server: Server) -> dict[str, int]:
    return {tier: int(server.metric("kvtier_tier_hits_total", tier=tier)) for tier in ("dram", "nvme", "redis")}


def expect_idle(server: Server) -> None:
    """No lease, no transfer that waits or runs, nobody degraded."""

    def held() -> float:
        gauges = [server.metric(f"kvtier_tier_{name}", tier="dram") for name in ("matches", "leased_blocks")]
        gauges += [
            server.metric("kvtier_tier_queue_depth", tier=tier, kind=kind)
            for tier in ("dram", "nvme", "redis")
            for kind in ("load", "save")
        ]
        return sum(gauges)

    until(lambda: held() == 0, 60.0, "nothing is leased or queued")
    assert server.health()["status"] == "ok"


def expect_clean_end(server: Server) -> None:
    assert server.terminate() == 0, server.log
    assert "integrity: every block is accounted for" in server.log
    assert "not everything could be written down" not in server.log


def expect_same_without_cache(chats: list[Chat]) -> None:
    """Each turn's answer again, computed from nothing; a token may differ only where the two best were within EPS."""
    engine = EngineSettings(model="smollm2", hbm_blocks=600, max_num_seqs=CHATS)
    with House((), without_cache(engine)) as house:
        tokenizer = house.tokenizer
        turns = [turn for chat in chats for turn in chat.turns]
        prompts = [tokenizer.encode(tokenizer.apply_chat_template(turn.messages), False) for turn in turns]
        assert [len(prompt) for prompt in prompts] == [turn.prompt_tokens for turn in turns]
        order = sorted(range(len(turns)), key=lambda number: len(prompts[number]))
        least, differing = float("inf"), 0
        for start in range(0, len(order), CHATS):
            batch = order[start : start + CHATS]
            for number, served in zip(
                batch, house.serve([prompts[n] for n in batch], NEW_TOKENS, gaps=True), strict=True
            ):
                assert served.stats.cached_tokens == 0
                least = min(least, *served.gaps)
                answer = turns[number].answer
                if tokenizer.decode(served.tokens) != answer:
                    differing += 1
                    agreed = next(
                        n
                        for n in range(NEW_TOKENS + 1)
                        if not answer.startswith(tokenizer.decode(served.tokens[: n + 1]))
                    )
                    gap = served.gaps[agreed]
                    print(f"turn of {len(prompts[number])} tokens: token {agreed} differs, the gap there is {gap:.4f}")
                    assert gap < EPS, (answer, tokenizer.decode(served.tokens))
    print(f"{len(turns)} answers, {differing} differ; the smallest gap of the two best logits was {least:.4f}")


def test_eight_chats_over_four_tiers_and_after_restarts(tmp_path: Path, seed: int) -> None:
    """Two chats begin on another host. All tiers, answers as if nothing were cached; then new processes over what is left."""
    chats = make_chats(seed)
    dram = f"dram://?capacity={DRAM_BLOCKS * BLOCK_BYTES}"
    nvme = f"nvme://{tmp_path}/nvme?capacity={NVME_BLOCKS * (BLOCK_BYTES + 4096) + (6 << 20)}"
    with valkey(tmp_path / "valkey") as redis:
        elsewhere = [Chat(chat.questions[:1]) for chat in chats[:2]]
        with serve(dram, f"{redis.url}?write=through") as other_host:
            asyncio.run(talk(other_host.url, elsewhere))
            assert other_host.terminate() == 0, other_host.log
        with serve(dram, nvme, redis.url) as server:
            asyncio.run(talk(server.url, chats))
            expect_idle(server)
            found = hits(server)
            blocks = sum((chat.turns[-1].prompt_tokens + NEW_TOKENS) // 16 for chat in chats)
            print(f"seed {seed}: {blocks} blocks, HBM {HBM_BLOCKS}, DRAM {DRAM_BLOCKS}; hits {found}")
            print([[(turn.cached_tokens, turn.prompt_tokens) for turn in chat.turns] for chat in chats])
            assert blocks >= 3 * HBM_BLOCKS and blocks >= 1.5 * DRAM_BLOCKS
            assert min(found.values()) > 0, found
            pairs = [pair for chat in chats for pair in zip(chat.turns, chat.turns[1:], strict=False)]
            kept = sum(later.cached_tokens for _, later in pairs) / sum(
                first.prompt_tokens + NEW_TOKENS for first, _ in pairs
            )
            print(f"of what a chat had sent and got before, {100 * kept:.0f} % came from the cache")
            assert kept > 0.5
            expect_clean_end(server)
        for tier, below in (("nvme", nvme), ("redis", redis.url)):
            again = [Chat(chat.questions[:1]) for chat in chats[: CHATS // 2]]
            with serve(dram, below) as server:
                asyncio.run(talk(server.url, again))
                cached = [chat.turns[0].cached_tokens for chat in again]
                print(f"first turns after a restart, from {tier}: {cached} tokens; hits {hits(server)}")
                assert hits(server)[tier] > 0 and sum(cached) > 0
                assert [chat.turns[0].answer for chat in again] == [
                    chat.turns[0].answer for chat in chats[: CHATS // 2]
                ]
                expect_clean_end(server)
    expect_same_without_cache(chats)
