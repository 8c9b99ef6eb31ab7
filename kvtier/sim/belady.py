"""The offline optimum: what a cache could hit that knew the future."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from kvtier.key import Address


def belady_hits(chains: Sequence[Sequence[Address]], capacity: int) -> list[int]:
    """Per request how many blocks of its prefix are resident in a cache of ``capacity`` blocks that evicts optimally.

    Whoever is used next furthest away goes first (Belady, IBM Systems Journal 1966), the deeper of two that are used next
    by the same request. A block is never used sooner than its parent, so children go before their parents, and what is
    resident of a chain is always a prefix of it: the optimum for references is the optimum for prefixes. As everywhere in a
    replay a request's blocks are all inserted first, and the cache then evicts down to its capacity.
    """
    following = _next_uses(chains)
    next_use: dict[Address, int] = {}
    furthest: list[tuple[int, int, Address]] = []
    hits = []
    for chain, uses in zip(chains, following, strict=True):
        hits.append(resident_prefix(chain, next_use))
        for depth, (entry, use) in enumerate(zip(chain, uses, strict=True)):
            next_use[entry] = use
            heapq.heappush(furthest, (-use, -depth, entry))
        while len(next_use) > capacity:
            use, _, entry = heapq.heappop(furthest)
            if next_use.get(entry) == -use:  # else a leftover of an earlier use
                del next_use[entry]
    return hits


def _next_uses(chains: Sequence[Sequence[Address]]) -> list[list[int]]:
    """Per request and block the number of the request that uses it next; one past the last where none does."""
    seen: dict[Address, int] = {}
    following: list[list[int]] = []
    for number in range(len(chains) - 1, -1, -1):
        following.append([seen.get(entry, len(chains)) for entry in chains[number]])
        seen.update(dict.fromkeys(chains[number], number))
    following.reverse()
    return following


def infinite_hits(chains: Sequence[Sequence[Address]]) -> list[int]:
    """Per request how many blocks of its prefix any request before it had."""
    seen: set[Address] = set()
    hits = []
    for chain in chains:
        hits.append(resident_prefix(chain, seen))
        seen.update(chain)
    return hits


def resident_prefix(chain: Sequence[Address], resident: dict[Address, int] | set[Address]) -> int:
    """Length of the longest prefix that is wholly resident."""
    for depth, entry in enumerate(chain):
        if entry not in resident:
            return depth
    return len(chain)
