"""Blocks are saved and nothing is hit: says so, and in which field of its identity an engine differs from who filled the tiers.

An identity that differs in one field makes every key another one, and nothing fails: there are just no hits. Only where a
tier already had blocks of another identity, and none of ours, is that the likely reason. Where no identity differs it is
prompts, salts or tenants that do, which is no fault.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping, Sequence
from typing import Any

from kvtier.abc.store import BlockFound, Found, Reason
from kvtier.key import Identity
from kvtier.store.records import difference, fields_of, identity_text
from kvtier.tier.lower import LowerTier

_log = logging.getLogger(__name__)

MANY_LOOKUPS = 32
"""Requests in a row that found nothing from their first block on."""
MANY_BLOCKS = 32
"""Blocks that tiers with slots hold."""
_SHOWN = 60
"""Characters of a field's value."""


class Notice:
    """Thread-safe; ``settled`` and ``due`` are called under the store's lock."""

    def __init__(self, identity: Identity | None, tiers: Sequence[LowerTier]) -> None:
        self.text: str | None = None
        """What is worth knowing; None where nothing is."""
        self._digest = b"" if identity is None else identity.digest()
        self._ours: Mapping[str, Any] = {} if identity is None else fields_of(identity_text(identity)) or {}
        self._tiers = tuple(tiers)
        self._lock = threading.Lock()
        self._lookups = 0
        self._looked = identity is None
        self._told_of_none = False

    def settled(self, found: Sequence[BlockFound]) -> None:
        """A request has its answer, from its first block on."""
        if not found:
            return
        if found[0].found is Found.HIT:
            if self._lookups:
                self._lookups, self.text, self._looked = 0, None, not self._ours
        elif found[0].reason is Reason.NEVER_STORED:
            self._lookups += 1

    @property
    def due(self) -> bool:
        """Whether ``look`` is to be called: many lookups have found nothing, and there is something to be found."""
        if self._looked or self._lookups < MANY_LOOKUPS:
            return False
        return any(tier.probes or tier.counts()["ready"] >= MANY_BLOCKS for tier in self._tiers)

    def look(self) -> None:
        """Compare our identity with the records of the tiers. Waits for them."""
        with self._lock:
            if self._looked:
                return
            self._looked = True
            others = [(tier.name, fields) for tier in self._tiers for fields in self._others(tier)]
            differing = [(name, fields, difference(self._ours, fields)) for name, fields in others]
            nearest = min((each for each in differing if each[2]), key=lambda each: len(each[2]), default=None)
            if nearest is None:
                if not self._told_of_none:
                    self._told_of_none = True
                    _log.info(
                        "%d lookups in a row have found nothing, and no identity differs: prompts, salts or tenants do",
                        self._lookups,
                    )
                return
            tier, fields, (first, *_) = nearest
            self.text = (
                f"{self._lookups} lookups in a row have found nothing, and {tier} has blocks of another identity: "
                f"{first} differs ({_shown(fields.get(first))} there, {_shown(self._ours.get(first))} here)"
            )
            _log.warning("%s", self.text)

    def _others(self, tier: LowerTier) -> list[dict[str, Any]]:
        """Identities of the blocks in a tier to which we are new; none where it had blocks of ours before."""
        records = tier.records("identity")
        if not tier.newcomer(self._digest, records):
            return []
        there = tier.identities()
        chosen = [digest for digest in records if digest != self._digest and (there is None or digest in there)]
        return [fields for fields in map(fields_of, map(records.__getitem__, chosen)) if fields is not None]


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."
