"""What has been cleared, as epochs: which keys are of today, and which blocks nobody can ask for any more.

A clear gives an epoch to a selection of (model, tenant, adapter), each of them one or any. The epoch of a scope is the
highest of all selections that cover it, so a clear of everything holds for scopes that nobody has seen yet as well. A new
clear takes an epoch above all that are known. Epochs only rise, and what several places know is merged by the higher one: a
place that has lost its epochs is told again, and cleared blocks do not come back.
"""

from __future__ import annotations

import itertools
import json
import threading
from collections import Counter, deque
from collections.abc import Mapping
from typing import TypeAlias

from kvtier.abc.medium import RECORD_BYTES
from kvtier.abc.store import Selection
from kvtier.errors import RequestError
from kvtier.key import Lot, adapter_id

MOST_SELECTIONS = 1024
"""Selections with an epoch of their own. Past this, those of one model become one that covers the whole model."""
MOST_PAST = 8
"""Clears back to which it is known what epoch a scope had before."""
_Covered: TypeAlias = "tuple[str | None, bytes | None, bytes | None]"


def name_of(what: Selection) -> str:
    """The name under which media keep a selection's epoch: a JSON array, readable."""
    tenant = None if what.tenant is None else what.tenant.hex()
    return json.dumps([what.model, tenant, what.adapter], ensure_ascii=False)


def selection_of(name: str) -> Selection | None:
    """The selection that a medium has a name of; None for what is no such name."""
    if len(name) > RECORD_BYTES:
        return None
    try:
        model, tenant, adapter = json.loads(name)
        if not all(each is None or isinstance(each, str) for each in (model, tenant, adapter)):
            return None
        return Selection(model, None if tenant is None else bytes.fromhex(tenant), adapter)
    except (ValueError, TypeError, RecursionError):
        return None


def covers(wide: Selection, narrow: Selection) -> bool:
    """Whether all that ``narrow`` selects is selected by ``wide`` too."""
    return (
        wide.model in (None, narrow.model)
        and wide.tenant in (None, narrow.tenant)
        and wide.adapter in (None, narrow.adapter)
    )


class Epochs:
    """Thread-safe; nothing waits for more than a few dictionary look-ups."""

    def __init__(self) -> None:
        self.changes = 0
        """How often anything rose: whoever has told a place up to here has told it everything."""
        self._lock = threading.Lock()
        self._rows: dict[Selection, int] = {}
        self._covered: dict[_Covered, int] = {}
        self._past: deque[dict[_Covered, int]] = deque(maxlen=MOST_PAST)

    def of(self, model: str | None, tenant: bytes, adapter: bytes) -> int:
        """The epoch of a scope, by tenant id and adapter id. Of an unknown model only what was cleared for any counts."""
        return _epoch(self._covered, model, tenant, adapter)

    def former(self, model: str | None, tenant: bytes, adapter: bytes) -> int | None:
        """The epoch that a scope had before it was last cleared, if that was one of the last clears that we have seen."""
        now = self.of(model, tenant, adapter)
        before = (_epoch(covered, model, tenant, adapter) for covered in reversed(tuple(self._past)))
        return next((epoch for epoch in before if epoch < now), None)

    def stale(self, lot: Lot, model: str | None) -> bool:
        """Whether these blocks have been cleared."""
        return lot.epoch < self.of(model, lot.tenant, lot.adapter)

    def clear(self, what: Selection) -> int:
        """Give the selection an epoch above all that are known."""
        with self._lock:
            epoch = 1 + max(self._rows.values(), default=0)
            if epoch >= 1 << 32:
                raise RequestError("no clear epoch is left: all 2^32 are used")
            self._raise({what: epoch})
            return epoch

    def merge(self, rows: Mapping[str, int]) -> None:
        """Take over what another place knows; what is no epoch of ours is passed by."""
        known = {selection_of(name): epoch for name, epoch in rows.items() if 0 < epoch < 1 << 32}
        with self._lock:
            self._raise({what: epoch for what, epoch in known.items() if what is not None})

    def lacking(self, rows: Mapping[str, int]) -> tuple[dict[str, int], dict[str, int]]:
        """What a place that knows ``rows`` (merged already) has to be told, and which of its rows others imply."""
        with self._lock:
            ours = {name_of(what): epoch for what, epoch in self._rows.items()}
        wanted = {name: epoch for name, epoch in ours.items() if rows.get(name, 0) < epoch}
        implied = {name: epoch for name, epoch in rows.items() if name not in ours and selection_of(name) is not None}
        return wanted, implied

    def _raise(self, rows: Mapping[Selection, int]) -> None:
        higher = {what: epoch for what, epoch in rows.items() if epoch > self._rows.get(what, 0)}
        merged = _bounded({**self._rows, **higher}) if higher else self._rows
        if merged != self._rows:
            self._rows = merged
            self._past.append(self._covered)
            self._covered = {
                (what.model, what.tenant, None if what.adapter is None else adapter_id(what.adapter)): epoch
                for what, epoch in merged.items()
            }
            self.changes += 1


def _bounded(rows: dict[Selection, int]) -> dict[Selection, int]:
    """Without rows that a wider one implies; where too many are left, with one for a whole model instead, or for all."""
    kept = {
        what: epoch
        for what, epoch in rows.items()
        if not any(other != what and high >= epoch and covers(other, what) for other, high in _wider(rows, what))
    }
    left, whole = len(kept), set[str | None]()
    for model, count in Counter(what.model for what in kept).most_common():
        if left <= MOST_SELECTIONS or model is None or count == 1:
            break
        whole.add(model)
        left -= count - 1
    if left > MOST_SELECTIONS:
        whole = {None}
    fewer: dict[Selection, int] = {}
    for what, epoch in kept.items():
        wide = Selection() if None in whole else Selection(what.model) if what.model in whole else what
        fewer[wide] = max(epoch, fewer.get(wide, 0))
    return fewer


def _epoch(covered: Mapping[_Covered, int], model: str | None, tenant: bytes, adapter: bytes) -> int:
    if not covered:
        return 0
    choices = itertools.product({None, model}, (None, tenant), (None, adapter))
    return max(covered.get(choice, 0) for choice in choices)


def _wider(rows: Mapping[Selection, int], what: Selection) -> list[tuple[Selection, int]]:
    """The rows that may cover ``what``: at most eight, looked up and not searched for."""
    choices = itertools.product({None, what.model}, {None, what.tenant}, {None, what.adapter})
    wide = [Selection(*choice) for choice in choices]
    return [(each, rows[each]) for each in wide if each in rows]
