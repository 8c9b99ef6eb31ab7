"""What the demo drives: an engine over real tiers, served one prompt at a time, with proof of where each byte came from."""

from __future__ import annotations

import json
import os
import platform
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import torch

from kvtier.assembly.assemble import assemble
from kvtier.cli.demo import DemoFailure, Row
from kvtier.config import Settings
from kvtier.engine.engine import IDLE_SECONDS
from kvtier.engine.request import Request, RequestStats
from kvtier.engine.sampler import SamplingParams
from kvtier.errors import ModelError
from kvtier.store.store import TieredStore

ANSWER_TOKENS = 32
CHAT_TOKENS = 48
SETTLE_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class Served:
    """One prompt's answer and where its prompt's KV came from."""

    tier: str
    ttft: float
    prompt: int
    loaded: int
    computed: int
    external: int
    load_seconds: float | None
    read: dict[str, int]
    """Bytes of blocks that each tier below HBM read for it."""
    tokens: list[int]
    text: str
    logits: torch.Tensor
    """Behind the first token, float32 ``[vocab]``."""


Reference: TypeAlias = tuple[list[int], torch.Tensor]
"""Tokens and first logits of the cold run."""


def write_reference(served: Served, folder: Path) -> Path:
    """Write down what another process compares with (a float32 survives JSON: its double has every digit)."""
    path = folder / "reference.json"
    path.write_text(json.dumps({"tokens": served.tokens, "logits": served.logits.tolist()}))
    return path


def read_reference(path: Path) -> Reference:
    known = json.loads(path.read_text())
    return known["tokens"], torch.tensor(known["logits"], dtype=torch.float32)


class Showcase:
    """An assembled engine and store, and the prompts of the demo."""

    def __init__(self, settings: Settings, document: str) -> None:
        self._assembly = assemble(settings, require_all=True)
        self._engine = self._assembly.engine
        assert self._assembly.store is not None, "the demo has tiers"
        self._store: TieredStore = self._assembly.store
        self._document = document
        self._count = 0
        self.model = self._engine.identity.model
        self.exact = self._engine.config.exact
        if self._engine.tokenizer is None:
            raise ModelError(f"{self.model} has no tokenizer, which the demo needs")
        self._tokenizer = self._engine.tokenizer

    def machine(self) -> str:
        """The hardware, for the table's title."""
        return f"{platform.machine()}, {torch.get_num_threads()} compute threads of {os.cpu_count()} cores"

    def close(self) -> None:
        self._assembly.close()

    def warm_up(self) -> None:
        """Another prompt of the same length, cold and from the cache, so that no row pays for first use."""
        words = self._document.split()
        other = " ".join(reversed(words))
        for _ in range(2):
            self._serve("warm up", self._prompt([("user", other)]), "warm up", ANSWER_TOKENS)

    def empty_above(self, tier: str) -> None:
        """Really empty every tier that is faster than ``tier``."""
        if tier == "hbm":
            return
        self._engine.reset_prefix_cache()
        if self._engine.pool.ready:
            raise DemoFailure(f"{self._engine.pool.ready} blocks are still in HBM")
        for above in ("dram", "nvme"):
            if tier in (above, "dram"):
                break
            self._store.empty(above)
            left = self._store.held(above)
            if left:
                raise DemoFailure(f"{left} blocks are still in {above}")
        self._store.drop_page_caches()

    def serve(self, tier: str, question: str, salt: str) -> Served:
        """Answer one question about the document."""
        return self._serve(tier, self._prompt([("user", self._asked(question))]), salt, ANSWER_TOKENS)

    def chat(self, questions: Sequence[str], salt: str) -> Iterator[tuple[str, Served]]:
        """A conversation that begins with the document; each turn sends all of it again."""
        messages: list[tuple[str, str]] = []
        for number, question in enumerate(questions):
            messages.append(("user", question if number else self._asked(question)))
            served = self._serve("chat", self._prompt(messages), salt, CHAT_TOKENS)
            messages.append(("assistant", served.text))
            yield question, served

    def row(self, served: Served, reference: Reference) -> Row:
        """The table's line, after proving that every byte came from where it says."""
        self._prove(served)
        tokens, logits = reference
        load_bytes = served.external // self._store.geometry.block_tokens * self._store.geometry.block_bytes
        return Row(
            tier=served.tier,
            ttft_s=served.ttft,
            prompt_tokens=served.prompt,
            loaded_tokens=served.loaded,
            computed_tokens=served.computed,
            load_bytes=load_bytes,
            load_gb_s=load_bytes / served.load_seconds / 1e9 if load_bytes and served.load_seconds else None,
            io=self._store.io(served.tier) if load_bytes else None,
            logits_equal=bool(torch.equal(served.logits, logits)),
            tokens_equal=served.tokens == tokens,
        )

    def _asked(self, question: str) -> str:
        return f"{self._document}\n\nAnswer in one sentence, from the text above. {question}"

    def _prompt(self, messages: Sequence[tuple[str, str]]) -> list[int]:
        chat = self._tokenizer.apply_chat_template([{"role": role, "content": text} for role, text in messages])
        return self._tokenizer.encode(chat, add_special=False)

    def _serve(self, tier: str, prompt: list[int], salt: str, most: int) -> Served:
        self._count += 1
        name = f"demo {self._count}"
        before = self._reads()
        sampling = SamplingParams(temperature=0.0, max_tokens=most)
        request = Request(name, tuple(prompt), sampling, salt=salt, capture_logits=True)
        stats = self._engine.add_request(request)
        tokens: list[int] = []
        text = ""
        while stats.finished is None:
            for output in self._engine.step():
                tokens += output.tokens
                text += output.text
            if not self._engine.progressed:
                time.sleep(IDLE_SECONDS)
        read = {tier: count - before[tier] for tier, count in self._reads().items()}
        if not (self._engine.settle(SETTLE_SECONDS) and self._store.drain(SETTLE_SECONDS)):
            raise DemoFailure(f"saves did not end within {SETTLE_SECONDS:.0f} s")
        return self._served(tier, name, stats, read, tokens, text)

    def _served(
        self, tier: str, name: str, stats: RequestStats, read: dict[str, int], tokens: list[int], text: str
    ) -> Served:
        timing = self._store.timing(name)
        assert stats.ttft is not None, "it has answered"
        assert stats.first_logits is not None, "they were asked for"
        return Served(
            tier=tier,
            ttft=stats.ttft,
            prompt=stats.prompt_tokens,
            loaded=stats.cached_tokens,
            computed=stats.computed_tokens,
            external=stats.external_tokens,
            load_seconds=timing.seconds if timing else None,
            read=read,
            tokens=tokens,
            text=text,
            logits=stats.first_logits,
        )

    def _reads(self) -> dict[str, int]:
        metrics = self._assembly.metrics
        return {tier: int(metrics.value("kvtier_tier_read_bytes_total", tier=tier)) for tier in self._store.health()}

    def _prove(self, served: Served) -> None:
        geometry = self._store.geometry
        nbytes = served.external // geometry.block_tokens * geometry.block_bytes
        expected = dict.fromkeys(served.read, 0)
        if served.tier in expected:
            expected["dram"] = expected[served.tier] = nbytes
        if served.read != expected:
            raise DemoFailure(f"row {served.tier}: tiers read {served.read}, expected {expected}")
        wrong = served.external if served.tier in ("cold", "hbm") else served.loaded - served.external
        if wrong or (served.tier != "cold") != bool(served.loaded):
            raise DemoFailure(
                f"row {served.tier}: {served.loaded} tokens loaded, {served.external} of them from below HBM"
            )
