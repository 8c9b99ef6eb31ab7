"""``kvtier clear`` as a person runs it: against a server that goes on serving, between servers, and on tiers at rest."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import redis as redis_client

from kvtier.abc.store import Cleared, ClearedTier, Reason, Selection
from kvtier.cli import main as cli
from kvtier.engine.async_engine import AsyncEngine
from kvtier.engine.server import Served, make_app
from kvtier.key import Scope
from kvtier.testing.valkey import ValkeyServer
from tests.engine.support import make_engine
from tests.support import until

from .support import TINY_BLOCK_BYTES, TINY_TOKENS, House, Server, Tiny, kvtier, make_tiny, valkey

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_thread")]

SEEN_SECONDS = 30.0
"""Within this another process has heard of a clear: it asks once a second."""


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    return make_tiny(tmp_path_factory.mktemp("tiny") / "model", seed=20240607, count=8)


@pytest.fixture
def redis(tmp_path: Path) -> Iterator[ValkeyServer]:
    with valkey(tmp_path / "valkey") as server:
        yield server


def behind(server: ValkeyServer) -> redis_client.Redis:
    return redis_client.Redis(unix_socket_path=str(server.socket_path))


def dram() -> str:
    return f"--tier=dram://?capacity={96 * TINY_BLOCK_BYTES}"


def nvme(path: Path) -> str:
    return f"nvme://{path}?capacity=16MiB&write=through"


def clear(*argv: str, code: int = 0, **variables: str) -> str:
    ended = kvtier("clear", *argv, variables=variables)
    assert ended.returncode == code, ended.stderr + ended.stdout
    return ended.stdout if code != 2 else ended.stderr


def test_a_server_forgets_in_every_tier_and_stays_so_after_a_restart(tiny: Tiny, tmp_path: Path) -> None:
    flags = [*tiny.flags(), dram(), f"--tier={nvme(tmp_path / 'nvme')}"]
    prompt, text = tiny.prompts[0], tiny.texts[0]
    with Server(*flags) as server:
        assert server.complete(prompt, TINY_TOKENS) == (text, 0)
        assert server.complete(prompt, TINY_TOKENS)[1] > 0
        locked = clear(f"--tier={nvme(tmp_path / 'nvme')}", code=2)
        assert "--base-url" in locked and str(server.process.pid) in locked
        assert server.complete(prompt, TINY_TOKENS)[1] > 0
        until(
            lambda: server.metric("kvtier_tier_written_blocks_total", tier="nvme") > 0, SEEN_SECONDS, "written to NVMe"
        )
        said = clear("--base-url", server.url)
        print(said)
        assert "cleared everything: epoch 1" in said
        assert f"tenant {'0' * 32}, adapter none" in said
        assert re.search(r"nvme: [1-9]\d* blocks, .* to be reclaimed", said)
        assert server.complete(prompt, TINY_TOKENS) == (text, 0), "HBM gives nothing of it either"
        assert server.complete(prompt, TINY_TOKENS)[1] > 0
        until(
            lambda: server.metric("kvtier_tier_evictions_total", tier="nvme", reason="cleared") > 0,
            SEEN_SECONDS,
            "reclaimed",
        )
        clear("--base-url", server.url, "--tenant", "00" * 16)
        assert server.terminate() == 0, server.log
    with Server(*flags) as server:
        assert server.complete(prompt, TINY_TOKENS) == (text, 0)
        assert server.complete(tiny.prompts[1], TINY_TOKENS)[1] == 0
        assert "tier 'redis' does not exist here; there are dram, nvme" in clear(
            "--base-url", server.url, "--tier", "redis", code=2
        )
        assert "cleared tier dram\ndram: " in clear("--base-url", server.url, "--tier", "dram")
        assert server.terminate() == 0, server.log
        assert "integrity: every block is accounted for" in server.log


def test_tiers_at_rest_are_cleared_without_a_server(tiny: Tiny, tmp_path: Path, redis: ValkeyServer) -> None:
    tiers = [f"--tier={nvme(tmp_path / 'nvme')}", f"--tier={redis.url}?write=through"]
    flags = [*tiny.flags(), dram(), *tiers]
    prompt = tiny.prompts[0]
    with Server(*flags) as server:
        server.complete(prompt, TINY_TOKENS)
        assert server.terminate() == 0, server.log
    with Server(*flags) as server:
        assert server.complete(prompt, TINY_TOKENS)[1] > 0, "it was kept"
        assert server.terminate() == 0, server.log
    assert json.loads(clear(*tiers, "--model", "another", "--json"))["tiers"]["nvme"]["blocks"] == 0
    secret = tmp_path / "secret"
    secret.write_bytes(b"hunter2\n")
    answers = [
        json.loads(clear(*tiers, "--json", "--tenant", f"@{secret}")),
        json.loads(clear(*tiers, "--json", "--tenant", "env:ACME_SECRET", ACME_SECRET="hunter2")),
        json.loads(clear(*tiers, "--json", "--tenant", Scope(tenant=b"hunter2").tenant_id.hex())),
    ]
    assert [answer["epoch"] for answer in answers] == [2, 3, 4]
    assert "hunter2" not in repr(answers)
    assert "as @FILE or env:VARIABLE" in clear(*tiers, "--tenant", "hunter2", code=2)
    with Server(*flags) as server:
        assert server.complete(prompt, TINY_TOKENS)[1] > 0, "none of that was ours"
        assert server.terminate() == 0, server.log
    said = clear(*tiers, "--model", "model")
    print(said)
    assert "cleared model model: epoch 5" in said
    assert re.search(r"nvme: [1-9]\d* blocks, .* reclaimed", said)
    assert "redis: reclaimed" in said
    with Server(*flags) as server:
        assert server.complete(prompt, TINY_TOKENS)[1] == 0
        assert server.terminate() == 0, server.log
    assert "cleared tier nvme" in clear(*tiers, "--tier", "nvme")
    assert json.loads(clear(*tiers, "--json"))["tiers"]["nvme"]["blocks"] == 0
    redis.kill()
    assert "redis: NOT TOLD" in clear(*tiers, code=1)
    assert "cannot be combined" in clear(*tiers, "--tier", "nvme", "--model", "m", code=2)
    assert "name that with --base-url" in clear(*tiers, "--tier", "dram", code=2)


def test_a_slip_in_the_path_is_no_clear(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Whoever thinks that a tenant's blocks are gone must not have cleared a place where no tier has been."""
    (tmp_path / "empty").mkdir()
    for place, scheme, code, says in (
        ("nowhere", "nvme", 2, "no tier has been there; check the path"),
        ("empty", "nvme", 2, "no tier has been there; check the path"),
        ("nowhere", "fs", 1, "NOT TOLD: .*no folder of kvtier's is there; is it mounted"),
    ):
        assert cli.main(["clear", "--tier", f"{scheme}://{tmp_path / place}?capacity=16MiB"]) == code
        out, err = capsys.readouterr()
        assert re.search(says, out + err)
        assert not (tmp_path / "nowhere").exists()
        assert not list((tmp_path / "empty").iterdir())


def test_servers_that_share_a_redis_hear_of_it_and_an_emptied_redis_is_told_again(
    tiny: Tiny, redis: ValkeyServer
) -> None:
    flags = [*tiny.flags(), dram(), f"--tier={redis.url}?write=through"]
    prompt = tiny.prompts[0]
    with Server(*flags) as one, Server(*flags) as two:
        one.complete(prompt, TINY_TOKENS)
        until(lambda: one.metric("kvtier_tier_written_bytes_total", tier="redis"), SEEN_SECONDS, "it is saved")
        assert two.complete(prompt, TINY_TOKENS)[1] > 0
        clear("--base-url", one.url)
        until(
            lambda: two.complete(prompt, TINY_TOKENS)[1] == 0,
            SEEN_SECONDS,
            "the other has heard, and its HBM gives nothing",
        )
        with behind(redis) as client:
            client.flushall()
            until(lambda: client.hlen("kvt:clear") > 1, SEEN_SECONDS, "what was lost is written back")
        assert clear("--base-url", two.url).startswith("cleared everything: epoch 2")
        until(lambda: one.complete(prompt, TINY_TOKENS)[1] == 0, SEEN_SECONDS, "and back")
        assert one.terminate() == two.terminate() == 0, one.log + two.log


def test_the_engine_is_told_why_it_computes_again(tiny: Tiny, tmp_path: Path) -> None:
    tiers = [f"dram://?capacity={96 * TINY_BLOCK_BYTES}", nvme(tmp_path / "nvme")]
    with House(tiers, tiny.engine()) as house:
        house.serve(tiny.prompts[:1], TINY_TOKENS)
        house.settle()
        house.store.clear(Selection())
        (again,) = house.serve(tiny.prompts[:1], TINY_TOKENS)
        assert (again.tokens, again.stats.cached_tokens) == (tiny.expected[0], 0)
        assert house.store.explain("request 2")[0].reason is Reason.CLEARED
        (other,) = house.serve(tiny.prompts[1:2], TINY_TOKENS)
        assert other.tokens == tiny.expected[1]
        assert house.store.explain("request 3")[0].reason is Reason.NEVER_STORED
        house.expect_idle()


def test_a_request_that_runs_when_its_scope_is_cleared_ends_as_it_would_have(tiny: Tiny, tmp_path: Path) -> None:
    tiers = [f"dram://?capacity={96 * TINY_BLOCK_BYTES}", nvme(tmp_path / "nvme")]
    with House(tiers, tiny.engine()) as house:
        for step in range(5):
            served = house.serve(tiny.prompts, TINY_TOKENS, at={step: lambda: house.store.clear(Selection())})
            assert [each.tokens for each in served] == tiny.expected
        house.expect_idle()


# -- the route


@pytest.fixture
def app() -> tuple[object, list[tuple[Selection, str | None]]]:
    asked: list[tuple[Selection, str | None]] = []

    def clear(what: Selection, tier: str | None) -> Cleared:
        asked.append((what, tier))
        return Cleared(7, (), {"dram": ClearedTier(1, 10)})

    return make_app(AsyncEngine(make_engine(16)), Served("tiny", exact=True, clear=clear)), asked


def post(app: object, body: str, client: str = "127.0.0.1", **more: str) -> httpx.Response:
    async def send() -> httpx.Response:
        transport = httpx.ASGITransport(app, client=(client, 1234))  # type: ignore[arg-type]  # an ASGI application
        headers = {"content-type": "application/json", "host": "127.0.0.1:8000", **more}
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1:8000") as door:
            return await door.post("/admin/clear", content=body, headers=headers)

    return asyncio.run(send())


def test_only_this_machine_may_clear(app: tuple[object, list[tuple[Selection, str | None]]]) -> None:
    door, asked = app
    for client in ("10.0.0.1", "::ffff:10.0.0.1", "2001:db8::1", "not an address"):
        assert post(door, "{}", client).status_code == 404
    for header in ("x-forwarded-for", "x-forwarded-host", "x-forwarded-proto", "x-real-ip", "forwarded", "via"):
        assert post(door, "{}", **{header: "127.0.0.1"}).status_code == 404, header
    for host in ("[::1", "127.0.0.1@evil.example", "127.0.0.1.evil.example", ""):
        assert post(door, "{}", host=host).status_code == 404, host
    assert post(door, "{}", host="evil.example").status_code == 404, "a web page that made its name ours"
    assert post(door, "{}", **{"content-type": "text/plain"}).status_code == 415, "what a web page may send unasked"
    assert asked == []
    for client, host in (("127.0.0.1", "localhost:8000"), ("::1", "[::1]:8000"), ("127.9.9.9", "127.0.0.1")):
        assert post(door, "{}", client, host=host).status_code == 200
    assert asked == [(Selection(), None)] * 3


def test_a_selection_reads_as_words() -> None:
    assert str(Selection()) == "everything"
    assert str(Selection("m", b"\xab" * 16, "a")) == f"model m, tenant {'ab' * 16}, adapter a"


def test_what_a_clear_asks_for_is_checked(app: tuple[object, list[tuple[Selection, str | None]]]) -> None:
    door, asked = app
    for body in (
        "[]",
        "nothing",
        '{"tenants": "x"}',
        '{"tenant": "00"}',
        '{"tenant": "not hexadecimal"}',
        '{"model": 7}',
        '{"tier": "nvme", "model": "m"}',
        json.dumps({"adapter": "a" * 600}),
    ):
        refused = post(door, body)
        assert refused.status_code == 400, body
        assert refused.json()["error"]["message"]
    assert asked == []
    answer = post(door, json.dumps({"model": "m", "tenant": "ab" * 16, "adapter": "a"}))
    assert answer.json() == {
        "epoch": 7,
        "scopes": [],
        "tiers": {"dram": {"blocks": 1, "nbytes": 10, "trouble": None}},
    }
    assert post(door, '{"tier": "nvme"}').status_code == 200
    assert asked == [(Selection("m", b"\xab" * 16, "a"), None), (Selection(), "nvme")]
