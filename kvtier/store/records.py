"""Readable records of what frames name by digest: identities and scopes, as JSON texts of bounded length.

A record says what a tier holds blocks of: so a clear by model, tenant or adapter can say what it reached, and an engine that
finds nothing can be told in which field it differs from whoever filled the tier. Never a secret, never a salt.
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvtier.abc.medium import MOST_RECORDS, RECORD_BYTES
from kvtier.abc.store import Selection
from kvtier.key import Adapter, Identity

IDENTITY_FIELDS = ("model", "weights", "kv_dtype", "layout", "rope", "block_tokens", "codec", "engine_format", "schema")
"""In the order in which they are compared."""


def identity_text(identity: Identity) -> str:
    """The identity's fields, as a JSON object in their order."""
    groups, block_tokens = identity.layout.fields()
    values = (
        identity.model,
        identity.weights,
        identity.kv_dtype,
        groups,
        identity.rope,
        block_tokens,
        identity.codec,
        identity.engine_format,
        identity.schema,
    )
    fields = dict(zip(IDENTITY_FIELDS, values, strict=True))
    text = json.dumps(fields, ensure_ascii=False)
    if len(text.encode()) > RECORD_BYTES:  # a layout of very many groups: a digest still tells equal from different
        fields["layout"] = hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
        text = json.dumps(fields, ensure_ascii=False)
    return text


def fields_of(text: str) -> dict[str, Any] | None:
    """A record's fields; None for what is not one."""
    if len(text) > RECORD_BYTES:
        return None
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def difference(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> list[str]:
    """The fields in which two identities differ, in declared order."""
    return [name for name in IDENTITY_FIELDS if theirs.get(name) != ours.get(name)]


@dataclass(frozen=True, slots=True)
class ScopeRecord:
    """One (model, tenant, adapter), whatever the salts of its requests."""

    model: str
    tenant: bytes
    """Tenant id, 16 bytes."""
    adapter: Adapter | None
    epoch: int

    @property
    def digest(self) -> bytes:
        """16 bytes that name the record; they stay as the epoch rises."""
        return hashlib.blake2b(self._text(0).encode(), digest_size=16).digest()

    def text(self) -> str:
        return self._text(self.epoch)

    def _text(self, epoch: int) -> str:
        adapter = None if self.adapter is None else {"name": self.adapter.name, "digest": self.adapter.digest.hex()}
        fields = {"model": self.model, "tenant": self.tenant.hex(), "adapter": adapter, "epoch": epoch}
        return json.dumps(fields, ensure_ascii=False)


def selects(what: Selection, fields: Mapping[str, Any]) -> bool:
    """Whether a scope's record is of what was selected."""
    adapter = fields.get("adapter")
    name = adapter.get("name") if isinstance(adapter, dict) else None
    return (
        what.model in (None, fields.get("model"))
        and (what.tenant is None or what.tenant.hex() == fields.get("tenant"))
        and what.adapter in (None, name)
    )


class Scopes:
    """The scopes that requests had, each with the tiers that still lack its record. Bounded; the one unseen longest goes."""

    def __init__(self, tiers: Sequence[str]) -> None:
        self._lock = threading.Lock()
        self._records: OrderedDict[bytes, ScopeRecord] = OrderedDict()
        self._unwritten: dict[str, OrderedDict[bytes, None]] = {tier: OrderedDict() for tier in tiers}
        self._last: tuple[object, ...] = ()

    def seen(self, model: str, tenant: bytes, adapter: Adapter | None, epoch: int) -> None:
        """A request has this scope."""
        asked = (model, tenant, adapter, epoch)
        if asked == self._last:  # most requests are of the scope of the one before
            return
        record = ScopeRecord(*asked)
        digest = record.digest
        with self._lock:
            self._last = asked
            if self._records.get(digest) != record:
                for waiting in self._unwritten.values():
                    waiting[digest] = None
            self._records[digest] = record
            self._records.move_to_end(digest)
            while len(self._records) > MOST_RECORDS:
                oldest, _ = self._records.popitem(last=False)
                for waiting in self._unwritten.values():
                    waiting.pop(oldest, None)

    def unwritten(self, tier: str) -> list[ScopeRecord]:
        """Records that a tier has not been given yet; they are taken to be given now."""
        with self._lock:
            waiting = list(self._unwritten[tier])
            self._unwritten[tier].clear()
            return [self._records[digest] for digest in waiting]

    def owe(self, tier: str, record: ScopeRecord) -> None:
        """A tier could not be given a record after all."""
        with self._lock:
            if record.digest in self._records:
                self._unwritten[tier][record.digest] = None

    def selected(self, what: Selection, texts: Sequence[tuple[bytes, str]]) -> list[dict[str, Any]]:
        """Fields of the records that a selection takes, ours and those that tiers have (digest and text)."""
        with self._lock:
            ours = {digest: record.text() for digest, record in self._records.items()}
        found = [fields_of(text) for text in {**dict(texts), **ours}.values()]
        chosen = [fields for fields in found if fields is not None and selects(what, fields)]
        return sorted(
            chosen, key=lambda fields: [str(fields.get(name) or "") for name in ("model", "tenant", "adapter")]
        )
