"""What every medium must do, as test classes to inherit from.

A new medium's test file is a subclass of ``SlotMediumSuite`` or ``KeyMediumSuite`` with a ``medium`` fixture and hooks that
go behind the medium's back::

    class TestMine(KeyMediumSuite[MyMedium]):
        @pytest.fixture
        def medium(self): ...
        def peek(self, medium, name): ...      # the stored value, or None
        def poke(self, medium, name, value): ...
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Generic, TypeVar

import pytest

from kvtier.abc.medium import MOST_RECORDS, Iovec, KeyMedium, LastingMedium, Outcome, SlotMedium, Status
from kvtier.key import KEY_BYTES, Address, Shard
from kvtier.testing.threads import together

S = TypeVar("S", bound=SlotMedium)
K = TypeVar("K", bound=KeyMedium)
L = TypeVar("L", bound=LastingMedium)


def payload(seed: int, nbytes: int) -> memoryview:
    """Random bytes that follow from ``seed``."""
    return memoryview(random.Random(seed).randbytes(nbytes))


def room(nbytes: int) -> memoryview:
    """A buffer to read into."""
    return memoryview(bytearray(nbytes))


def names(count: int, seed: int = 0) -> list[Address]:
    """Addresses that follow from ``seed``; all byte values occur in them."""
    rng = random.Random(seed)
    shard = Shard().packed()
    return [Address(rng.randbytes(KEY_BYTES) + shard) for _ in range(count)]


class LastingMediumSuite(Generic[L]):
    """For media that outlive their process: what both kinds of them keep beside blocks."""

    def test_records_are_told_apart_by_kind_and_the_later_one_stays(self, medium: L) -> None:
        medium.remember("identity", b"d" * 32, "{}")
        medium.remember("scope", b"d" * 32, "another kind")
        medium.remember("identity", b"d" * 32, '{"model": "m \u00fc"}')
        assert medium.records("identity") == {b"d" * 32: '{"model": "m \u00fc"}'}
        assert medium.records("scope") == {b"d" * 32: "another kind"}
        assert medium.records("none of this kind") == {}

    def test_no_more_records_of_a_kind_are_kept_than_is_said(self, medium: L) -> None:
        for number in range(MOST_RECORDS + 20):
            medium.remember("scope", b"%032d" % number, "{}")
        medium.remember("identity", b"d" * 32, "{}")
        kept = medium.records("scope")
        assert MOST_RECORDS // 2 <= len(kept) <= MOST_RECORDS
        assert b"%032d" % (MOST_RECORDS + 19) in kept
        assert len(medium.records("identity")) == 1

    def test_epochs_only_rise_and_go_where_others_imply_them(self, medium: L) -> None:
        assert medium.epochs() == {}
        medium.raise_epochs({'["m", null]': 3, "b": 1}, {})
        medium.raise_epochs({'["m", null]': 2, "b": 5}, {})
        assert medium.epochs() == {'["m", null]': 3, "b": 5}
        medium.raise_epochs({"c": 1 << 31}, {'["m", null]': 2, "b": 5, "unknown": 9})
        assert medium.epochs() == {'["m", null]': 3, "c": 1 << 31}

    def test_of_many_that_raise_at_once_nobody_is_lowered(self, medium: L) -> None:
        def play(number: int) -> None:
            for epoch in range(1, 6):
                medium.raise_epochs({"shared": 10 * epoch + number, f"own {number}": epoch}, {})

        together(play, 3)
        assert medium.epochs() == {"shared": 52, "own 0": 5, "own 1": 5, "own 2": 5}


class SlotMediumSuite(Generic[S]):
    """For slot media; a medium under test has at least eight slots."""

    @pytest.fixture
    def medium(self) -> S:
        raise NotImplementedError("a suite's subclass gives the medium")

    def peek(self, medium: S, slot: int, nbytes: int) -> bytes:
        """The first ``nbytes`` of the slot's payload, read behind the medium."""
        raise NotImplementedError

    def poke(self, medium: S, slot: int, data: bytes) -> None:
        """Overwrite the start of the slot's payload behind the medium."""
        raise NotImplementedError

    def item(self, medium: S, data: memoryview) -> Iovec:
        """``data`` with the page that the medium wants ahead of it."""
        return [room(medium.header_bytes), data] if medium.header_bytes else [data]

    def fill(self, medium: S, slots: Sequence[int]) -> list[memoryview]:
        data = [payload(slot, medium.slot_bytes) for slot in slots]
        assert all(one.done for one in medium.write(slots, [self.item(medium, each) for each in data]))
        return data

    def test_gives_back_what_was_written_at_shuffled_places(self, medium: S) -> None:
        slots = [5, 0, 7, 2]
        data = self.fill(medium, slots)
        into = [room(medium.slot_bytes) for _ in slots]
        outcomes = medium.read(slots, [self.item(medium, each) for each in into])
        assert [one.status for one in outcomes] == [Status.DONE] * 4
        assert [one.nbytes for one in outcomes] == [medium.header_bytes + medium.slot_bytes] * 4
        assert into == data

    def test_the_bytes_are_where_they_are_said_to_be(self, medium: S) -> None:
        (data,) = self.fill(medium, [3])
        assert self.peek(medium, 3, medium.slot_bytes) == data
        self.poke(medium, 3, b"other bytes")
        into = room(medium.slot_bytes)
        assert medium.read([3], [self.item(medium, into)])[0].done
        assert bytes(into[:11]) == b"other bytes"
        assert into[11:] == data[11:]

    def test_a_view_is_the_place_itself(self, medium: S) -> None:
        (data,) = self.fill(medium, [1])
        view = medium.view(1)
        if view is None:
            return  # places that cannot be addressed: nothing to compare
        assert len(view) >= medium.slot_bytes
        assert view[: medium.slot_bytes] == data
        view[:4] = b"seen"
        assert self.peek(medium, 1, 4) == b"seen"

    def test_reads_only_as_much_as_is_asked_for(self, medium: S) -> None:
        (data,) = self.fill(medium, [2])
        into = room(100)
        assert medium.read([2], [self.item(medium, into)])[0].nbytes == medium.header_bytes + 100
        assert into == data[:100]

    def test_one_bad_item_does_not_fail_its_neighbours(self, medium: S) -> None:
        good, more = payload(1, medium.slot_bytes), payload(2, medium.slot_bytes)
        long = payload(3, medium.slot_bytes + (1 << 16))
        outcomes = medium.write([0, 1, 2], [self.item(medium, each) for each in (good, long, more)])
        assert [one.status for one in outcomes] == [Status.DONE, Status.FAILED, Status.DONE]
        assert outcomes[1].detail
        assert self.peek(medium, 2, 64) == more[:64]

    def test_takes_buffers_at_odd_addresses(self, medium: S) -> None:
        whole = room(medium.slot_bytes + 1)
        odd = whole[1:]
        odd[:] = payload(9, medium.slot_bytes)
        assert medium.write([4], [self.item(medium, odd)])[0].done
        into = room(medium.slot_bytes + 3)[3:]
        assert medium.read([4], [self.item(medium, into)])[0].done
        assert into == odd

    def test_counts_bytes(self, medium: S) -> None:
        before = medium.bytes_read, medium.bytes_written
        self.fill(medium, [0, 1])
        medium.read([1], [self.item(medium, room(medium.slot_bytes))])
        size = medium.header_bytes + medium.slot_bytes
        assert (medium.bytes_read - before[0], medium.bytes_written - before[1]) == (size, 2 * size)

    def test_threads_do_not_mix_their_places_up(self, medium: S) -> None:
        wrong: list[int] = []

        def play(slot: int) -> None:
            data = payload(slot, medium.slot_bytes)
            for _ in range(10):
                into = room(medium.slot_bytes)
                medium.write([slot], [self.item(medium, data)])
                medium.read([slot], [self.item(medium, into)])
                if into != data:
                    wrong.append(slot)

        together(play)
        assert not wrong

    def test_an_empty_batch_is_no_batch(self, medium: S) -> None:
        assert medium.read([], []) == []
        assert medium.write([], []) == []

    def test_closes_twice(self, medium: S) -> None:
        medium.close()
        medium.close()


class KeyMediumSuite(LastingMediumSuite[K], Generic[K]):
    """For key media."""

    @pytest.fixture
    def medium(self) -> K:
        raise NotImplementedError("a suite's subclass gives the medium")

    def peek(self, medium: K, name: Address) -> bytes | None:
        """The stored value, read behind the medium."""
        raise NotImplementedError

    def poke(self, medium: K, name: Address, value: bytes) -> None:
        """Store a value behind the medium."""
        raise NotImplementedError

    def fill(self, medium: K, wanted: Sequence[Address], nbytes: int = 300_000) -> list[memoryview]:
        data = [payload(index, nbytes) for index in range(len(wanted))]
        assert all(one.done for one in medium.write(wanted, [[each[:512], each[512:]] for each in data]))
        return data

    def test_gives_back_what_was_written(self, medium: K) -> None:
        wanted = names(9)
        data = self.fill(medium, wanted)
        order = [4, 0, 8, 3, 3]
        into = [room(300_000) for _ in order]
        outcomes = medium.read([wanted[i] for i in order], [[each[:512], each[512:]] for each in into])
        assert outcomes == [Outcome(Status.DONE, 300_000)] * 5
        assert into == [data[i] for i in order]
        assert self.peek(medium, wanted[0]) == bytes(data[0])

    def test_reports_the_true_length_of_a_shorter_value(self, medium: K) -> None:
        (name,) = names(1)
        self.poke(medium, name, b"short")
        first, second = room(3), room(1000)
        assert medium.read([name], [[first, second]]) == [Outcome(Status.DONE, 5)]
        assert bytes(first) + bytes(second[:2]) == b"short"

    def test_absent_and_oversized_items_leave_their_neighbours_alone(self, medium: K) -> None:
        wanted = names(5)
        data = self.fill(medium, wanted[:4], 1000)
        self.poke(medium, wanted[1], bytes(200_000))
        self.poke(medium, wanted[2], b"")
        into = [room(1000) for _ in wanted]
        outcomes = medium.read(wanted, [[each] for each in into])
        status = [one.status for one in outcomes]
        assert status == [Status.DONE, Status.FAILED, Status.DONE, Status.DONE, Status.ABSENT]
        assert outcomes[2].nbytes == 0
        assert "200000" in outcomes[1].detail
        assert (into[0], into[3]) == (data[0], data[3])

    def test_each_item_that_came_is_shown_once_and_decides_its_outcome(self, medium: K) -> None:
        wanted = names(6)
        data = self.fill(medium, wanted[:5], 5000)
        into = [room(5000) for _ in wanted]
        seen: dict[int, bytes] = {}

        def arrived(index: int, outcome: Outcome) -> Outcome:
            seen[index] = bytes(into[index])
            return Outcome(Status.CORRUPT, outcome.nbytes, "no") if index == 2 else outcome

        status = [one.status for one in medium.read(wanted, [[each] for each in into], arrived)]
        assert status == [Status.DONE, Status.DONE, Status.CORRUPT, Status.DONE, Status.DONE, Status.ABSENT]
        assert seen == dict(enumerate(data))

    def test_probe_finds_the_present_prefix_exactly(self, medium: K) -> None:
        wanted = names(200)
        assert medium.probe(wanted) == 0
        self.fill(medium, wanted, 8)
        assert medium.probe(wanted) == 200
        for hole in (199, 130, 64, 63, 1):
            medium.delete([wanted[hole]])
            assert medium.probe(wanted) == hole
        assert medium.probe([]) == 0

    def test_the_later_write_wins_whole(self, medium: K) -> None:
        (name,) = names(1)
        medium.write([name], [[payload(1, 4000)]])
        medium.write([name], [[payload(2, 1000)]])
        assert self.peek(medium, name) == bytes(payload(2, 1000))

    def test_deletes_and_does_not_mind_what_is_absent(self, medium: K) -> None:
        wanted = names(3)
        self.fill(medium, wanted[:2], 10)
        medium.delete(wanted)
        medium.delete([])
        assert [self.peek(medium, name) for name in wanted] == [None] * 3

    def test_scans_every_name(self, medium: K) -> None:
        wanted = names(50)
        self.fill(medium, wanted, 10)
        medium.remember("identity", b"d" * 32, "{}")
        assert set(medium.scan()) == set(wanted)

    def test_cleared_values_are_absent_at_once_and_reclaimed_behind(self, medium: K) -> None:
        wanted = names(6)
        self.fill(medium, wanted, 10)
        before = medium.generation
        medium.clear()
        assert (medium.probe(wanted), list(medium.scan())) == (0, [])
        assert medium.generation > before
        status = [one.status for one in medium.read(wanted, [[room(10)] for _ in wanted])]
        assert status == [Status.ABSENT] * 6
        again = self.fill(medium, wanted[:2], 20)
        assert medium.reclaim() in (
            0,
            4,
            6,
        )  # nothing is kept, the new ones took the places of two, or names of their own
        assert (medium.probe(wanted), medium.reclaim()) == (2, 0)
        into = [room(20), room(20)]
        assert all(one.done for one in medium.read(wanted[:2], [[each] for each in into]))
        assert into == again

    def test_a_probe_says_that_epochs_have_changed(self, medium: K) -> None:
        medium.probe([])
        before = medium.epochs_version
        medium.raise_epochs({"a": 1}, {})
        medium.probe(names(1))
        seen = medium.epochs_version
        assert seen != before
        medium.raise_epochs({"a": 1}, {})
        medium.epochs()
        medium.raise_epochs({"a": 2}, {})
        medium.probe([])
        assert medium.epochs_version != seen

    def test_heads_are_the_first_bytes_of_what_is_there(self, medium: K) -> None:
        wanted = names(3)
        data = self.fill(medium, wanted[:2], 1000)
        self.poke(medium, wanted[1], b"short")
        assert medium.heads(wanted, 512) == [bytes(data[0][:512]), b"short", b""]
        assert medium.heads([], 512) == []

    def test_touch_and_ping_take_what_comes(self, medium: K) -> None:
        wanted = names(3)
        self.fill(medium, wanted[:2], 10)
        medium.touch(wanted)
        medium.touch([])
        medium.ping()
        assert medium.probe(wanted) == 2

    def test_counts_bytes(self, medium: K) -> None:
        wanted = names(2)
        before = medium.bytes_read, medium.bytes_written
        self.fill(medium, wanted, 1000)
        medium.read(wanted[:1], [[room(1000)]])
        assert (medium.bytes_read - before[0], medium.bytes_written - before[1]) == (1000, 2000)

    def test_threads_do_not_mix_their_values_up(self, medium: K) -> None:
        wrong: list[int] = []

        def play(number: int) -> None:
            own = names(3, seed=number + 1)
            data = [payload(100 * number + index, 100_000) for index in range(3)]
            for _ in range(5):
                into = [room(100_000) for _ in own]
                medium.write(own, [[each] for each in data])
                medium.read(own, [[each] for each in into])
                if into != data:
                    wrong.append(number)

        together(play)
        assert not wrong

    def test_an_empty_batch_is_no_batch(self, medium: K) -> None:
        assert medium.read([], []) == []
        assert medium.write([], []) == []

    def test_closes_twice(self, medium: K) -> None:
        medium.close()
        medium.close()
