"""Workloads as people run them, made up from one seed: token ids without meaning, so that any model takes them."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

from kvtier.errors import ConfigError
from kvtier.params import nearest


@dataclass(frozen=True, slots=True)
class Round:
    """What is said next, and how much is answered."""

    tokens: tuple[int, ...]
    answer: int
    """Tokens generated of each continuation."""
    n: int = 1
    """Continuations of the one prompt; the first one is what the conversation goes on with."""


@dataclass(frozen=True, slots=True)
class Conversation:
    """Rounds one after another, each beginning with the same text."""

    opening: tuple[int, ...]
    rounds: tuple[Round, ...]
    grows: bool = True
    """Whether a round's prompt has all that was said and answered before."""


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request that does not wait for others."""

    time_s: float
    prompt: tuple[int, ...]
    answer: int
    long: bool = False
    """One of the few whose prompt takes many steps' worth of tokens."""


class Draw:
    """Token ids below ``vocab``, and lengths multiplied by ``scale``. Lengths are the same for every vocabulary."""

    def __init__(self, vocab: int, seed: int, scale: float = 1.0) -> None:
        self.rng = random.Random(seed)
        self._ids = random.Random(seed + 1)
        self._vocab = vocab
        self._scale = scale

    def length(self, tokens: int) -> int:
        return max(1, round(tokens * self._scale))

    def text(self, tokens: int) -> tuple[int, ...]:
        return tuple(self._ids.randrange(self._vocab) for _ in range(self.length(tokens)))


def _chat(draw: Draw) -> list[Conversation]:
    system = draw.text(96)
    return [Conversation(system, tuple(Round(draw.text(64), draw.length(16)) for _ in range(4))) for _ in range(8)]


def _documents(draw: Draw) -> list[Conversation]:
    return [
        Conversation(draw.text(512), tuple(Round(draw.text(32), draw.length(16)) for _ in range(4)), grows=False)
        for _ in range(6)
    ]


def _agent(draw: Draw) -> list[Conversation]:
    tools = draw.text(512)
    return [
        Conversation(tools + draw.text(48), tuple(Round(draw.text(48), draw.length(12)) for _ in range(4)))
        for _ in range(6)
    ]


def _forks(draw: Draw) -> list[Conversation]:
    """Each problem is put twice, as by who votes over more answers than one batch gives."""
    conversations = []
    for _ in range(4):
        asked = Round(draw.text(32), draw.length(24), n=4)
        conversations.append(Conversation(draw.text(224), (asked, asked), grows=False))
    return conversations


def _unique(draw: Draw) -> list[Conversation]:
    return [Conversation((), (Round(draw.text(384), draw.length(16)),)) for _ in range(8)]


Workload: TypeAlias = Callable[[Draw], "list[Conversation]"]

WORKLOADS: Mapping[str, Workload] = {
    "chat": _chat,
    "documents": _documents,
    "agent": _agent,
    "forks": _forks,
    "unique": _unique,
}
"""Multi-round chat; questions about documents; an agent's loop behind one preamble of tools; self-consistency forks; prompts
that have nothing in common."""


def named(names: str) -> list[str]:
    """The workloads of a list with commas. Raises ``ConfigError`` for one that there is not."""
    chosen = list(dict.fromkeys(name.strip() for name in names.split(",")))  # twice, it would find itself in the tiers
    for name in chosen:
        if name not in WORKLOADS:
            raise ConfigError(f"--workloads: unknown workload {name!r}{nearest(name, WORKLOADS)}")
    return chosen


def arrivals(draw: Draw, count: int, rate: float) -> list[Arrival]:
    """Requests at Poisson times: short prompts behind a few shared beginnings, and every eighth a long one of its own.

    Some answers are long beside their prompts: what is running outgrows an HBM into which its prompts had fitted.
    """
    beginnings = [draw.text(64) for _ in range(4)]
    listed, now = [], 0.0
    for number in range(count):
        now += draw.rng.expovariate(rate)
        answer = draw.length(draw.rng.choice((16, 64, 160)))
        if number % 8 == 5:
            listed.append(Arrival(now, draw.text(640), answer, long=True))
        else:
            own = draw.text(draw.rng.choice((16, 48, 96)))
            listed.append(Arrival(now, draw.rng.choice(beginnings) + own, answer))
    return listed
