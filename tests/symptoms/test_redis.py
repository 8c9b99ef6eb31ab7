"""A Redis that is away, killed, silent, slow, full, empty again, locked or in the hands of others: bounded, visible, mended."""

from __future__ import annotations

import contextlib
import logging
import math
import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.parse import quote

import numpy as np
import pytest
import redis

from kvtier.abc.medium import MediumContext, Status
from kvtier.abc.store import Reason
from kvtier.errors import MediumRefused
from kvtier.params import build_params
from kvtier.storage_backends.redis import RedisMedium
from kvtier.storage_backends.redis_names import PREFIX
from kvtier.testing.media import names
from kvtier.testing.requirements import require_installed
from kvtier.testing.valkey import ValkeyServer
from kvtier.url import TierUrl
from tests.support import until

from .support import Tiers, dram, prompt, valkey

DEADLINE = 0.3
"""What a request may wait for blocks (seconds), and so what Redis may add to it."""
TIMEOUT = "2s"
"""So much longer than the deadline that whoever waits for Redis instead is told apart, however loaded the machine is."""
PATIENCE = 20.0
"""Seconds after which what is waited for is taken never to come."""
BLOCKS = 4


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ValkeyServer]:
    with valkey(tmp_path / "valkey") as started:
        yield started


def through(url: str, **parameters: str) -> str:
    asked = {"write": "through", "timeout": TIMEOUT, "connect_timeout": TIMEOUT, **parameters}
    return url + ("&" if "?" in url else "?") + "&".join(f"{name}={value}" for name, value in asked.items())


def opened(*urls: str, deadline: float = DEADLINE) -> Tiers:
    return Tiers(dram(256), *urls, deadline=deadline, require_all=False)


def fill(tiers: Tiers, chains: int = 12) -> None:
    for number in range(chains):
        tiers.save(prompt(number, BLOCKS))
    tiers.only_below()


def comes(tiers: Tiers, number: int) -> None:
    """A prompt's blocks are given out; at a later asking, where a loaded machine has let the first one's deadline pass."""
    until(lambda: tiers.load(prompt(number, BLOCKS)) == BLOCKS, PATIENCE, f"prompt {number} comes")


def expect_misses(tiers: Tiers, requests: int, why: Reason) -> None:
    """So many requests, one after the other, are given nothing, each for the same reason."""
    for number in range(requests):
        match = tiers.match(prompt(number, BLOCKS))
        assert (match.hits, match.blocks[0].reason) == (0, why)
        match.release()


def expect_no_wait(tiers: Tiers, requests: int = 12) -> None:
    """Each of so many requests has its answer as soon as it asks."""
    for number in range(requests):
        match = tiers.store.match(f"at once {number}", prompt(number, BLOCKS))
        assert not match.pending
        match.release()


def used_again(tiers: Tiers) -> float:
    """Seconds until the tier is well, takes blocks and gives them back."""
    began = time.monotonic()

    def used() -> bool:
        tiers.save(prompt(900, BLOCKS))
        tiers.only_below()
        return tiers.load(prompt(900, BLOCKS)) == BLOCKS

    until(lambda: tiers.store.health()["redis"] == "ok" and used(), PATIENCE, "the tier is used again")
    assert tiers.metrics.value("kvtier_tier_degraded", tier="redis") == 0
    return time.monotonic() - began


# -- away, killed, silent, slow


def test_redis_that_is_away_at_start_is_used_as_soon_as_it_comes(server: ValkeyServer) -> None:
    server.kill()
    with opened(through(server.url)) as tiers:
        assert tiers.store.health()["redis"].startswith("degraded: ")
        assert tiers.metrics.value("kvtier_tier_degraded", tier="redis") == 1
        expect_no_wait(tiers)
        server.start()
        print(f"used {used_again(tiers):.2f} s after it came")


FAILURES: dict[str, tuple[Callable[[ValkeyServer], None], Callable[[ValkeyServer], None]]] = {
    "killed": (ValkeyServer.kill, ValkeyServer.start),
    "silent": (ValkeyServer.pause, ValkeyServer.resume),
}


@pytest.mark.parametrize("failure", list(FAILURES))
def test_redis_that_fails_midway_costs_no_request_more_than_its_deadline(
    server: ValkeyServer, failure: str, caplog: pytest.LogCaptureFixture
) -> None:
    """SIGKILL resets connections; SIGSTOP leaves them open and answers nothing, as dropped packets do."""
    fail, mend = FAILURES[failure]
    with opened(through(server.url)) as tiers:
        fill(tiers)
        comes(tiers, 0)
        tiers.store.empty("dram")
        fail(server)
        if failure == "silent":
            expect_misses(tiers, 1, Reason.DEADLINE)
        else:
            tiers.match(prompt(0, BLOCKS)).release()
        until(lambda: tiers.metrics.value("kvtier_tier_degraded", tier="redis") == 1, PATIENCE, "it is said")
        assert tiers.store.health()["redis"].startswith("degraded: ")
        expect_no_wait(tiers)
        for number in range(100, 120):
            assert all(each.done for each in tiers.save(prompt(number, BLOCKS))), "and saving goes on without it"
        mend(server)
        print(f"used again after {used_again(tiers):.2f} s")
        assert caplog.text.count("redis: degraded, its blocks are misses until it is back") >= 1
        assert "redis: back in use" in caplog.text
        tiers.expect_idle()


def test_redis_that_comes_back_empty_is_filled_again(server: ValkeyServer) -> None:
    with opened(through(server.url)) as tiers:
        fill(tiers, 3)
        server.kill()
        tiers.match(prompt(0, BLOCKS)).release()
        server.start()
        until(lambda: tiers.store.health()["redis"] == "ok", PATIENCE, "the tier is used again")
        assert [tiers.found(prompt(number, BLOCKS)) for number in range(3)] == [0, 0, 0], "it is believed to be empty"
        fill(tiers, 3)
        for number in range(3):
            comes(tiers, number)
        tiers.expect_idle()


class Delayed(threading.Thread):
    """A TCP port in front of a server's Unix socket whose answers take ``seconds`` longer, and wait until they may ``flow``."""

    def __init__(self, behind: Path, seconds: float) -> None:
        super().__init__(daemon=True)
        self.seconds = seconds
        self.flow = threading.Event()
        self.flow.set()
        self.connections = 0
        self._behind = behind
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._socket.getsockname()[1]
        self.start()

    def run(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                front, _ = self._socket.accept()
                self.connections += 1
                back = socket.socket(socket.AF_UNIX)
                back.connect(str(self._behind))
                for source, sink, wait in ((front, back, False), (back, front, True)):
                    threading.Thread(target=self._copy, args=(source, sink, wait), daemon=True).start()

    def _copy(self, source: socket.socket, sink: socket.socket, wait: bool) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 20):
                if wait:
                    time.sleep(self.seconds)
                    self.flow.wait(60.0)
                sink.sendall(data)
        for each in (source, sink):
            each.close()

    def close(self) -> None:
        self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()


def test_redis_that_is_slow_is_waited_for_within_the_deadline(
    server: ValkeyServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fifty milliseconds an answer: hits come a little later. No answer by the deadline: misses, there and then."""
    monkeypatch.setattr("kvtier.tier.lower.SILENT_SECONDS", 60.0)
    proxy = Delayed(server.socket_path, 0.05)
    url = through(f"redis://127.0.0.1:{proxy.port}/0", timeout="60s")
    with opened(url, deadline=PATIENCE) as tiers:
        fill(tiers)
        assert [tiers.load(prompt(number, BLOCKS)) for number in range(12)] == [BLOCKS] * 12
        assert tiers.count("hits", "redis") == 12 * BLOCKS, "slow is not broken"
        assert tiers.store.health()["redis"] == "ok"
    with opened(url) as tiers:
        proxy.flow.clear()
        expect_misses(tiers, 2, Reason.DEADLINE)
        proxy.seconds = 0.0
        proxy.flow.set()
        until(lambda: tiers.store.stats()["arriving"] == 0, PATIENCE, "late answers have landed")
        print(f"fast again: {used_again(tiers):.2f} s")
        tiers.expect_idle()
    proxy.close()


# -- full


@pytest.mark.parametrize("policy", ["noeviction", "allkeys-lru", "volatile-lru"])
def test_redis_that_is_full_stops_neither_loads_nor_requests(
    tmp_path: Path, policy: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Between two drains fewer blocks come than may wait for the tier, so that whatever is dropped is of the server's doing."""
    with (
        valkey(tmp_path, maxmemory=6 << 20, policy=policy) as server,
        Tiers(dram(256), through(server.url, timeout="20s"), deadline=20.0) as tiers,
    ):
        for number in range(500):
            tiers.save(prompt(number, BLOCKS))
            if number % 25 == 24:
                assert tiers.store.drain(20.0)
        tiers.store.empty("dram")
        with redis.Redis(unix_socket_path=str(server.socket_path)) as behind:
            held = [name for name in behind.scan_iter(count=1000) if name.startswith(PREFIX)]
            assert len(held) > 100
            assert all(int(str(behind.pttl(name))) != -1 for name in held), "every key has an end"
            assert int(behind.info("memory")["used_memory"]) < 8 << 20
            evicted = int(behind.info("stats")["evicted_keys"])
        written = tiers.count("written_blocks", "redis")
        refused = tiers.count("saves_dropped", "redis", reason="no_room")
        assert written + refused == 500 * BLOCKS, "every block is accounted for"
        loaded = [tiers.load(prompt(number, BLOCKS)) for number in range(500)]
        assert sum(loaded) > 50
        assert tiers.store.health()["redis"] == "ok", "a full server is a server that reads"
        if policy == "noeviction":
            assert refused > 0 and evicted == 0
            assert loaded[0] == BLOCKS, "what came first is still there"
            assert "out of memory" in caplog.text
            assert caplog.text.count("out of memory") < 20, "and it is not said five hundred times"
        else:
            assert refused == 0 and evicted > 0, "what was there has given way"
        tiers.expect_idle()


# -- locked

SECRET = "p@ss:w/o%rd"


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A certificate authority of our own, and a certificate of it for localhost, in one folder."""
    require_installed(shutil.which("openssl"), "the openssl command")
    folder = tmp_path_factory.mktemp("authority")
    (folder / "names").write_text("subjectAltName=DNS:localhost\n")
    for command in (
        "req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=ours -keyout ca.key -out ca.pem",
        "req -newkey rsa:2048 -nodes -subj /CN=localhost -keyout server.key -out server.csr",
        "x509 -req -in server.csr -CA ca.pem -CAkey ca.key -CAcreateserial -days 2 -out server.pem -extfile names",
    ):
        subprocess.run(["openssl", *command.split()], cwd=folder, check=True, capture_output=True, timeout=60)
    return folder


@pytest.fixture(scope="module")
def secured(authority: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[int, int]]:
    """A real Redis with TLS and a password: its TLS port, and its plain one."""
    binary = shutil.which("redis-server") or shutil.which("valkey-server")
    require_installed(binary, "redis-server with TLS (Debian's package)")
    assert binary is not None
    ports = []
    for _ in range(2):
        with socket.create_server(("127.0.0.1", 0)) as probe:
            ports.append(int(probe.getsockname()[1]))
    files = {"cert-file": "server.pem", "key-file": "server.key", "ca-cert-file": "ca.pem"}
    words = [word for name, file in files.items() for word in (f"--tls-{name}", str(authority / file))]
    words += ["--tls-port", str(ports[0]), "--port", str(ports[1]), "--bind", "127.0.0.1", "--tls-auth-clients", "no"]
    words += ["--save", "", "--requirepass", SECRET]
    process = subprocess.Popen(
        [binary, *words],
        cwd=tmp_path_factory.mktemp("secured"),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )

    def listens() -> bool:
        require_installed(process.poll() is None, "a redis-server that was built with TLS")
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", ports[0])) == 0

    try:
        until(listens, PATIENCE, "the server listens")
        yield ports[0], ports[1]
    finally:
        process.kill()
        process.wait(10.0)


def test_tls_with_an_own_authority_and_a_password_of_reserved_characters(
    secured: tuple[int, int], authority: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    url = f"rediss://:{quote(SECRET, safe='')}@localhost:{secured[0]}/0"
    with opened(through(url, ca=str(authority / "ca.pem"))) as tiers:
        fill(tiers, 2)
        for number in range(2):
            comes(tiers, number)
        assert tiers.store.health()["redis"] == "ok"
        shown = f"{tiers.store.health()} {tiers.metrics.render().decode()} {caplog.text}"
    with opened(through(f"redis://default:{quote(SECRET, safe='')}@127.0.0.1:{secured[1]}/0")) as tiers:
        for number in range(2):
            comes(tiers, number)  # from the same server
    for secret in (SECRET, quote(SECRET, safe="")):
        assert secret not in shown


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("rediss://:wr%40ng@localhost:{tls}/0?ca={ca}", "refuses the user name or password"),
        ("rediss://localhost:{tls}/0?ca={ca}", "refuses the user name or password"),
        ("rediss://:{secret}@localhost:{tls}/0", "a private CA needs \\?ca="),
        ("redis://:{secret}@localhost:{tls}/0", "a TLS port needs rediss://"),
        ("rediss://:{secret}@127.0.0.1:{tls}/0?ca={ca}", "TLS failed"),
    ],
    ids=["wrong password", "no password", "unknown authority", "plain to TLS", "another host's"],
)
def test_what_a_server_refuses_stops_the_start_with_one_clear_line(
    secured: tuple[int, int], authority: Path, url: str, says: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    secret = quote(SECRET, safe="")
    whole = through(url.format(tls=secured[0], secret=secret, ca=authority / "ca.pem"))
    with pytest.raises(MediumRefused, match=says) as refused:
        opened(whole)
    said = f"{refused.value} {caplog.text}"
    assert "\n" not in str(refused.value)
    for hidden in (SECRET, secret, "wr@ng", "wr%40ng"):
        assert hidden not in said


# -- speed


def test_large_values_move_as_fast_as_a_plain_client_moves_them(server: ValkeyServer) -> None:
    """64 values of 2 MiB: at least three quarters of what redis-py's GET and SET reach beside them."""
    size, each, rounds = 2 << 20, 64, 6
    location = TierUrl.parse(server.url)
    medium = RedisMedium.open(location, build_params(RedisMedium.Params, {}, "test"), MediumContext(size))
    wanted = names(each)
    data = np.random.default_rng(1).integers(0, 256, (each, size), np.uint8)
    into = np.zeros((each, size), np.uint8)
    plain = ours = math.inf
    with redis.Redis(unix_socket_path=str(server.socket_path)) as client:
        for _ in range(rounds):
            began = time.monotonic()
            for name, row in zip(wanted, data, strict=True):
                client.set(b"plain" + name, row.data)
            for name in wanted:
                client.get(b"plain" + name)
            plain = min(plain, time.monotonic() - began)
            client.flushall()
            began = time.monotonic()
            written = medium.write(wanted, [[row.data] for row in data])
            read = medium.read(wanted, [[row.data] for row in into])
            ours = min(ours, time.monotonic() - began)
            assert {outcome.status for outcome in written + read} == {Status.DONE}
            assert np.array_equal(into, data)
            client.flushall()
            print(f"best so far: redis-py {plain:.3f} s, ours {ours:.3f} s")
            if ours < plain / 0.75:
                break
        else:
            pytest.fail("a plain client is faster")
    medium.close()


def test_a_look_up_of_512_keys_is_one_command(server: ValkeyServer) -> None:
    with opened(through(server.url)) as tiers, redis.Redis(unix_socket_path=str(server.socket_path)) as behind:
        span = prompt(1, 512)
        tiers.found(span)
        before = int(behind.info("stats")["total_commands_processed"])
        assert tiers.found(span) == 0
        seen = int(behind.info("stats")["total_commands_processed"]) - before
        assert seen <= 5, f"{seen} commands for one look-up (two of them ask for statistics)"
