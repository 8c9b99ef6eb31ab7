"""Clearing: what was cleared is out of reach at once, does not come back, and is reclaimed behind."""

from __future__ import annotations

import re
import subprocess
import sys
import textwrap
from dataclasses import replace
from pathlib import Path

import pytest

from kvtier.abc.medium import KeyMedium
from kvtier.abc.store import Found, Reason, Selection
from kvtier.errors import MediumFull
from kvtier.key import Adapter, Scope
from kvtier.storage_backends.memory import MemoryMedium
from kvtier.storage_backends.redis import RedisMedium
from kvtier.store import clearing
from kvtier.store.clearing import EXPLAIN_SECONDS
from kvtier.store.epochs import name_of
from kvtier.testing.faults import Faulty, wrapped
from kvtier.testing.valkey import ValkeyServer
from kvtier.tier import key as tier_key
from kvtier.tier import slot as tier_slot
from tests.support import behind

from .builders import IDENTITY, make_bench, span
from .clears import asked, media, on, upkeep

LORA = Adapter("lora", b"d" * 32)
ACME, OTHER = Scope(tenant=b"acme's secret"), Scope(tenant=b"another secret")


# -- scopes


@pytest.mark.parametrize("kind", ["nvme", "memory", "redis"])
def test_cleared_blocks_miss_at_once_and_their_bytes_are_reclaimed(
    kind: str, tmp_path: Path, server: ValkeyServer
) -> None:
    bench = make_bench(**media(kind, tmp_path, server))  # type: ignore[arg-type]
    before, salted = asked(bench, 1), asked(bench, 1, Scope(salt="s"))
    bench.save(before)
    bench.save(salted)
    assert bench.load(before) == bench.load(salted) == 3
    cleared = bench.store.clear(Selection())
    assert cleared.epoch == 1
    assert cleared.tiers["dram"].blocks == 6
    assert cleared.tiers[bench.tiers[0].name].blocks == (6 if kind == "nvme" else None)
    again = asked(bench, 1)
    assert again.keys != before.keys
    assert bench.load(again, "new") == 0
    assert bench.load(before, "old") == bench.load(salted, "old") == 0, "who still has old keys gets nothing either"
    assert bench.store.explain("old")[0].reason is Reason.CLEARED
    upkeep(bench)
    assert bench.arena.pool.ready == 0
    assert bench.metrics.value("kvtier_tier_evictions_total", tier="dram", reason="cleared") == 6
    assert bench.metrics.value("kvtier_tier_evictions_total", tier=bench.tiers[0].name, reason="cleared") == 6
    if kind == "nvme":
        assert bench.tiers[0].counts()["ready"] == 0
    if kind == "redis":
        assert not list(behind(server).scan_iter(b"kvt:1:*"))
    bench.save(again)
    assert bench.load(again) == 3
    upkeep(bench)
    assert bench.load(again) == 3, "what was saved since stays"
    bench.store.close()


def test_only_what_was_selected_is_cleared(tmp_path: Path) -> None:
    bench = make_bench(24, nvme=tmp_path)
    scopes = [Scope(), ACME, OTHER, Scope(adapter=LORA), replace(ACME, adapter=LORA), replace(ACME, salt="pepper")]

    def held() -> list[int]:
        return [bench.load(asked(bench, 1, scope)) for scope in scopes]

    for scope in scopes:
        bench.save(asked(bench, 1, scope))
    assert held() == [3] * 6
    assert bench.store.clear(Selection(model="another-model")).scopes == ()
    assert held() == [3] * 6
    cleared = bench.store.clear(Selection(tenant=ACME.tenant_id))
    assert [(each["tenant"], each["adapter"]) for each in cleared.scopes] == [
        (ACME.tenant_id.hex(), None),
        (ACME.tenant_id.hex(), {"name": "lora", "digest": LORA.digest.hex()}),
    ]
    assert held() == [3, 0, 3, 3, 0, 0]
    bench.store.clear(Selection(adapter="lora"))
    assert held() == [3, 0, 3, 0, 0, 0]
    bench.store.clear(Selection(tenant=bytes(16)))
    assert held() == [0, 0, 3, 0, 0, 0]
    upkeep(bench)
    assert bench.tiers[0].counts()["ready"] == 3
    bench.store.clear(Selection(model=IDENTITY.model))
    assert held() == [0] * 6


def test_neither_secrets_nor_salts_are_written_down(tmp_path: Path, server: ValkeyServer) -> None:
    bench = make_bench(nvme=tmp_path, shared=on(server))
    scope = Scope(tenant=b"hunter2-secret", adapter=LORA, salt="pepper-and-salt")
    bench.save(asked(bench, 1, scope))
    bench.store.clear(Selection(tenant=scope.tenant_id))
    bench.save(asked(bench, 1, scope))
    upkeep(bench, 2)
    for tier in bench.tiers:
        (record,) = tier.records("scope").values()
        assert scope.tenant_id.hex() in record and '"lora"' in record and '"epoch": 1' in record
    bench.store.close()
    client = behind(server)
    values = [client.hgetall(name) for name in (b"kvt:clear", b"kvt:about:scope", b"kvt:about:identity")]
    written = b"".join(path.read_bytes() for path in tmp_path.iterdir() if path.is_file()) + repr(values).encode()
    assert b"hunter2" not in written and b"pepper" not in written
    assert b"test-model" in written


def test_what_comes_late_under_an_old_epoch_is_not_kept(tmp_path: Path) -> None:
    bench = make_bench(nvme=tmp_path)
    old, loading = asked(bench, 1), asked(bench, 2)
    bench.save(loading)
    match = bench.match(loading)
    running = bench.store.save(old, bench.source(old))  # queued, not copied yet
    bench.store.clear(Selection())
    bench.turn()
    assert running.done()
    assert bench.arena.pool.slot(bench.store.geometry.addresses(old)[0]) is None
    after = bench.save(asked(bench, 1, Scope()))
    assert all(one.done for one in after.result(0))
    outcomes = bench.save(old).result(0)
    assert {one.detail for one in outcomes} == {"cleared"}
    transfer = bench.store.load(match, bench.source(loading))
    bench.turn()
    assert not any(one.done for one in transfer.result(0))
    bench.idle()


def test_a_block_on_its_way_up_when_its_scope_is_cleared_does_not_arrive(tmp_path: Path) -> None:
    bench = make_bench(nvme=tmp_path)
    keys = asked(bench, 1)
    bench.save(keys)
    bench.empty_dram()
    match = bench.store.match("r", keys)
    assert match.pending
    bench.store.clear(Selection())
    bench.turn()
    assert not match.pending
    assert (match.hits, match.blocks[0].found, match.blocks[0].reason) == (0, Found.MISS, Reason.CLEARED)
    assert bench.arena.pool.ready == 0
    bench.store.forget("r")
    upkeep(bench)
    bench.idle()


def test_a_miss_of_what_was_cleared_says_so_and_no_other_does(tmp_path: Path) -> None:
    bench = make_bench(nvme=tmp_path)
    bench.save(asked(bench, 1))
    bench.save(asked(bench, 1, ACME))
    bench.store.clear(Selection(tenant=bytes(16)))

    def why(number: int, scope: Scope = Scope(), blocks: int = 3) -> list[Reason | None]:  # noqa: B008 - frozen
        match = bench.match(asked(bench, number, scope, blocks=blocks), "new")
        match.release()
        return [each.reason for each in match.blocks]

    behind_it = [Reason.BEHIND_A_MISS] * 2
    assert why(1) == [Reason.CLEARED, *behind_it], "it is still there, out of reach"
    upkeep(bench)
    assert why(1) == [Reason.CLEARED, *behind_it], "it was reclaimed"
    assert why(2) == [Reason.NEVER_STORED, *behind_it]
    assert why(1, OTHER) == [Reason.NEVER_STORED, *behind_it]
    assert why(1, ACME) == [None] * 3
    bench.save(asked(bench, 1, blocks=2))
    assert why(1) == [None, None, Reason.CLEARED]
    bench.store.clear(Selection(adapter="another"))
    assert why(1) == [None, None, Reason.CLEARED]
    bench.clock.advance(2 * EXPLAIN_SECONDS)
    assert why(1) == [None, None, Reason.NEVER_STORED], "nobody pays for the former keys for ever"


# -- what persists


@pytest.mark.parametrize("reclaimed", [False, True])
def test_nothing_comes_back_after_a_restart(tmp_path: Path, reclaimed: bool) -> None:
    bench = make_bench(nvme=tmp_path)
    for scope in (ACME, OTHER):
        bench.save(asked(bench, 1, scope))
    bench.store.clear(Selection(tenant=ACME.tenant_id))
    upkeep(bench, 4 if reclaimed else 0)
    bench.store.close()
    again = make_bench(nvme=tmp_path)
    assert again.tiers[0].counts()["ready"] == (3 if reclaimed else 6)
    assert again.load(asked(again, 1, ACME)) == 0
    assert again.load(asked(again, 1, OTHER)) == 3
    upkeep(again)
    assert again.tiers[0].counts()["ready"] == 3
    again.store.clear(Selection(adapter="never seen"))
    cleared = again.store.clear(Selection())
    assert cleared.epoch == 3
    assert {each["tenant"] for each in cleared.scopes} >= {ACME.tenant_id.hex(), OTHER.tenant_id.hex()}
    again.store.close()


def test_nothing_comes_back_from_header_pages_when_the_index_is_lost(tmp_path: Path) -> None:
    bench = make_bench(nvme=tmp_path)
    bench.save(asked(bench, 1))
    bench.store.clear(Selection())
    bench.store.close()
    for part in tmp_path.glob("index.sqlite*"):
        part.unlink()
    again = make_bench(nvme=tmp_path)
    assert again.tiers[0].counts()["ready"] == 3, "rebuilt from its header pages"
    assert again.load(asked(again, 1)) == 0
    upkeep(again)
    assert again.tiers[0].counts()["ready"] == 0
    again.store.close()


def test_an_emptied_redis_is_told_again(server: ValkeyServer) -> None:
    mine, theirs = make_bench(shared=on(server)), make_bench(shared=on(server))
    old = asked(theirs, 1)
    theirs.save(old)
    assert mine.load(asked(mine, 1)) == 3
    mine.store.clear(Selection())
    behind(server).flushall()
    theirs.save(old)  # it has not heard of the clear, and cannot: Redis has lost it
    upkeep(mine, 1)
    assert mine.load(asked(mine, 1)) == 0
    fresh = make_bench(shared=on(server))
    assert fresh.store.epoch(bytes(16)) == 1, "what was lost was written back"
    assert fresh.load(asked(fresh, 1)) == 0
    assert theirs.load(asked(theirs, 2)) == 0
    assert theirs.store.epoch(bytes(16)) == 1, "its next probe has told it"
    assert theirs.load(old, "old") == 0
    for bench in (mine, theirs, fresh):
        bench.store.close()


def test_nvme_tells_a_redis_that_lost_everything(tmp_path: Path, server: ValkeyServer) -> None:
    bench = make_bench(nvme=tmp_path, shared=on(server))
    bench.save(asked(bench, 1))
    bench.store.clear(Selection(IDENTITY.model, ACME.tenant_id))
    bench.store.clear(Selection(IDENTITY.model))
    bench.store.close()
    behind(server).flushall()
    again = make_bench(nvme=tmp_path, shared=on(server))
    upkeep(again, 1)
    fresh = make_bench(shared=on(server))
    assert fresh.store.epoch(bytes(16)) == fresh.store.epoch(ACME.tenant_id) == 2
    assert list(on(server).epochs()) == [name_of(Selection(model=IDENTITY.model))], "the narrower one is implied"
    for bench in (again, fresh):
        bench.store.close()


def test_a_tier_that_is_down_is_told_when_it_is_back(tmp_path: Path, server: ValkeyServer) -> None:
    bench = make_bench(nvme=tmp_path, shared=on(server))
    bench.save(asked(bench, 1))
    server.pause()
    try:
        cleared = bench.store.clear(Selection())
    finally:
        server.resume()
    assert cleared.epoch == 1
    assert cleared.tiers["nvme"].trouble is None
    assert re.search(r"(?i)timed? ?out", cleared.tiers["shared"].trouble or "")
    upkeep(bench, 2)
    other = make_bench(shared=on(server))
    assert other.load(asked(other, 1)) == 0
    for each in (bench, other):
        each.store.close()


CHILD = """
    import sys, time
    from pathlib import Path
    from kvtier.abc.store import Selection, SlotRange
    from kvtier.config import StoreSettings
    from kvtier.key import Origin, Scope, Span, chain_keys, root_key
    from kvtier.metrics import Metrics
    from kvtier.store.open import open_store
    from kvtier.testing.blocks import IDENTITY, EngineMemory, filled
    from kvtier.url import TierUrl

    tiers = ["dram://?capacity=1MiB", sys.argv[1] + "?write=through"]
    store = open_store([TierUrl.parse(url) for url in tiers], IDENTITY, StoreSettings(), Metrics(), require_all=True)

    def span(number):
        scope = Scope(epoch=store.epoch(bytes(16)))
        root = root_key(IDENTITY, scope)
        keys = tuple(chain_keys(root, [number, *range(1, 48)], 16))
        return Span(Origin.of(IDENTITY.digest(), scope), root, 0, keys)

    def matched(number):
        match = store.match("r", span(number))
        while match.pending:
            time.sleep(0.001)
        match.release()
        return match.hits

    for line in sys.stdin:
        verb, *rest = line.split()
        if verb == "save":
            keys = span(int(rest[0]))
            store.save(keys, filled(EngineMemory(8), keys)).result(60)
            print(store.drain(60), flush=True)
        elif verb == "hits":
            print(matched(int(rest[0])), flush=True)
        elif verb == "clear":
            print(store.clear(Selection(), rest[0] if rest else None).epoch, flush=True)
        elif verb == "forget":
            print(store.clear(Selection(), "dram").epoch, flush=True)
        elif verb == "epoch":
            print(store.epoch(bytes(16)), flush=True)
    store.close()
"""


class Process:
    """A store of its own in another process, over DRAM and the shared Redis."""

    def __init__(self, server: ValkeyServer) -> None:
        command = [sys.executable, "-c", textwrap.dedent(CHILD), server.url]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def ask(self, line: str) -> str:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()
        return self.process.stdout.readline().strip()

    def end(self) -> None:
        self.process.communicate(timeout=60)
        assert self.process.returncode == 0


@pytest.mark.slow
def test_two_processes_that_share_a_redis_see_each_others_clears(server: ValkeyServer) -> None:
    one, two = Process(server), Process(server)
    assert one.ask("save 1") == one.ask("save 2") == "True"
    assert (two.ask("hits 1"), one.ask("hits 1")) == ("3", "3")
    assert one.ask("clear") == "1"
    assert one.ask("hits 1") == "0"
    assert two.ask("hits 2") == "0", "the probe itself has told it"
    assert two.ask("epoch") == "1"
    assert two.ask("hits 1") == "0", "nor does its own DRAM give what was cleared"
    assert two.ask("save 1") == "True"
    assert one.ask("hits 1") == "3"
    assert two.ask("clear redis") == "None"
    assert one.ask("forget") == "None"
    assert one.ask("hits 1") == "0", "its names are of another generation now"
    assert one.ask("save 1") == "True"
    assert two.ask("hits 1") == "3"
    one.end()
    two.end()


# -- clears that meet


@pytest.mark.parametrize("kind", ["nvme", "memory"])
def test_what_is_cleared_while_cleared_blocks_are_searched_for_goes_as_well(
    kind: str, tmp_path: Path, server: ValkeyServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module, steps in ((clearing, 1), (tier_slot, 1), (tier_key, None)):
        monkeypatch.setattr(module, "STEP", 2)
        if steps is not None:
            monkeypatch.setattr(module, "STEPS", steps)
    bench = make_bench(**media(kind, tmp_path, server))  # type: ignore[arg-type]
    for number, scope in enumerate((OTHER, ACME)):
        bench.save(asked(bench, number, scope))
    for scope in (ACME, OTHER, Scope(tenant=b"third"), Scope(tenant=b"fourth")):
        bench.store.clear(Selection(tenant=scope.tenant_id))
        upkeep(bench, 1)  # too few to come to an end
    assert bench.store.reclaim(10)
    assert bench.arena.pool.ready == 0
    held = bench.tiers[0].medium
    left = list(held.scan()) if isinstance(held, KeyMedium) else bench.tiers[0].counts()["ready"]
    assert not left, "what the store calls finished is gone"
    bench.store.close()


def test_cleared_blocks_that_wait_to_be_written_are_not_left_below(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(clearing, "STEP", 1)
    monkeypatch.setattr(clearing, "STEPS", 1)
    bench = make_bench(nvme=tmp_path)
    (tier,) = bench.tiers
    span = asked(bench, 1)
    running = bench.store.save(span, bench.source(span))
    while not running.done():
        assert bench.store._workers.run_one()
    assert tier.workers.queued == 1, "a write waits"
    bench.store.clear(Selection())
    bench.clock.advance(2.0)
    bench.store.keep()
    while tier.workers.queued:
        assert tier.workers.run_one(lambda count: count - 1)  # what was submitted last comes first
    assert bench.store.reclaim(10)
    assert tier.counts()["ready"] == 0
    bench.store.close()


def test_a_tier_that_is_cleared_while_it_is_searched_is_searched_again(server: ValkeyServer) -> None:
    bench = make_bench(shared=on(server))
    (tier,) = bench.tiers
    bench.save(asked(bench, 1))
    medium = tier.medium
    assert isinstance(medium, RedisMedium)
    reclaim = medium.reclaim

    def reclaim_and_meet() -> int:
        gone = reclaim()
        medium.reclaim = reclaim  # type: ignore[method-assign]
        bench.save(asked(bench, 2))
        bench.store.clear(Selection(), tier.name)
        return gone

    medium.reclaim = reclaim_and_meet  # type: ignore[method-assign]
    bench.store.clear(Selection(), tier.name)
    assert bench.store.reclaim(10)
    assert not list(behind(server).scan_iter(b"kvt:1:*"))
    bench.store.close()


def test_a_clear_that_is_seen_while_epochs_are_read_is_not_missed() -> None:
    class Meeting(MemoryMedium):
        met = False

        def epochs(self) -> dict[str, int]:
            rows = super().epochs()
            if self.met:
                self.met = False
                self.raise_epochs({name_of(Selection("other")): 9}, {})  # another engine's, seen by a probe of ours
                self.probe([])
            return rows

    shared = Meeting()
    bench = make_bench(shared=shared)
    shared.met = True
    shared.raise_epochs({name_of(Selection("one")): 3}, {})
    upkeep(bench)
    assert bench.store._clearing.epochs.of("one", bytes(16), bytes(16)) == 3
    assert bench.store._clearing.epochs.of("other", bytes(16), bytes(16)) == 9
    bench.store.close()


def test_a_later_clear_takes_what_was_computed_after_one_that_could_not_be_told() -> None:
    """Two stores gave the same epoch to two clears, because the server was full at the first: its blocks outlived the second."""
    server = MemoryMedium()
    full = Faulty("raise_epochs", error=MediumFull("out of memory"))
    one, other = make_bench(shared=wrapped(server, full)), make_bench(shared=server)
    assert one.store.clear(Selection()).epoch == 1
    between = span(range(64), scope=Scope(epoch=one.store.epoch(bytes(16))))
    one.save(between)
    cleared = other.store.clear(Selection())
    assert cleared.tiers["shared"].trouble is None
    after = span(range(64), scope=Scope(epoch=other.store.epoch(bytes(16))))
    assert other.match(after).hits == 0
    full.active = False
    one.store.clear(Selection())
    again = span(range(64), scope=Scope(epoch=one.store.epoch(bytes(16))))
    one.save(again)
    one.empty_dram()
    assert one.load(again, "again") == len(again), "it is told as soon as something is to be written"
