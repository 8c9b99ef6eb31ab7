"""Paging, the idea of the whole house: numbered slots, handed out, named, counted and taken back.

The engine's HBM cache, the DRAM arena and the NVMe file are each a ``BlockPool`` over a slot-addressed medium. The pool
moves no bytes and takes no lock: its owner calls it under one lock of its own.

    FREE -- allocate --> WRITING -- commit --> READY -- retire --> RETIRING -- last release --> FREE
                            |                                                     ^
                            `---------------- last release (never named) ---------'

free + writing + ready + retiring = capacity, always.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import repeat
from typing import NewType, TypeAlias

import numpy as np

from kvtier.abc.policy import Choice, EntryMeta, EvictionPolicy
from kvtier.key import Address
from kvtier.tree import NONE, Tree

Slot = NewType("Slot", int)
"""Number of a place in a slot-addressed medium."""

FREE, WRITING, READY, RETIRING = range(4)
BoolArray: TypeAlias = "np.ndarray[tuple[int], np.dtype[np.bool_]]"
SlotArray: TypeAlias = "np.ndarray[tuple[int], np.dtype[np.intp]]"
Marks: TypeAlias = "bytearray | None"
"""A byte per slot, not 0 where it is marked."""


@dataclass(frozen=True, slots=True)
class Allocation:
    """Slots that now belong to the caller, and what had to go for them."""

    slots: list[Slot]
    evicted: list[Address]


class _Out(Container[Address]):
    """Entries whose slots are marked: they cannot go, or are chosen already."""

    def __init__(self, slot_of: dict[Address, Slot], marks: bytearray) -> None:
        self._slot_of = slot_of
        self._marks = marks

    def __contains__(self, entry: object) -> bool:
        return self._marks[self._slot_of[entry]] != 0  # type: ignore[index]  # a policy asks of its own entries


class _Passed(_Out):
    """The same, and which of them a search came across, in its order."""

    def __init__(self, slot_of: dict[Address, Slot], marks: bytearray) -> None:
        super().__init__(slot_of, marks)
        self.entries: list[Address] = []

    def __contains__(self, entry: object) -> bool:
        if not super().__contains__(entry):
            return False
        self.entries.append(entry)  # type: ignore[arg-type]  # as above
        return True


class BlockPool:
    """Slots, free list, entry -> slot map, reference counts and eviction order over the tree of entries.

    A slot that was allocated, acquired or retired carries one reference of the caller's; the last release frees it, unless
    it is READY: then it stays, evictable. A resident entry with resident children gives way to a childless descendant, so
    a shared preamble outlives its branches whatever the policy says. Commit and touch chains tail first: then the tail is
    also what the policy names first.
    """

    def __init__(self, slots: int, policy: EvictionPolicy) -> None:
        if slots < 1:
            raise ValueError(f"a pool needs at least one slot, got {slots}")
        self.capacity = slots
        self._policy = policy
        self._free: list[Slot] = [Slot(slot) for slot in range(slots - 1, -1, -1)]
        self._slot_of: dict[Address, Slot] = {}
        self._entry: list[Address | None] = [None] * slots
        self._state = np.zeros(slots, dtype=np.int8)
        self._refs = np.zeros(slots, dtype=np.int32)
        self._tree = Tree(slots)
        self._retiring = 0
        self._referenced = 0
        self._passed: list[Address] = []
        """What the last search for victims came across and could not take."""
        self.pinned = bytearray(slots)
        """Marks of READY slots that nobody may evict, set and taken away by whoever keeps the pins."""

    @property
    def free(self) -> int:
        return len(self._free)

    @property
    def ready(self) -> int:
        return len(self._slot_of)

    @property
    def retiring(self) -> int:
        return self._retiring

    @property
    def writing(self) -> int:
        return self.capacity - self.free - self.ready - self._retiring

    @property
    def referenced(self) -> int:
        """Slots with at least one reference, in whatever state."""
        return self._referenced

    @property
    def evictable(self) -> int:
        """READY slots that nobody references."""
        return int(np.count_nonzero((self._state == READY) & (self._refs == 0)))

    def counts(self) -> dict[str, int]:
        """Slots by state; together they are the capacity."""
        return {"free": self.free, "writing": self.writing, "ready": self.ready, "retiring": self.retiring}

    def choice(self) -> Choice | None:
        """Who decides what goes, where the policy chooses among several."""
        return self._policy.choice()

    def lookup(self, entries: Sequence[Address]) -> list[Slot]:
        """Slots of the longest resident prefix of ``entries``; takes no reference."""
        slots = self.places(entries)
        if None in slots:
            del slots[slots.index(None) :]
        return slots  # type: ignore[return-value]  # none is None any more

    def places(self, entries: Sequence[Address]) -> list[Slot | None]:
        """Per entry its slot, or None where it is not resident."""
        return list(map(self._slot_of.get, entries))

    def find(self, entries: Sequence[Address]) -> SlotArray:
        """``places`` as an array, with NONE where an entry is not resident."""
        return np.fromiter(map(self._slot_of.get, entries, repeat(NONE)), np.intp, len(entries))

    def resident(self, entries: Sequence[Address]) -> list[Slot]:
        """Slots of those that are resident."""
        return [slot for slot in self.places(entries) if slot is not None]

    def slot(self, entry: Address) -> Slot | None:
        return self._slot_of.get(entry)

    def entry(self, slot: Slot) -> Address | None:
        return self._entry[slot]

    def entries(self) -> list[Address]:
        """Every resident entry, in no order."""
        return list(self._slot_of)

    def children(self, slot: Slot) -> Iterator[Slot]:
        """Slots of the resident entries whose parent ``slot`` holds."""
        return map(Slot, self._tree.children(slot))

    def references(self, slot: Slot) -> int:
        return int(self._refs[slot])

    def allocate(self, count: int, now: float, *, evict: bool = True) -> Allocation | None:
        """``count`` WRITING slots with one reference each, evicting where the free list does not suffice; else None."""
        evicted: list[Address] = []
        short = count - len(self._free)
        if short > 0:
            gone = self.evict(short, now) if evict else None
            if gone is None:
                return None
            evicted = gone
        slots = self._free[len(self._free) - count :]
        del self._free[len(self._free) - count :]
        slots.reverse()
        at = np.array(slots, np.intp)
        self._state[at] = WRITING
        self._refs[at] = 1
        self._referenced += count
        return Allocation(slots, evicted)

    def commit(self, slot: Slot, entry: Address, meta: EntryMeta, now: float) -> bool:
        """Show a WRITING slot as ``entry``. False where another slot has it: the first copy wins, this one stays WRITING."""
        assert self._state[slot] == WRITING, f"slot {slot} is not being written"
        if entry in self._slot_of:
            return False
        self._slot_of[entry] = slot
        self._entry[slot] = entry
        self._state[slot] = READY
        self._tree.link(slot, entry, meta.parent, None if meta.parent is None else self._slot_of.get(meta.parent))
        self._policy.insert(entry, meta, now)
        return True

    def commit_all(
        self, slots: Sequence[Slot], entries: Sequence[Address], metas: Sequence[EntryMeta], now: float
    ) -> None:
        """``commit`` of distinct entries from the last to the first, several times as fast: for a chain, given head first.

        A slot whose entry another slot has stays WRITING.
        """
        tree = self._tree
        if tree.orphans:  # which may wait for any of them
            for slot, entry, meta in zip(reversed(slots), reversed(entries), reversed(metas), strict=True):
                self.commit(slot, entry, meta, now)
            return
        slot_of, held, child, insert = self._slot_of, self._entry, tree.child, self._policy.insert
        new = [index for index, entry in enumerate(entries) if entry not in slot_of]
        at = np.array([slots[index] for index in new], np.intp)
        assert not np.count_nonzero(self._state[at] != WRITING), "a slot is not being written"
        self._state[at] = READY
        for index in new:
            slot_of[entries[index]] = slots[index]
        for index in reversed(new):
            slot, entry, meta = slots[index], entries[index], metas[index]
            held[slot] = entry
            above = None if meta.parent is None else slot_of.get(meta.parent)
            if above is None or above == slot or child[above] != NONE:
                tree.link(slot, entry, meta.parent, above)
            else:  # the first child of its parent, as in most chains
                child[above] = slot
                tree.parent[slot] = above
            insert(entry, meta, now)

    def adopt(self, slots: Sequence[Slot], entries: Sequence[Address], metas: Iterable[EntryMeta], now: float) -> None:
        """At recovery, into an empty pool: show particular slots as ``entries`` (both distinct), unreferenced."""
        assert len(self._free) == self.capacity, "the pool is empty"
        assert len(set(slots)) == len(set(entries)) == len(slots), "one slot, one entry"
        self._slot_of.update(zip(entries, slots, strict=True))
        self._state[slots] = READY
        held, insert = self._entry, self._policy.insert
        parents: list[Address | None] = []
        for slot, entry, meta in zip(slots, entries, metas, strict=True):
            held[slot] = entry
            parents.append(meta.parent)
            insert(entry, meta, now)
        above = list(map(self._slot_of.get, parents))  # type: ignore[arg-type]  # no entry is called None
        self._tree.link_all(slots, entries, parents, above)
        self._free = np.flatnonzero(self._state == FREE)[::-1].tolist()

    def touch(self, slots: Sequence[Slot], now: float) -> None:
        """Note a use of a chain's READY slots (given head first)."""
        self._policy.touch_all(list(filter(None, map(self._entry.__getitem__, reversed(slots)))), now)

    def refresh(self, slots: Sequence[Slot], now: float) -> None:
        """Note that a use of a chain (head first) which `touch` or `commit` told of has ended."""
        self._policy.refresh_all(list(filter(None, map(self._entry.__getitem__, reversed(slots)))), now)

    def acquire(self, slots: Sequence[Slot] | SlotArray) -> None:
        """One more reference to each of ``slots`` (distinct, not FREE)."""
        refs = self._refs[slots] + 1
        self._refs[slots] = refs
        self._referenced += int(np.count_nonzero(refs == 1))

    def release(self, slots: Sequence[Slot] | SlotArray, now: float) -> None:
        """One reference less for each of ``slots`` (distinct); whatever is not READY and has none left becomes FREE."""
        if not len(slots):
            return
        at = np.array(slots, np.intp)
        refs = self._refs[at] - 1
        assert not np.count_nonzero(refs < 0), "released more often than acquired"
        self._refs[at] = refs
        states = self._state[at]
        unheld = refs == 0
        self._referenced -= int(np.count_nonzero(unheld))
        gone = unheld & (states != READY)
        if np.count_nonzero(gone):
            self._retiring -= int(np.count_nonzero(states[gone] == RETIRING))
            at = at[gone]
            self._state[at] = FREE
            self._free.extend(at[::-1].tolist())

    def victims(self, count: int, now: float, keep: Marks = None, *, fewer: bool = False) -> list[Slot] | None:
        """``count`` slots that may go, in the order they should, children before parents; None if there are fewer.

        ``fewer``: as many as there are then. A slot may go where it is READY, unreferenced and outside ``keep`` (marks per
        slot), not pinned, and so is everything below it. Of what a search came across and could not take, the policy is told
        before the next one: else each would first of all pass whatever is held for long.
        """
        if self._passed:
            self._policy.pass_over([entry for entry in self._passed if self._in_use(entry)], now)
            self._passed = []
        out, stuck = self._stuck(keep)
        able = self.ready - stuck
        if able < count and not fewer:
            return None
        count = min(count, able)
        first_child, next_child = self._tree.child, self._tree.next
        chosen: list[Slot] = []
        passed = _Passed(self._slot_of, out)
        protected: Container[Address] = passed if stuck else ()
        path: list[int] = []
        on_path: set[int] = set()
        cursor: dict[int, int] = {}
        while len(chosen) < count:
            nominees = self._policy.victims(count - len(chosen), protected, now)
            assert nominees is not None, "the policy knows every entry"
            for slot in map(self._slot_of.__getitem__, nominees):
                if out[slot]:
                    continue
                leaf, child = slot, first_child[slot]
                if slot in on_path or (child != NONE and not (out[child] and next_child[child] == NONE)):
                    if slot not in on_path:
                        path, on_path = [slot], {slot}
                    leaf = Slot(self._tree.descend(path, on_path, out, cursor))
                out[leaf] = 1
                chosen.append(leaf)
            if protected is passed:
                self._passed = list(dict.fromkeys(passed.entries))
            protected = _Out(self._slot_of, out)
        return chosen

    def evict(self, count: int, now: float) -> list[Address] | None:
        """Free ``count`` READY slots, those that ``victims`` names, and say what was in them; None if there are fewer."""
        victims = self.victims(count, now)
        if victims is None:
            return None
        slot_of, held, unlink, remove = self._slot_of, self._entry, self._tree.unlink, self._policy.remove
        evicted: list[Address] = list(map(held.__getitem__, victims))  # type: ignore[arg-type]  # victims are READY
        for slot, entry in zip(victims, evicted, strict=True):
            del slot_of[entry]
            held[slot] = None
            unlink(slot, entry)
            remove(entry, evicted=True)
        self._state[victims] = FREE
        self._free.extend(reversed(victims))
        return evicted

    def room(self, keep: Marks = None) -> int:
        """How many slots an allocation that evicts nothing in ``keep`` could have."""
        return self.free + self.ready - self._stuck(keep)[1]

    def coldest(self, count: int, now: float, keep: Marks = None) -> list[Slot]:
        """Up to ``count`` READY slots, neither referenced nor pinned, outside ``keep`` in the policy's order alone.

        It is what will want to go next.
        """
        held = self._held(keep)
        passed = int(np.count_nonzero(held))
        count = min(count, self.ready - passed)
        # Most that are held are cold. Among so many there are enough others; which, an array says sooner than a container.
        entries = self._policy.victims(count + passed, (), now) if count > 0 else []
        assert entries is not None, "the policy knows every entry"
        slots = np.fromiter(map(self._slot_of.__getitem__, entries), np.intp, len(entries))
        return list(map(Slot, slots[~held[slots]][:count].tolist()))

    def retire(self, slot: Slot, *, evicted: bool) -> Address:
        """Take a READY slot's entry off the map at once; the slot is RETIRING, with one reference more, until released."""
        entry = self._entry[slot]
        assert entry is not None, f"slot {slot} is not ready"
        del self._slot_of[entry]
        self._entry[slot] = None
        self._state[slot] = RETIRING
        self._retiring += 1
        self._referenced += int(self._refs[slot] == 0)
        self._refs[slot] += 1
        self._tree.unlink(slot, entry)
        self._policy.remove(entry, evicted=evicted)
        return entry

    def check(self) -> list[str]:
        """Disagreements between map, states, counts and tree, in words."""
        found: list[str] = []
        counts = np.bincount(self._state, minlength=4)
        if counts[FREE] != len(self._free) or len(set(self._free)) != len(self._free):
            found.append(f"free list has {len(self._free)} slots, {counts[FREE]} are free")
        if counts[READY] != len(self._slot_of):
            found.append(f"{len(self._slot_of)} entries are named, {counts[READY]} slots are ready")
        if counts[RETIRING] != self._retiring:
            found.append(f"{self._retiring} slots count as retiring, {counts[RETIRING]} are")
        if self._referenced != np.count_nonzero(self._refs):
            found.append(f"{self._referenced} slots count as referenced, {np.count_nonzero(self._refs)} are")
        if int((self._refs < 0).sum()) or self._refs[self._free].any():
            found.append("a free slot is referenced, or a count is negative")
        for entry, slot in self._slot_of.items():
            if self._entry[slot] != entry:
                found.append(f"double slot: entry {entry[:4].hex()} names slot {slot}, which holds another")
            for child in self._tree.children(slot):
                if self._tree.parent[child] != slot or self._state[child] != READY:
                    found.append(f"slot {child} hangs under slot {slot} and should not")
                    break
        return found

    def _in_use(self, entry: Address) -> bool:
        """Whether it is resident, and referenced or pinned."""
        slot = self._slot_of.get(entry)
        return slot is not None and bool(self._refs[slot] or self.pinned[slot])

    def _held(self, keep: Marks) -> BoolArray:
        """READY slots that are referenced, pinned or in ``keep``."""
        held: BoolArray = self._refs > 0
        held |= np.frombuffer(self.pinned, np.uint8) != 0
        if keep is not None:
            held |= np.frombuffer(keep, np.uint8) != 0
        held &= self._state == READY
        return held

    def _stuck(self, keep: Marks) -> tuple[bytearray, int]:
        """READY slots that cannot go, marked 1, and their number: held ones and everything above them.

        Linear in the pool, whatever its tree.
        """
        if keep is None and not self._referenced and 1 not in self.pinned:
            return bytearray(self.capacity), 0
        held = self._held(keep)
        stuck = bytearray(held.tobytes())
        parents = np.frombuffer(self._tree.parent, np.int32)[held]
        parents = parents[parents != NONE]
        parent = self._tree.parent
        for slot in parents[~held[parents]].tolist():
            while slot != NONE and not stuck[slot]:
                stuck[slot] = 1
                slot = parent[slot]  # noqa: PLW2901 - up the tree
        return stuck, stuck.count(1)
