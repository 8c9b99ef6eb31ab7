"""Clearing one tier: it is empty at once and for good, and the others keep what they have."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvtier.abc.store import Reason, Selection
from kvtier.config import WriteMode
from kvtier.errors import RequestError
from kvtier.key import Address
from kvtier.store.epochs import name_of
from kvtier.testing.valkey import ValkeyServer
from tests.support import behind

from .builders import IDENTITY, make_bench
from .clears import asked, media, on, upkeep


@pytest.mark.parametrize("kind", ["nvme", "memory", "redis"])
def test_one_tier_is_emptied_and_the_others_keep_theirs(kind: str, tmp_path: Path, server: ValkeyServer) -> None:
    bench = make_bench(**media(kind, tmp_path, server))  # type: ignore[arg-type]
    name = bench.tiers[0].name
    keys = asked(bench, 1)
    bench.save(keys)
    cleared = bench.store.clear(Selection(), name)
    assert (cleared.epoch, cleared.tiers[name].blocks) == (None, 3 if kind == "nvme" else None)
    assert bench.load(keys) == 3, "DRAM has them"
    bench.store.clear(Selection(), "dram")
    assert bench.arena.pool.ready == 0
    assert bench.load(keys) == 0
    assert bench.store.explain("r")[0].reason is Reason.CLEARED
    upkeep(bench)
    if kind == "redis":
        assert not list(behind(server).scan_iter(b"kvt:1:*"))
    bench.save(keys)
    bench.store.clear(Selection(), "dram")
    assert bench.load(keys) == 3, "what was saved since is found"
    upkeep(bench)
    bench.empty_dram()
    assert bench.load(keys) == 3, "and nothing removes it behind"
    bench.store.close()
    if kind == "nvme":
        again = make_bench(nvme=tmp_path)
        assert again.tiers[0].counts()["ready"] == 3
        again.store.close()


def test_an_emptied_nvme_is_empty_after_a_restart_even_if_its_rows_were_being_read(tmp_path: Path) -> None:
    bench = make_bench(nvme=tmp_path)
    keys = asked(bench, 1)
    bench.save(keys)
    bench.empty_dram()
    bench.store.match("r", keys)
    bench.store.clear(Selection(), "nvme")
    bench.turn()
    bench.store.forget("r")
    upkeep(bench)
    bench.idle()
    assert bench.tiers[0].counts()["free"] > 0 == bench.tiers[0].counts()["retiring"]
    bench.store.close()
    again = make_bench(nvme=tmp_path)
    assert again.tiers[0].counts()["ready"] == 0
    again.store.close()


def test_a_cleared_tier_takes_a_selective_block_again(server: ValkeyServer) -> None:
    bench = make_bench(shared=on(server), shared_write=WriteMode.SELECTIVE)
    keys = asked(bench, 1)
    bench.save(keys)
    bench.load(keys)
    bench.store.clear(Selection(), "shared")
    bench.load(keys)
    bench.store.clear(Selection(), "dram")
    assert bench.load(keys) == 3
    bench.store.close()


def test_a_generation_that_redis_lost_is_given_back(server: ValkeyServer) -> None:
    mine, theirs = on(server), on(server)
    mine.clear()
    mine.clear()
    assert theirs.probe([]) == 0
    assert theirs.generation == 2
    behind(server).flushall()
    fresh = on(server)
    assert fresh.probe([]) == fresh.generation == 0
    mine.probe([])
    fresh.probe([])
    assert fresh.generation == 2
    behind(server).flushall()
    mine.clear()
    theirs.probe([])
    assert mine.generation == theirs.generation == 3
    for medium in (mine, theirs, fresh):
        medium.close()


@pytest.mark.parametrize("there", [b"garbage", b"-7", b"9223372036854775807", b"4294967296", b""])
def test_a_generation_that_is_none_does_not_keep_redis_from_being_cleared(server: ValkeyServer, there: bytes) -> None:
    mine, theirs = on(server), on(server)
    name = Address(bytes(40))
    assert mine.write([name], [[memoryview(b"value")]])[0].done
    behind(server).hset("kvt:clear", "generation", there)
    assert mine.probe([name]) == theirs.probe([name]) == 1
    mine.clear()
    assert mine.probe([name]) == theirs.probe([name]) == 0
    assert mine.generation == theirs.generation == 1
    assert mine.reclaim() == 1
    mine.close()
    theirs.close()


def test_records_that_cannot_be_ours_do_not_keep_redis_from_its_work(server: ValkeyServer) -> None:
    behind(server).hset("kvt:about:identity", mapping={f"{number}": "x" for number in range(3000)})
    behind(server).set("kvt:about:scope", "a string")
    bench = make_bench(shared=on(server))
    (tier,) = bench.tiers
    tier.greet(IDENTITY.digest(), "{}")
    span = asked(bench, 1)
    bench.save(span)
    upkeep(bench)
    assert tier.usable
    assert bench.store.clear(Selection()).tiers[tier.name].trouble is None
    assert tier.usable
    assert behind(server).hget("kvt:clear", name_of(Selection())) == b"1"
    bench.store.close()


def test_the_last_generation_is_not_passed(server: ValkeyServer) -> None:
    bench = make_bench(shared=on(server))
    behind(server).hset("kvt:clear", "generation", (1 << 32) - 1)
    (tier,) = bench.tiers
    tier.probe([])
    assert bench.store.clear(Selection(), tier.name).tiers[tier.name].trouble
    assert tier.usable
    assert behind(server).hget("kvt:clear", "generation") == b"%d" % ((1 << 32) - 1)
    bench.store.close()


def test_a_tier_that_there_is_not_is_refused(tmp_path: Path) -> None:
    bench = make_bench(nvme=tmp_path)
    with pytest.raises(RequestError, match="tier 'redis' does not exist here; there are dram, nvme"):
        bench.store.clear(Selection(), "redis")
    bench.store.close()
