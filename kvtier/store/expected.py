"""Requests that have come and are not matched yet, and what tiers that others share have said of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

from kvtier.key import Address, Span
from kvtier.store.match import TieredMatch

KNOWN_SECONDS = 1.0
"""How long an answer counts: others write and evict there. Where a request waits for longer, its match asks again."""
MOST_EXPECTED = 1024
"""Requests; more wait in no line that is worth asking ahead for."""


@dataclass(slots=True, eq=False)
class Expected:
    """One request. Changed under the store's lock."""

    span: Span
    start: int
    """The first block that it lacks in HBM."""
    addresses: Sequence[Address]
    """Of the span."""
    since: float
    unanswered: set[str]
    """Tiers that have been asked and have not answered."""
    present: dict[str, int] = field(default_factory=dict)
    """By tier: up to which block behind ``start`` it has everything."""
    known: Future[None] = field(default_factory=Future)
    """Done when all have answered."""
    match: TieredMatch | None = None
    """Where the request has been matched before all had answered."""


class Expectations:
    """By request id. Called under the store's lock."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._of: dict[str, Expected] = {}

    def __len__(self) -> int:
        return len(self._of)

    def takes(self, request_id: str) -> bool:
        """False where there are too many, or where that request is expected already."""
        return len(self._of) < MOST_EXPECTED and request_id not in self._of

    def add(self, request_id: str, span: Span, start: int, addresses: Sequence[Address], asked: set[str]) -> Expected:
        return self._of.setdefault(request_id, Expected(span, start, addresses, self._clock(), asked))

    def forget(self, request_id: str) -> None:
        self._of.pop(request_id, None)

    def met(self, request_id: str, span: Span, start: int) -> Expected | None:
        """What was asked for a request that is matched now, if that still counts and is about the same blocks."""
        expected = self._of.pop(request_id, None)
        if expected is None or self._clock() - expected.since > KNOWN_SECONDS:
            return None
        return expected if expected.start == start and expected.span == span else None
