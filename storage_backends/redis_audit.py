"""The audit of what stands under our prefix on a Redis-compatible server, which may be in use meanwhile."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

from kvtier.abc.audit import Auditor, Finding, FindingKind, Progress
from kvtier.codec.audit import Flaw, payload_flaw, read_value, repair_of
from kvtier.codec.frame import HEADER_BYTES, MAX_PAYLOAD_BYTES, summer_of
from kvtier.key import Address
from kvtier.storage_backends.redis_names import ABOUT, CLEAR, PREFIX, parsed, raised
from kvtier.storage_backends.redis_wire import Wire, translated

_FAMILY = b"kvt:"
_BATCH = 256
_NEVER_EXPIRES, _IS_GONE = -1, -2
"""Answers of PTTL."""


class RedisAuditor(Auditor):
    """Looks at names in batches and reads one value at a time; a value that goes meanwhile is no fault."""

    def __init__(self, where: str, make: Callable[[], Any], ttl: float, auth_key: bytes | None) -> None:
        """``make`` gives a redis-py connection that is not connected yet; ``ttl`` in seconds."""
        self.where = where
        self.notes: list[str] = []
        self._wire = Wire(make)
        self._ttl_ms = int(ttl * 1000)
        self._summer = summer_of(auth_key)

    def look(self, progress: Progress) -> Iterator[Finding]:
        with translated(self.where):
            about = int(self._wire.call("DBSIZE"))
        for names in self._scanned():
            for name, kind, ttl in self._described(names):
                if self.looked_at >= self.most:
                    self.notes.append(f"stopped after {self.looked_at} names; the database has about {about}")
                    return
                with translated(self.where):
                    found = list(self._name(name, kind, ttl))
                yield from found
                self.looked_at += 1
                progress(self.looked_at, about)

    def close(self) -> None:
        self._wire.close()

    def _scanned(self) -> Iterator[list[bytes]]:
        """Batches of all names of the family, none twice in a batch."""
        cursor: Any = 0
        while True:
            with translated(self.where):
                cursor, found = self._wire.call("SCAN", cursor, "MATCH", _FAMILY + b"*", "COUNT", _BATCH)
            yield list(dict.fromkeys(found))
            if int(cursor) == 0:
                return

    def _described(self, names: Sequence[bytes]) -> Iterator[tuple[bytes, bytes, int]]:
        """Name, type and remaining milliseconds of those that are still there."""
        commands = [words for name in names for words in (("TYPE", name), ("PTTL", name))]
        with translated(self.where):
            replies = raised(self._wire.pipeline(commands)) if commands else []
        for name, kind, ttl in zip(names, replies[::2], replies[1::2], strict=True):
            if int(ttl) != _IS_GONE:
                yield name, kind if isinstance(kind, bytes) else str(kind).encode(), int(ttl)

    def _name(self, name: bytes, kind: bytes, ttl: int) -> Iterator[Finding]:
        if name == CLEAR or name.startswith(ABOUT):
            if kind != b"hash":
                yield Finding(FindingKind.FOREIGN_NAME, _shown(name), f"is a {kind.decode()}, ours is a hash")
            return
        ours = next(parsed(name), None) if name.startswith(PREFIX) else None
        if ours is None or kind != b"string":
            what = "has a name that kvtier gives nothing" if ours is None else f"is a {kind.decode()}, ours are strings"
            yield Finding(FindingKind.FOREIGN_NAME, _shown(name), f"{what}; it is left as it is")
            return
        flaw = self._flaw(name, ours[1])
        if flaw is not None:
            repair = repair_of(flaw, partial(self._delete, name), self.seals)
            yield Finding(flaw.kind, _shown(name), flaw.detail, repair)
        elif ttl == _NEVER_EXPIRES:
            yield Finding(FindingKind.NO_TTL, _shown(name), "would stay for ever", partial(self._expire, name))

    def _flaw(self, name: bytes, block: Address) -> Flaw | None:
        size = int(self._wire.call("STRLEN", name))
        if size > MAX_PAYLOAD_BYTES:
            return Flaw(FindingKind.UNDECODABLE, f"{size} bytes, which no frame has")
        room = memoryview(bytearray(size))
        (came,) = self._wire.get_all([(name, [room])])
        if isinstance(came, Exception):
            raise came
        if not came.done:  # gone, or another one, since it was measured
            return None
        value = room[: came.nbytes]
        header = read_value(value, block, self._summer)
        if isinstance(header, Flaw):
            return header
        return payload_flaw(header, value, value[HEADER_BYTES:], self._summer, self.seals)

    def _delete(self, name: bytes) -> str:
        with translated(self.where):
            self._wire.call("UNLINK", name)
        return "value deleted"

    def _expire(self, name: bytes) -> str:
        with translated(self.where):
            self._wire.call("PEXPIRE", name, self._ttl_ms)
        return f"expires in {self._ttl_ms // 1000} s"


def _shown(name: bytes) -> str:
    """A name for people: what stands before the address as it is, the address in hex."""
    ours = next(parsed(name), None) if name.startswith(PREFIX) else None
    if ours is None:
        return ascii(name)[2:-1]
    return name[: -len(ours[1])].decode() + ours[1].hex()
