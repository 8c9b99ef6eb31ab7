"""Which entry of a pool hangs under which: the tree of chains, by slot.

An entry whose parent is not resident is an orphan until that comes back.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence

import numpy as np

from kvtier.key import Address

NONE = -1
"""No slot."""


class Tree:
    """Links between slots; the children of one parent are a list, the youngest first. Takes no lock, like its pool."""

    def __init__(self, slots: int) -> None:
        self.parent = array("i", [NONE]) * slots
        self.child = array("i", [NONE]) * slots
        """First of the children."""
        self.next = array("i", [NONE]) * slots
        """Next child of the same parent, or next orphan of the same absent one."""
        self._previous = array("i", [NONE]) * slots
        self.orphans: dict[Address, int] = {}
        """By absent parent the first of those that wait for it."""
        self._awaited: dict[int, Address] = {}

    def children(self, slot: int) -> Iterator[int]:
        child = self.child[slot]
        while child != NONE:
            yield child
            child = self.next[child]

    def link(self, slot: int, entry: Address, parent: Address | None, above: int | None) -> None:
        """Hang in a new entry. ``above``: the slot of its ``parent``, None where that is absent or the entry has none."""
        children = self.orphans.pop(entry, NONE)
        if children != NONE:
            del self._awaited[children]
            self.child[slot] = children
            while children != NONE:
                self.parent[children] = slot
                children = self.next[children]
        if parent is None:
            return
        if above is None:
            first = self.orphans.get(parent, NONE)
            self._awaited.pop(first, None)
            self.orphans[parent] = slot
            self._awaited[slot] = parent
        else:
            first = self.child[above]
            self.child[above] = slot
            self.parent[slot] = above
        self.next[slot] = first
        if first != NONE:
            self._previous[first] = slot

    def link_all(
        self,
        slots: Sequence[int],
        entries: Sequence[Address],
        parents: Sequence[Address | None],
        aboves: Sequence[int | None],
    ) -> None:
        """``link`` into an empty tree, several times as fast: each is named before the first is linked."""
        for slot, entry, parent, up in zip(slots, entries, parents, aboves, strict=True):
            if up is None and parent is not None:
                self.link(slot, entry, parent, None)
        above = np.array([NONE if up is None else up for up in aboves], np.int32)
        order = np.argsort(above, kind="stable")
        order = order[np.count_nonzero(above == NONE) :]
        above, below = above[order], np.array(slots, np.int32)[order]
        sibling = above[1:] == above[:-1]
        np.frombuffer(self.parent, np.int32)[below] = above
        np.frombuffer(self.child, np.int32)[above[::-1]] = below[::-1]
        np.frombuffer(self.next, np.int32)[below[:-1][sibling]] = below[1:][sibling]
        np.frombuffer(self._previous, np.int32)[below[1:][sibling]] = below[:-1][sibling]

    def unlink(self, slot: int, entry: Address) -> None:
        """Take out the entry of ``slot``; its children become orphans."""
        before, after, above = self._previous[slot], self.next[slot], self.parent[slot]
        awaited = self._awaited.pop(slot, None)
        if before != NONE:
            self.next[before] = after
        elif above != NONE:
            self.child[above] = after
        elif awaited is not None:
            if after == NONE:
                del self.orphans[awaited]
            else:
                self.orphans[awaited] = after
                self._awaited[after] = awaited
        if after != NONE:
            self._previous[after] = before
        children = self.child[slot]
        if children != NONE:
            self.orphans[entry] = children
            self._awaited[children] = entry
            child = children
            while child != NONE:
                self.parent[child] = NONE
                child = self.next[child]
        self.parent[slot] = self.child[slot] = self.next[slot] = self._previous[slot] = NONE

    def descend(self, path: list[int], on_path: set[int], out: bytearray, cursor: dict[int, int]) -> int:
        """Go on from the end of ``path`` to a descendant whose children are all marked in ``out``, and cut it off the path.

        ``on_path`` has the same slots as ``path``; ``cursor`` says per slot which of its children are still to be looked at.
        A child that is on the path is passed by: an index that was tampered with can name a block as its own ancestor.
        """
        while True:
            slot = path[-1]
            child = cursor.get(slot, self.child[slot])
            while child != NONE and (out[child] or child in on_path):
                child = self.next[child]
            cursor[slot] = child
            if child == NONE:
                path.pop()
                on_path.discard(slot)
                return slot
            path.append(child)
            on_path.add(child)
