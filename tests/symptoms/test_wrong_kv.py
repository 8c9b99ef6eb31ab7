"""What a tier gives out is what was saved: failed, early, torn and foreign copies are misses."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from itertools import product
from pathlib import Path

import pytest
import redis

from kvtier.abc.connector import SavePlan, StepPlan
from kvtier.abc.store import Reason, SlotRange
from kvtier.codec.frame import HEADER_BYTES, FrameHeader
from kvtier.connectors.bundled import BundledConnector
from kvtier.key import Identity
from kvtier.layout import CacheGroup, GroupKind, Layout
from kvtier.storage_backends.redis_names import PREFIX
from kvtier.testing.blocks import EngineMemory
from tests.store.builders import chain, content, make_bench

from .support import Tiers, dram, nvme, prompt, valkey

# -- stores that fail


class Device:
    """Stands between kvtier and ``os.pwritev``: the ``nth`` block that is written fails once, as ``how`` says."""

    def __init__(self, how: str, nth: int) -> None:
        self.how, self.left = how, nth
        self.failed = False
        self.real = os.pwritev

    def __call__(self, descriptor: int, buffers: list[memoryview], offset: int) -> int:
        if self.failed:
            return self.real(descriptor, buffers, offset)
        self.left -= 1
        if self.left == -1 and self.how in ("short", "nothing"):
            return self.real(descriptor, buffers[:1], offset) if self.how == "short" else 0  # the rest is refused
        if self.left >= 0:
            return self.real(descriptor, buffers, offset)
        self.failed = True
        if self.how == "nothing":
            return 0
        number = errno.ENOSPC if self.how == "ENOSPC" else errno.EIO
        raise OSError(number, os.strerror(number))


@pytest.mark.parametrize(("how", "nth"), [("EIO", 0), ("short", 2), ("ENOSPC", 2), ("EIO", 4), ("nothing", 1)])
def test_a_failed_store_is_not_visible(
    tmp_path: Path, how: str, nth: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The hit ends before the block whose write failed; the others of its batch are there, and a counter says why."""
    blocks = 5
    with Tiers(dram(64), nvme(tmp_path / "nvme") + "&threads=1") as tiers:
        device = Device(how, nth)
        monkeypatch.setattr(os, "pwritev", device)
        tiers.save(prompt(1, blocks))
        tiers.only_below()
        assert device.failed
        assert tiers.store.held("nvme") == blocks - 1, "it is not shown for a moment"
        assert tiers.load(prompt(1, blocks)) == nth
        reason = "no_room" if how == "ENOSPC" else "write_failed"
        assert tiers.count("saves_dropped", "nvme", reason=reason) == 1
        assert "nvme: 1 block could not be written: " in caplog.text
        monkeypatch.undo()
        before = tiers.count("written_blocks", "nvme")
        tiers.save(prompt(1, blocks))
        tiers.only_below()
        assert tiers.count("written_blocks", "nvme") == before + 1, "its siblings were there all along"
        assert tiers.load(prompt(1, blocks)) == blocks
    with Tiers(dram(64), nvme(tmp_path / "nvme")) as restarted:
        assert restarted.load(prompt(1, blocks)) == blocks


def test_a_copy_into_dram_that_fails_is_not_visible() -> None:
    """Of a batch whose third block could not be copied the whole batch is no hit, and nothing stays held."""

    class Breaking(EngineMemory):
        def view(self, slot: int) -> memoryview:
            if slot == 2:
                raise RuntimeError("device lost")
            return super().view(slot)

    bench = make_bench()
    keys = chain(1, 5)
    transfer = bench.store.save(keys, SlotRange(Breaking(5), range(5)))
    assert bench.match(keys, "before").hits == 0
    bench.store.forget("before")
    bench.turn()
    assert not any(outcome.done for outcome in transfer.result(0))
    assert bench.metrics.value("kvtier_tier_saves_dropped_total", tier="dram", reason="write_failed") == 5
    match = bench.match(keys, "after")
    assert match.hits == 0
    assert match.blocks[0].reason is Reason.SAVE_DROPPED
    match.release()
    bench.idle()


# -- copies and the work that they must wait for


class Stream:
    """Work that happens only once somebody waits for an event behind it, as on a device; ``order`` says when what was."""

    def __init__(self) -> None:
        self.queued: list[tuple[str, Callable[[], None]]] = []
        self.order: list[str] = []

    def submit(self, name: str, work: Callable[[], None]) -> None:
        self.queued.append((name, work))

    def event(self) -> Event:
        return Event(self, len(self.queued))


class Event:
    """Passed once everything that was submitted before it has happened."""

    def __init__(self, stream: Stream, behind: int) -> None:
        self._stream = stream
        self._behind = behind

    def wait(self) -> None:
        for name, work in self._stream.queued[: self._behind]:
            if name not in self._stream.order:
                work()
                self._stream.order.append(name)


class Watched(EngineMemory):
    """An engine's memory that notes in the stream's order when a copy first touches it."""

    def __init__(self, slots: int, stream: Stream) -> None:
        super().__init__(slots)
        self._stream = stream

    def view(self, slot: int) -> memoryview:
        if "copy" not in self._stream.order:
            self._stream.order.append("copy")
        return super().view(slot)


@pytest.mark.parametrize("through", ["store", "connector"])
def test_a_save_waits_for_the_step_that_writes_the_blocks(through: str) -> None:
    bench = make_bench()
    keys, stream = chain(1, 4), Stream()
    memory = Watched(4, stream)
    memory.bytes[:] = 0x7F

    def kernel() -> None:
        for index in range(4):
            memory.bytes[index] = content(keys, index)

    stream.submit("compute", kernel)
    if through == "store":
        bench.store.save(keys, SlotRange(memory, range(4)), stream.event())
    else:
        worker = BundledConnector(bench.store, 16, 64, 64).worker
        worker.register_kv_caches(memory)
        worker.wait_for_save(StepPlan(saves=(SavePlan("r", keys, (0, 1, 2, 3)),)), stream.event())
    bench.turn()
    assert stream.order == ["compute", "copy"]
    assert bench.load(keys) == 4, "and what was saved is what the step wrote"


def test_a_load_waits_for_whoever_still_reads_the_slots() -> None:
    bench = make_bench()
    keys, stream = chain(1, 4), Stream()
    bench.save(keys)
    memory = Watched(4, stream)
    memory.bytes[:] = 0x11
    seen: list[bool] = []
    stream.submit("attention", lambda: seen.append(bool((memory.bytes == 0x11).all())))
    transfer = bench.store.load(bench.match(keys), SlotRange(memory, range(4)), stream.event())
    bench.turn()
    assert all(outcome.done for outcome in transfer.result(0))
    assert stream.order == ["attention", "copy"]
    assert seen == [True], "the earlier step read its own blocks"


# -- layouts

KINDS = [(GroupKind.MHA, 4), (GroupKind.GQA, 2), (GroupKind.MQA, 1), (GroupKind.MLA, 1)]


@pytest.mark.parametrize("kv_dtype", ["bf16", "fp8_e4m3"])
@pytest.mark.parametrize(("kind", "heads"), KINDS, ids=lambda value: getattr(value, "value", None))
def test_every_known_layout_comes_back_to_the_bit(tmp_path: Path, kind: GroupKind, heads: int, kv_dtype: str) -> None:
    layout = Layout((CacheGroup(kind, 3, heads, 40, kv_dtype),), 8)
    identity = Identity("test-model", "r1", kv_dtype, layout)
    with Tiers(dram(16, identity), nvme(tmp_path), identity=identity) as tiers:
        span = prompt(1, 4, identity=identity)
        tiers.save(span)
        assert tiers.load(span) == 4
        tiers.only_below()
        assert tiers.load(span) == 4


# -- values of others

FORGERIES: dict[str, Callable[[bytes, bytes], bytes]] = {
    "a pickle": lambda _, __: b"\x80\x04cos\nsystem\n(S'true'\ntR.",
    "a pickle behind our magic": lambda value, _: value[:6] + b"\x80\x04cos\nsystem\n(S'true'\ntR." + value[33:],
    "another block's frame": lambda _, other: other,
    "another block's payload": lambda value, other: value[:HEADER_BYTES] + other[HEADER_BYTES:],
    "an older schema": lambda value, _: value[:6] + b"\x00\x00" + value[8:],
    "a newer schema": lambda value, _: value[:6] + b"\xff\x7f" + value[8:],
    "half of it": lambda value, _: value[: len(value) // 2],
    "nothing": lambda _, __: b"",
    "more than there is room for": lambda value, _: value + bytes(1 << 20),
    "a length that lies": lambda value, _: lied(value, payload_bytes=1 << 50),
    "a smaller length that lies": lambda value, _: lied(value, raw_bytes=64, payload_bytes=64),
    "a depth that lies": lambda value, _: lied(value, depth=7),
    "another identity": lambda value, _: lied(value, identity=bytes(32)),
    "another layout": lambda value, _: lied(value, layout=bytes(16)),
}


def lied(value: bytes, **changes: object) -> bytes:
    """The same frame under a header that says something else, with a sum that is right for it."""
    page = bytearray(value)
    header = FrameHeader.parse(memoryview(value))
    header._replace(**changes).pack_into(memoryview(page))  # type: ignore[arg-type]  # fields by name
    return bytes(page)


def test_hostile_values_are_misses(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Each forgery stands under the second key of a chain of its own: the first block is given, nothing behind it."""
    with (
        valkey(tmp_path) as server,
        redis.Redis(unix_socket_path=str(server.socket_path)) as behind,
        Tiers(dram(128), f"{server.url}?write=through") as tiers,
    ):
        spans = {name: prompt(number, 3) for number, name in enumerate(FORGERIES)}
        for span in spans.values():
            tiers.save(span)
        tiers.only_below()
        for name, span in spans.items():
            names = [PREFIX + address for address in tiers.store.geometry.addresses(span)]
            value, other = behind.get(names[1]), behind.get(names[0])
            assert isinstance(value, bytes)
            assert isinstance(other, bytes)
            behind.set(names[1], FORGERIES[name](value, other))
        for name, span in spans.items():
            assert tiers.load(span) == 1, name
        assert tiers.store.health()["redis"] == "ok"
        assert "did not prove" in caplog.text
        for span in spans.values():
            tiers.save(span)
        tiers.only_below()
        for name, span in spans.items():
            assert tiers.load(span) == 3, f"{name}: healed by the next save"
        tiers.expect_idle()


def test_a_flipped_bit_anywhere_on_its_way_is_not_served(tmp_path: Path) -> None:
    """In DRAM, in NVMe's file, in Redis: whoever reads it next computes instead."""
    with valkey(tmp_path / "valkey") as server, redis.Redis(unix_socket_path=str(server.socket_path)) as behind:
        for where, at in product(("nvme", "redis"), (0, 1, 2)):
            below = nvme(tmp_path / f"nvme-{at}") if where == "nvme" else f"{server.url}?write=through"
            with Tiers(dram(16), below) as tiers:
                span = prompt(10 * at, 3)
                tiers.save(span)
                tiers.only_below()
                if where == "redis":
                    name = PREFIX + tiers.store.geometry.addresses(span)[at]
                    behind.setrange(name, HEADER_BYTES + 77, b"flip")
                else:
                    flip(tmp_path / f"nvme-{at}", tiers.content(span, at).tobytes())
                assert tiers.load(span) == at
                assert tiers.count("sum_failures", where) == 1


def flip(directory: Path, payload: bytes) -> None:
    """One bit of that block in NVMe's file."""
    (file,) = directory.glob("slots-*.kvt")
    at = file.read_bytes().find(payload)
    assert at > 0
    with file.open("r+b") as opened:
        opened.seek(at + 77)
        opened.write(bytes([payload[77] ^ 1]))
        opened.flush()
        os.fsync(opened.fileno())
