"""The fault wrappers do what they say, and nothing else."""

from __future__ import annotations

import threading

import pytest

from kvtier.abc.medium import Outcome, Status
from kvtier.codec.raw import RawCodec
from kvtier.errors import MediumUnavailable
from kvtier.key import Address
from kvtier.storage_backends.dram import DramMedium
from kvtier.storage_backends.memory import MemoryMedium
from kvtier.testing.faults import Faulty, FaultyNames, Slow, Stuck, Throttled, Torn, wrapped
from kvtier.testing.hand import ManualClock
from kvtier.testing.media import KeyMediumSuite, names, payload, room
from kvtier.transfer.copy import read_frames, write_frames

from .support import Batch

RAW = RawCodec()


class TestAWrapperWithoutAFaultIsTransparent(KeyMediumSuite[FaultyNames]):
    @pytest.fixture
    def medium(self) -> FaultyNames:
        self.inner = MemoryMedium()
        return FaultyNames(self.inner, Slow(0.0, "nothing"))

    def peek(self, medium: FaultyNames, name: Address) -> bytes | None:
        return self.inner.values.get(name)

    def poke(self, medium: FaultyNames, name: Address, value: bytes) -> None:
        self.inner.values[name] = value


def test_faulty_items_fail_alone_and_arrivals_keep_their_numbers() -> None:
    wanted, inner = names(3), MemoryMedium()
    inner.write(wanted, [[payload(i, 10)] for i in range(3)])
    medium = wrapped(inner, Faulty("read", places=[wanted[0]]))
    seen: list[int] = []

    def arrived(index: int, outcome: Outcome) -> Outcome:
        seen.append(index)
        return outcome

    outcomes = medium.read(wanted, [[room(10)] for _ in wanted], arrived)
    assert [one.status for one in outcomes] == [Status.FAILED, Status.DONE, Status.DONE]
    assert seen == [1, 2]


def test_faulty_calls_raise_as_often_as_ordered_and_while_active() -> None:
    fault = Faulty("probe", error=MediumUnavailable("gone"), times=2)
    medium = wrapped(MemoryMedium(), fault)
    for _ in range(2):
        with pytest.raises(MediumUnavailable):
            medium.probe(names(1))
    assert medium.probe(names(1)) == 0
    again = Faulty("write")
    again.active = False
    assert wrapped(MemoryMedium(), again).write(names(1), [[payload(1, 4)]])[0].done


def test_slow_waits_before_the_calls_it_names() -> None:
    waits: list[float] = []
    medium = wrapped(DramMedium(1, 4096, prefault=False), Slow(0.5, "read", sleep=waits.append))
    medium.write([0], [[payload(1, 4)]])
    medium.read([0], [[room(4)]])
    assert waits == [0.5]
    assert medium.view(0) is not None


def test_a_throttle_takes_so_long_per_call_and_per_item_and_makes_up_for_sleeping_too_long() -> None:
    clock = ManualClock()
    late = 0.0

    def sleep(seconds: float) -> None:
        clock.advance(seconds + late)

    throttle = Throttled(0.01, "read", call=0.05, clock=clock, sleep=sleep)
    medium = wrapped(DramMedium(3, 4096, prefault=False), throttle)
    medium.write([0, 1, 2], [[payload(i, 4)] for i in range(3)])
    assert clock.now == 100.0
    for late in (0.0, throttle.SLACK / 2):
        began = clock.now
        medium.read([0, 1, 2], [[room(4)] for _ in range(3)])
        assert clock.now - began == pytest.approx(0.08 + late, abs=1e-9)
    throttle.active = False
    began = clock.now
    medium.read([0], [[room(4)]])
    assert clock.now == began


def test_a_torn_write_says_done_and_does_not_prove() -> None:
    for keep in (0, 100, 512, 5000, 50_000):
        medium, batch = wrapped(MemoryMedium(), Torn(keep)), Batch(1, 50_000)
        assert write_frames(medium, batch.names, batch.sources, batch.headers, RAW)[0].done
        assert read_frames(medium, batch.names, batch.into, batch.asked, RAW, now=0.0)[0][0].status is Status.CORRUPT


def test_stuck_calls_end_when_they_are_released() -> None:
    fault = Stuck("ping")
    medium = wrapped(MemoryMedium(), fault)
    thread = threading.Thread(target=medium.ping)
    thread.start()
    assert fault.entered.wait(10)
    assert thread.is_alive()
    fault.release()
    thread.join(10)
    assert not thread.is_alive()


def test_a_wrapper_says_how_bytes_move_now() -> None:
    inner = MemoryMedium()
    medium = wrapped(inner, Slow(0.0))
    inner.io = "buffered"  # as a file does whose direct I/O is refused while it is in use
    assert medium.io == "buffered"
