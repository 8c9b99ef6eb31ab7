"""How a Redis-compatible server names our values, and the hash ``kvt:clear`` of what has been cleared there."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from typing import Any

from kvtier.errors import MediumError
from kvtier.key import KEY_BYTES, Address, Shard
from kvtier.storage_backends.redis_wire import Wire

PREFIX = b"kvt:1:"
ADDRESS_BYTES = KEY_BYTES + len(Shard().packed())
ABOUT = b"kvt:about:"
"""Before a kind: hash of the readable records of that kind."""
CLEAR = b"kvt:clear"
"""Hash of the generation, the version, and an epoch per name."""
MOST_EPOCHS = 1 << 14
"""Fields of the hash that are read: more cannot be ours."""
_TRIES = 20


def prefix_of(generation: int) -> bytes:
    return PREFIX + b"g%d:" % generation if generation else PREFIX


def parsed(name: bytes) -> Iterator[tuple[int, Address]]:
    """Generation and address of one of our values, or nothing where it is none."""
    head, tail = name[len(PREFIX) : -ADDRESS_BYTES], name[-ADDRESS_BYTES:]
    if len(name) == len(PREFIX) + ADDRESS_BYTES:
        yield 0, Address(tail)
    elif head[:1] == b"g" and head[-1:] == b":" and head[1:-1].isdigit() and len(head) <= 12:
        yield int(head[1:-1]), Address(tail)


def number_of(value: bytes | None) -> int:
    """A field of the hash; what cannot be ours counts as none."""
    number = int(value) if value is not None and value.isdigit() and len(value) <= 10 else 0
    return number if number < 1 << 32 else 0


def pairs_of(found: Any) -> dict[bytes, bytes]:  # noqa: ANN401 - a reply
    return found if isinstance(found, dict) else dict(zip(found[::2], found[1::2], strict=True))


def raised(replies: list[Any]) -> list[Any]:
    """The replies; the first of them that is an error is raised."""
    for reply in replies:
        if isinstance(reply, Exception):
            raise reply
    return replies


def merged(wire: Wire, wanted: Mapping[bytes, int], implied: Mapping[bytes, int]) -> None:
    """Raise fields of the hash to what is wanted and take out what is implied; atomic, so that nobody's is lowered."""
    names = [*wanted, *implied]
    if not names:
        return
    for _ in range(_TRIES):
        wire.call("WATCH", CLEAR)
        have = dict(zip(names, map(number_of, wire.call("HMGET", CLEAR, *names)), strict=True))
        higher = {name: epoch for name, epoch in wanted.items() if epoch > have[name]}
        gone = [name for name, epoch in implied.items() if 0 < have[name] <= epoch]
        if not higher and not gone:
            wire.call("UNWATCH")
            return
        row = [word for pair in higher.items() for word in pair]
        commands: list[tuple[Any, ...]] = [("MULTI",), ("HSET", CLEAR, "version", os.urandom(8).hex(), *row)]
        commands += [("HDEL", CLEAR, *gone)] if gone else []
        if raised(wire.pipeline([*commands, ("EXEC",)]))[-1] is not None:
            return
    raise MediumError("others kept changing what has been cleared")
