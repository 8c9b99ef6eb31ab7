"""Who asks when, and what: prompts made up or after a trace, sent at random, at a trace's times, or by so many users.

Texts are short English words, of which common tokenizers make a token each; blocks of equal name have equal words, so that
what shares a prefix in a trace shares it in its prompts. Everything is drawn from one seed.
"""

from __future__ import annotations

import functools
import itertools
import random
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from typing import TypeAlias

from kvtier.bench.goodput import MOST_RATE
from kvtier.errors import ConfigError
from kvtier.sim.traces import Reference, Trace

try:
    import aiofiles.os
except ImportError as error:
    raise ConfigError("the load generator needs aiohttp and aiofiles; run: pip install 'kvtier[bench]'") from error

TOGETHER = 64
"""Requests that are taken from a trace at a time."""
MOST_TOKENS = 1 << 22
"""Of one prompt, and of all shared beginnings together."""

_COMMON = (
    "the of and to in is that for it as was with be by on not he his but at are this have from or had an they which one you "
    "were all her she there would their we him been has when who will no more if out so up said what its about than into "
    "them can only other time new some could these two may first then do any like my now over such our man even most made "
    "after also did many off before must well back through years much where your way down should because long each just "
    "state those people too how little good world make very year still see work life own both under against"
)
WORDS = tuple(_COMMON.split())
"""Of which common tokenizers make one token each, with the space before it."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """One request, before it is written for an endpoint."""

    tokens: str | list[int]
    """Text, or token ids."""
    output_tokens: int
    time_s: float | None = None
    """When a trace has it sent, in seconds from the trace's beginning."""


Spell: TypeAlias = Callable[[random.Random, int], "list[str] | list[int]"]
"""Draws so many tokens."""


def words(rng: random.Random, count: int) -> list[str]:
    return rng.choices(WORDS, k=count)


def ids_below(vocab: int) -> Spell:
    """Token ids below ``vocab``, for servers without a tokenizer."""
    if vocab < 1:
        raise ConfigError(f"--token-ids {vocab}: there are no ids below that")

    def drawn(rng: random.Random, count: int) -> list[int]:
        return [rng.randrange(vocab) for _ in range(count)]

    return drawn


@dataclass(frozen=True, slots=True)
class MadeUp:
    """Prompts of one length: the beginning is one of a few, the rest its own."""

    prompt_tokens: int
    output_tokens: int
    shared_tokens: int = 0
    """So many tokens at the beginning are another prompt's too."""
    prefixes: int = 1
    """Different beginnings."""

    def __post_init__(self) -> None:
        if min(self.prompt_tokens, self.output_tokens, self.prefixes) < 1 or self.shared_tokens < 0:
            raise ConfigError("prompts, outputs and prefixes are at least 1 token or piece")
        if self.shared_tokens > self.prompt_tokens:
            raise ConfigError(f"{self.shared_tokens} shared tokens are more than the {self.prompt_tokens} of a prompt")
        if max(self.prompt_tokens, self.shared_tokens * self.prefixes, self.prefixes) > MOST_TOKENS:
            raise ConfigError(f"a prompt, and the beginnings together, have at most {MOST_TOKENS:,} tokens")

    async def prompts(self, spell: Spell, seed: int) -> AsyncIterator[Prompt]:
        """Without end."""
        rng = random.Random(seed)
        beginnings = [spell(rng, self.shared_tokens) for _ in range(self.prefixes)]
        while True:
            own = spell(rng, self.prompt_tokens - self.shared_tokens)
            yield Prompt(_joined([rng.choice(beginnings), own]), self.output_tokens)


@dataclass(frozen=True, slots=True)
class OfTrace:
    """A trace's requests, in its order."""

    trace: Trace
    shrink: int = 1
    """Every length is divided by it, so that a small server can take them."""

    def __post_init__(self) -> None:
        if self.shrink < 1:
            raise ConfigError(f"--shrink {self.shrink}: lengths are divided by at least 1")

    async def prompts(self, spell: Spell, seed: int) -> AsyncIterator[Prompt]:
        """The file is read a few requests at a time, by a thread."""
        rng = random.Random(seed)
        size = max(1, self.trace.block_tokens // self.shrink)

        @functools.lru_cache(maxsize=4096)
        def block(name: bytes) -> list[str] | list[int]:
            return spell(random.Random(name + seed.to_bytes(8, "little")), size)

        references, broken = iter(self.trace), None
        while broken is None:
            some, broken = await _drawn(references)
            if not some and broken is None:
                return
            for each in some:
                tokens = max(1, each.input_tokens // self.shrink)
                if tokens > MOST_TOKENS:
                    raise ConfigError(
                        f"{self.trace.path}: a prompt of {tokens:,} tokens at {each.time_s:g} s; --shrink makes them smaller"
                    )
                shared = [block(bytes(name)) for name in each.chain[: tokens // size]]
                rest = spell(rng, max(0, tokens - size * len(shared)))
                yield Prompt(_joined([*shared, rest]), max(1, each.output_tokens // self.shrink), each.time_s)
        raise broken


@aiofiles.os.wrap  # type: ignore[untyped-decorator]  # it ships no types
def _drawn(references: Iterator[Reference]) -> tuple[list[Reference], ConfigError | None]:
    """What comes next, and what is wrong with the line behind it."""
    drawn: list[Reference] = []
    try:
        drawn.extend(itertools.islice(references, TOGETHER))  # what comes before it raises is kept
    except ConfigError as broken:
        return drawn, broken
    return drawn, None


def _joined(pieces: list[list[str] | list[int]]) -> str | list[int]:
    flat = list(itertools.chain.from_iterable(pieces))
    return flat if flat and isinstance(flat[0], int) else " ".join(flat)  # type: ignore[arg-type, return-value]  # all of one kind


@dataclass(frozen=True, slots=True)
class Poisson:
    """Independent of what has been answered: exponential gaps."""

    rate: float
    """Requests per second."""

    def __post_init__(self) -> None:
        if not 0 < self.rate < MOST_RATE:
            raise ConfigError(f"a rate of {self.rate:g} requests per second cannot be sent")

    def times(self, seed: int) -> Callable[[Prompt], float]:
        rng = random.Random(seed)
        now = 0.0

        def due(_: Prompt) -> float:
            nonlocal now
            now += rng.expovariate(self.rate)
            return now

        return due

    def __str__(self) -> str:
        return f"Poisson, {self.rate:g} requests/s"


@dataclass(frozen=True, slots=True)
class Recorded:
    """When the trace says."""

    speed: float = 1.0
    """How many times faster."""

    def __post_init__(self) -> None:
        if not 0 < self.speed < 1e6:
            raise ConfigError(f"a trace cannot be sent {self.speed:g} times as fast")

    def times(self, seed: int) -> Callable[[Prompt], float]:
        first: float | None = None

        def due(prompt: Prompt) -> float:
            nonlocal first
            assert prompt.time_s is not None, "a trace's prompts have times"
            first = prompt.time_s if first is None else first
            return (prompt.time_s - first) / self.speed

        return due

    def __str__(self) -> str:
        return f"the trace's times, {self.speed:g} times as fast"


@dataclass(frozen=True, slots=True)
class Users:
    """Each asks again as soon as it has been answered."""

    count: int

    def __post_init__(self) -> None:
        if not 0 < self.count <= 10_000:
            raise ConfigError(f"{self.count} users cannot ask; give from 1 to 10,000")

    def __str__(self) -> str:
        return f"{self.count} users, each asking again when answered"


Arrivals: TypeAlias = "Poisson | Recorded | Users"
