"""Tiers that fail while requests are served: every request ends with the right tokens, and metric and log say why.

A tiny checkpoint whose two best logits are never close, so that a wrong byte shows and rounding does not.
"""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvtier.testing.requirements import require_machine
from kvtier.testing.valkey import ValkeyServer
from tests.support import until

from .support import TINY_BLOCK_BYTES, TINY_TOKENS, House, Server, Tiny, make_tiny, valkey

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_thread")]

PAGE = 4096
STRIDE = TINY_BLOCK_BYTES + PAGE
BACK_SECONDS = 30.0
"""Within this a tier that is well again is used again, however loaded the machine is."""


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    made = make_tiny(tmp_path_factory.mktemp("tiny") / "model", seed=20240607)
    assert made.gap > 1e-2
    return made


@pytest.fixture
def redis(tmp_path: Path) -> Iterator[ValkeyServer]:
    with valkey(tmp_path / "valkey") as server:
        yield server


def dram(blocks: int) -> str:
    return f"dram://?capacity={blocks * TINY_BLOCK_BYTES}"


def nvme(path: Path, capacity: str = "16MiB") -> str:
    return f"nvme://{path}?capacity={capacity}&write=through"


def through(server: ValkeyServer) -> str:
    return f"{server.url}?write=through&timeout=500ms"


def expect_right(house: House, tiny: Tiny, at: dict[int, Callable[[], object]] | None = None) -> float:
    """Serve every prompt with HBM forgotten before; how many seconds it took."""
    house.engine.reset_prefix_cache()
    began = time.monotonic()
    served = house.serve(tiny.prompts, TINY_TOKENS, at=at)
    for number, (each, expected) in enumerate(zip(served, tiny.expected, strict=True)):
        assert each.tokens == expected, f"prompt {number}"
    assert not at or house.steps > max(at), "what was to happen has happened"
    return time.monotonic() - began


def used_again(house: House, tiny: Tiny, tier: str) -> float:
    """Seconds until ``tier`` has taken blocks and given them back."""
    began = time.monotonic()
    before = house.count("hits", tier)
    until(lambda: house.store.health()[tier] == "ok", BACK_SECONDS, f"{tier} is back in use")
    while house.count("hits", tier) == before:
        assert time.monotonic() < began + BACK_SECONDS, f"{tier} is back and gives nothing"
        expect_right(house, tiny)
        house.settle()
        house.store.empty("dram")
    return time.monotonic() - began


# -- Redis


def test_redis_is_killed_under_load_and_comes_back_empty(
    tiny: Tiny, redis: ValkeyServer, caplog: pytest.LogCaptureFixture
) -> None:
    with House((dram(96), through(redis)), tiny.engine()) as house:
        expect_right(house, tiny)
        house.settle()
        house.store.empty("dram")
        expect_right(house, tiny, {12: redis.kill})
        assert house.count("hits", "redis") > 0, "it gave blocks before"
        until(lambda: house.store.health()["redis"] != "ok", BACK_SECONDS, "the tier is degraded")
        assert "redis: degraded, its blocks are misses until it is back" in caplog.text
        assert house.metrics.value("kvtier_tier_degraded", tier="redis") == 1
        read = house.count("read_bytes", "redis")
        expect_right(house, tiny)
        assert house.count("read_bytes", "redis") == read
        redis.start()
        seconds = used_again(house, tiny, "redis")
        print(f"used again {seconds:.1f} s after it came back")
        assert "redis: back in use" in caplog.text
        house.expect_idle()


def test_redis_stops_answering_under_load(tiny: Tiny, redis: ValkeyServer) -> None:
    """SIGSTOP takes connections and answers nothing: one timeout, not one per request."""
    with House((dram(96), through(redis)), tiny.engine()) as house:
        usual = expect_right(house, tiny)
        house.settle()
        house.store.empty("dram")
        stopped = expect_right(house, tiny, {12: redis.pause})
        print(f"{len(tiny.prompts)} requests took {usual:.2f} s, and {stopped:.2f} s while Redis stood still")
        assert stopped < usual * 3 + 10.0
        asked = house.count("failures", "redis", verb="probe")
        assert asked <= 8 < len(tiny.prompts) / 2, "but for what was under way nobody asks it any more"
        assert house.store.health()["redis"].startswith("degraded: ")
        redis.resume()
        print(f"used again after {used_again(house, tiny, 'redis'):.1f} s")
        house.expect_idle()


def test_serve_starts_without_redis_and_uses_it_once_it_is_there(tiny: Tiny, redis: ValkeyServer) -> None:
    redis.kill()
    with Server(*tiny.flags(), f"--tier={dram(96)}", f"--tier={through(redis)}") as server:
        said = [line for line in server.lines if "degraded" in line]
        assert len(said) == 1 and "redis" in said[0], server.log
        health = server.health()
        assert str(health["status"]).startswith("degraded: ")
        tiers = health["tiers"]
        assert isinstance(tiers, dict) and tiers["dram"] == tiers["hbm"] == "ok"
        assert re.fullmatch(r"degraded: redis\+unix://\S+: .*(No such file|refused).*", tiers["redis"]), "it says why"
        assert health["status"] == tiers["redis"], "and so does the whole"
        assert server.metric("kvtier_tier_degraded", tier="redis") == 1
        assert server.complete(tiny.prompts[0], TINY_TOKENS)[0] == tiny.texts[0]
        redis.start()
        began = time.monotonic()
        until(lambda: server.health()["status"] == "ok", BACK_SECONDS, "the tier is used")
        assert server.complete(tiny.prompts[1], TINY_TOKENS)[0] == tiny.texts[1]
        until(lambda: server.metric("kvtier_tier_written_bytes_total", tier="redis"), BACK_SECONDS, "it takes blocks")
        print(f"used {time.monotonic() - began:.1f} s after it appeared")
        assert server.terminate() == 0, server.log
        assert "integrity: every block is accounted for" in server.log


# -- NVMe


def slot_file(directory: Path) -> Path:
    (file,) = (path for path in directory.iterdir() if path.name.startswith("slots"))
    return file


def flip(file: Path) -> None:
    """A byte in the payload of every slot: the exponent of a key, which changes what nearly every prompt gives."""
    with file.open("r+b") as opened:
        for start in range(0, file.stat().st_size - STRIDE + 1, STRIDE):
            opened.seek(start + PAGE + 1001)
            byte = opened.read(1)
            opened.seek(start + PAGE + 1001)
            opened.write(bytes([byte[0] ^ 0x40]))
        opened.flush()
        os.fsync(opened.fileno())


def truncate(file: Path) -> None:
    os.truncate(file, 0)


@pytest.mark.parametrize("damage", [flip, truncate, Path.unlink])
def test_the_file_of_nvme_is_damaged_under_load(
    tiny: Tiny, tmp_path: Path, damage: Callable[[Path], None], caplog: pytest.LogCaptureFixture
) -> None:
    """Blocks that do not prove are computed again; a file that is only unlinked still serves who has it open."""
    with House((dram(96), nvme(tmp_path / "nvme")), tiny.engine()) as house:
        expect_right(house, tiny)
        house.settle()
        house.store.empty("dram")
        before = house.count("hits", "nvme")
        expect_right(house, tiny, {12: lambda: damage(slot_file(tmp_path / "nvme"))})
        house.settle()
        assert house.count("hits", "nvme") > before
        house.store.empty("dram")
        expect_right(house, tiny)
        house.expect_idle()
        wrong = house.count("sum_failures", "nvme") + house.count("failures", "nvme", verb="read")
        if damage is Path.unlink:
            assert wrong == 0
        else:
            assert wrong > 0
            assert "did not prove" in caplog.text or "could not be read" in caplog.text
        print(f"{damage.__name__}: {wrong} blocks did not prove or read")
    with House((dram(96), nvme(tmp_path / "nvme")), tiny.engine()) as house:
        expect_right(house, tiny)
        house.expect_idle()


@pytest.fixture
def tiny_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 16 MiB of its own."""
    place = tmp_path / "disk"
    place.mkdir()
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=16m", "tmpfs", str(place)], capture_output=True, text=True, check=False
    )
    require_machine(done.returncode == 0, f"mount rights for a tmpfs ({done.stderr.strip()})")
    yield place
    subprocess.run(["umount", str(place)], check=True, timeout=60)


def test_others_fill_the_disk_under_load(tiny: Tiny, tiny_disk: Path, caplog: pytest.LogCaptureFixture) -> None:
    tiers = (dram(96), nvme(tiny_disk / "nvme", "14MiB"))

    def fill() -> None:
        with contextlib.suppress(OSError), (tiny_disk / "others").open("wb", buffering=0) as file:
            while file.write(bytes(PAGE)):
                pass

    with House(tiers, tiny.engine()) as house:
        expect_right(house, tiny, {8: fill})
        house.settle()
        expect_right(house, tiny)
        assert house.count("saves_dropped", "nvme", reason="no_room") > 0
        assert " could not be written: " in caplog.text and "full" in caplog.text
        (tiny_disk / "others").unlink()
        written = house.count("written_blocks", "nvme")
        until(lambda: house.store.health()["nvme"] == "ok", BACK_SECONDS, "the tier is used again")
        house.store.empty("dram")
        expect_right(house, tiny)
        house.expect_idle()
        assert house.count("written_blocks", "nvme") > written


# -- too little room, and the end of the process


def test_dram_of_four_blocks_under_64_prompts(tiny: Tiny, redis: ValkeyServer, tmp_path: Path) -> None:
    assert len(tiny.prompts) == 64
    with House((dram(4), nvme(tmp_path / "nvme"), through(redis)), tiny.engine()) as house:
        assert house.store.stats()["blocks"]["dram"]["free"] == 4  # type: ignore[index]
        for _ in range(3):
            expect_right(house, tiny)
        house.expect_idle()
        print({tier: house.count("hits", tier) for tier in ("dram", "nvme", "redis")})
        assert house.count("saves_dropped", "dram", reason="no_room") > 0, "and it says so"
        assert house.count("hits", "nvme") + house.count("hits", "dram") > 0


def test_what_was_committed_to_nvme_is_there_after_kill_9(tiny: Tiny, tmp_path: Path) -> None:
    flags = [*tiny.flags(), f"--tier={dram(96)}", f"--tier={nvme(tmp_path / 'nvme')}"]
    prompts, texts = tiny.prompts[:8], tiny.texts[:8]
    with Server(*flags) as server:
        for prompt, text in zip(prompts, texts, strict=True):
            assert server.complete(prompt, TINY_TOKENS)[0] == text
        least = sum(len(prompt) // 16 for prompt in prompts[1:2])
        until(
            lambda: server.metric("kvtier_tier_written_blocks_total", tier="nvme") >= least, 60.0, "blocks are written"
        )
        written = server.metric("kvtier_tier_written_blocks_total", tier="nvme")
        server.kill()
    with Server(*flags) as server:
        assert server.metric("kvtier_tier_blocks", tier="nvme", state="ready") >= written
        cached = 0
        for prompt, text in zip(prompts, texts, strict=True):
            got, tokens = server.complete(prompt, TINY_TOKENS)
            assert got == text
            cached += tokens
        hits = server.metric("kvtier_tier_hits_total", tier="nvme")
        print(f"{written:.0f} blocks were committed; {hits:.0f} hits, {cached} tokens after kill -9")
        assert hits >= min(written, least) > 0
        assert server.terminate() == 0, server.log
        assert "integrity: every block is accounted for" in server.log
