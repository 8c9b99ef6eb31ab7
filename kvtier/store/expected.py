"""Requests that have come and are not matched yet, and what tiers that others share have said of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

from kvtier.key import Address
from kvtier.store.match import TieredMatch

KNOWN_SECONDS = 1.0
"""How long an answer counts: others write and evict there. Where a request waits for longer, its match asks again."""
MOST_EXPECTED = 1024
"""Requests; more wait in no line that is worth asking ahead for."""


@dataclass(slots=True, eq=False)
class Expected:
    """One request. Changed under the store's lock."""

    addresses: Sequence[Address]
    """What it lacks in HBM."""
    since: float
    unanswered: set[str]
    """Tiers that have been asked and have not answered."""
    present: dict[str, int] = field(default_factory=dict)
    """By tier: index into ``addresses`` up to which it has everything."""
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

    def add(self, request_id: str, addresses: Sequence[Address], asked: set[str]) -> Expected | None:
        """None where there are too many, or where that request is expected already."""
        if len(self._of) >= MOST_EXPECTED or request_id in self._of:
            return None
        return self._of.setdefault(request_id, Expected(addresses, self._clock(), asked))

    def forget(self, request_id: str) -> None:
        self._of.pop(request_id, None)

    def meet(self, match: TieredMatch) -> None:
        """Give a new match the answers that are there; for the others it waits, as if it had asked itself."""
        expected = self._of.pop(match.request_id, None)
        if expected is None or self._clock() - expected.since > KNOWN_SECONDS:
            return
        if expected.addresses == match.addresses[match.start :]:
            match.present.update(expected.present)
            match.probing = bool(expected.unanswered)
            expected.match = match
