"""A folder on a shared file system: whole files or none, one bound for all who write, and what others do to it meanwhile."""

from __future__ import annotations

import os
import random
import signal
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvtier.abc.medium import MediumContext, Outcome, Status
from kvtier.cli.main import main
from kvtier.config import StoreSettings
from kvtier.errors import ConfigError, MediumError, MediumFull, MediumUnavailable
from kvtier.key import Address, Span, address
from kvtier.metrics import Metrics
from kvtier.quantity import Bytes, Seconds
from kvtier.registry import plan_tier
from kvtier.storage_backends.fs import FsMedium
from kvtier.store.open import open_store
from kvtier.store.store import TieredStore
from kvtier.testing.blocks import IDENTITY, LAYOUT, SHARD, EngineMemory, chain, filled
from kvtier.testing.media import KeyMediumSuite, names, payload, room
from kvtier.testing.requirements import require_machine
from kvtier.testing.stores import StoreSuite
from kvtier.url import TierUrl


def opened(root: Path, **params: object) -> FsMedium:
    return FsMedium(str(root), FsMedium.Params(**{"capacity": 1 << 40, **params}))  # type: ignore[arg-type]


def place(root: Path, name: Address, generation: int = 0) -> Path:
    text = name.hex()
    return root / text[:2] / text[2] / f"{text}.{generation}"


def spread(count: int, seed: int) -> list[Address]:
    """Names as they are in use: digests."""
    source = random.Random(seed)
    return [Address(source.randbytes(40)) for _ in range(count)]


def taken(root: Path) -> int:
    """Bytes below a folder as ``du`` counts them."""
    total = root.lstat().st_blocks
    for folder, folders, files in os.walk(root):
        for name in [*folders, *files]:
            try:
                total += os.lstat(f"{folder}/{name}").st_blocks
            except FileNotFoundError:
                continue
    return total * 512


class TestSuite(KeyMediumSuite[FsMedium]):
    @pytest.fixture
    def medium(self, tmp_path: Path) -> Iterator[FsMedium]:
        self.root = tmp_path / "shared"
        made = opened(self.root)
        yield made
        made.close()

    def peek(self, medium: FsMedium, name: Address) -> bytes | None:
        path = place(self.root, name)
        return path.read_bytes() if path.exists() else None

    def poke(self, medium: FsMedium, name: Address, value: bytes) -> None:
        medium.ping()
        path = place(self.root, name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(value)


class TestStore(StoreSuite[TieredStore]):
    @pytest.fixture
    def store(self, tmp_path: Path) -> Iterator[TieredStore]:
        self.root = tmp_path / "shared"
        made = reopened(tmp_path)
        yield made
        made.close()

    def lose(self, store: TieredStore, keys: Span) -> bool:
        assert self.drained(store)
        spoil(list(self.root.glob("??/?/*.0")), "flipped")
        for key in keys.keys:
            slot = store._arena.pool.slot(address(key, SHARD))
            if slot is not None:
                view = store._arena.medium.view(slot)
                assert view is not None
                view[99] ^= 4
        return True

    def test_blocks_outlive_the_store(self, store: TieredStore, tmp_path: Path) -> None:
        keys = chain(1, 6)
        self.saved(store, keys)
        assert self.drained(store)
        store.close()
        self.closed = True
        again = reopened(tmp_path)
        match = self.matched(again, keys)
        assert [block.tier for block in match.blocks] == ["fs"] * 6
        assert all(outcome.done for outcome in self.loaded(again, match))
        again.close()

    @pytest.mark.parametrize("harm", ["gone", "cut", "emptied", "flipped", "link", "pipe", "folder"])
    def test_what_befalls_a_file_is_a_miss(self, store: TieredStore, tmp_path: Path, harm: str) -> None:
        """Never an error, nor wrong bytes; and what is saved afterwards is there."""
        keys = chain(1, 3)
        self.saved(store, keys)
        assert self.drained(store)
        store.close()
        self.closed = True
        again = reopened(tmp_path)
        spoil([path for path in (tmp_path / "shared").rglob("*.0") if path.is_file()], harm)
        match = self.matched(again, keys)
        assert self.comes(again, keys) == 0
        match.release()
        assert again.health() == {"dram": "ok", "fs": "ok"}
        self.saved(again, keys)
        assert self.comes(again, keys) == 3
        again.close()


def reopened(root: Path) -> TieredStore:
    urls = [
        f"dram://?capacity={24 * LAYOUT.block_bytes}&verify=always",
        f"fs://{root}/shared?capacity=1GiB&write=through&sync=false",
    ]
    return open_store([TierUrl.parse(url) for url in urls], IDENTITY, StoreSettings(), Metrics())


def spoil(paths: list[Path], harm: str) -> None:
    assert paths
    for path in paths:
        content = path.read_bytes()
        if harm in ("cut", "emptied"):
            os.truncate(path, len(content) // 2 if harm == "cut" else 0)
        elif harm == "flipped":
            path.write_bytes(content[:-100] + bytes([content[-100] ^ 4]) + content[-99:])
        else:
            path.unlink()
        if harm == "link":
            elsewhere = path.parent.parent.parent / f"elsewhere-{path.name}"
            elsewhere.write_bytes(content)
            path.symlink_to(elsewhere)
        elif harm == "pipe":
            os.mkfifo(path)
        elif harm == "folder":
            path.mkdir()


def test_the_url_is_understood_or_refused() -> None:
    plan = plan_tier(TierUrl.parse("fs:///mnt/shared/kvtier?capacity=2TiB&ttl=24h&sync=false"))
    assert plan.params == FsMedium.Params(capacity=Bytes(2 << 40), ttl=Seconds(86400.0), sync=False)
    for url, complaint in {
        "fs:///mnt?capacity=1GiB&tll=2h": "'tll'; did you mean 'ttl'",
        "fs:///mnt?capacity=1GiB&ttl=0s": "ttl and timeout must be more than 0",
        "fs:///mnt": "capacity is missing",
        "fs:///mnt?capacity=4KiB": "capacity must be at least 1MiB",
    }.items():
        with pytest.raises(ConfigError, match=complaint):
            plan_tier(TierUrl.parse(url))
    for url in ("fs://mnt/shared", "fs:///", "fs://"):
        with pytest.raises(ConfigError, match="three slashes"):
            FsMedium.open(TierUrl.parse(url), FsMedium.Params(capacity=Bytes(1 << 40)), MediumContext(1))


def test_names_and_rights(tmp_path: Path) -> None:
    medium = opened(tmp_path / "shared")
    (name,) = names(1, seed=7)
    medium.write([name], [[payload(1, 10)]])
    medium.remember("identity", bytes(32), "a model")
    medium.raise_epochs({"everything": 1}, {})
    assert place(tmp_path / "shared", name).read_bytes() == payload(1, 10)
    for path in [tmp_path / "shared", *(tmp_path / "shared").rglob("*")]:
        assert stat.S_IMODE(path.stat().st_mode) == (0o700 if path.is_dir() else 0o600), path
    medium.close()


WRITER = """
import os, random, signal, sys
from kvtier.key import Address
from kvtier.storage_backends import fs
root, point, seed, rounds = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
medium = fs.FsMedium(root, fs.FsMedium.Params(capacity=1 << 40, sync=point == "synced"))
die = lambda *given, **more: os.kill(os.getpid(), signal.SIGKILL)
pour, source = fs.pour, random.Random(seed)
if point == "created": fs.pour = die
if point == "half": fs.pour = lambda descriptor, data: (pour(descriptor, [data[0][:70_000]]), die())
if point == "poured": fs.os.close = die
if point == "synced": fs.os.fsync = die
print("ready", flush=True)
for turn in range(rounds):
    name = source.randbytes(40)
    value = random.Random(name).randbytes(200_000)
    medium.write([Address(name)], [[memoryview(value)]])
"""


def writer(root: Path, point: str, seed: int = 1, rounds: int = 100_000) -> subprocess.Popen[bytes]:
    """Another process that writes values which follow from their names; ready to do so."""
    started = subprocess.Popen(
        [sys.executable, "-c", WRITER, str(root), point, str(seed), str(rounds)], stdout=subprocess.PIPE
    )
    assert started.stdout is not None
    assert started.stdout.readline() == b"ready\n"
    return started


def whole(medium: FsMedium) -> int:
    """How many values there are, each read and compared."""
    count = 0
    for name in medium.scan():
        value = room(200_000)
        (outcome,) = medium.read([name], [[value]])
        assert outcome == Outcome(Status.DONE, 200_000)
        assert value == random.Random(bytes(name)).randbytes(200_000)
        count += 1
    return count


@pytest.mark.parametrize("point", ["created", "half", "poured", "synced"])
def test_a_writer_killed_in_the_middle_of_a_file_leaves_nothing_to_see(tmp_path: Path, point: str) -> None:
    medium = opened(tmp_path, capacity=Bytes(8 << 20))
    medium.ping()
    started = writer(tmp_path, point)
    assert started.wait(60) == -signal.SIGKILL
    started.stdout.close()  # type: ignore[union-attr]
    (left,) = tmp_path.rglob("*.tmp")
    assert list(medium.scan()) == []
    medium._space.tend(0, 0.0)
    assert left.exists(), "its writer could be alive"
    medium.close()
    os.utime(left, (1, 1))
    later = opened(tmp_path, capacity=Bytes(8 << 20))
    later._space.tend(0, 0.0)
    assert not left.exists()
    later.close()


def test_writers_killed_at_any_time_leave_whole_files(tmp_path: Path) -> None:
    medium = opened(tmp_path)
    medium.ping()
    source = random.Random(20)
    for turn in range(4):
        started = writer(tmp_path, "any", seed=turn)
        before = whole(medium)
        until = time.monotonic() + 30
        wanted = before + source.randrange(3, 40)
        while sum(1 for _ in medium.scan()) < wanted:
            assert time.monotonic() < until
        started.kill()
        started.wait(60)
        started.stdout.close()  # type: ignore[union-attr]
        assert whole(medium) >= wanted
    medium.close()


@pytest.fixture
def tmpfs(tmp_path: Path) -> Iterator[Path]:
    """A small file system of our own, 4 MiB."""
    root = tmp_path / "small"
    root.mkdir()
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", root], capture_output=True, check=False)
    require_machine(done.returncode == 0, "the right to mount a tmpfs")
    yield root
    subprocess.run(["umount", "-l", root], check=True)


def test_a_full_disk_is_full_and_nothing_is_left_of_what_did_not_fit(tmpfs: Path) -> None:
    medium = opened(tmpfs / "shared")
    wanted = spread(8, seed=1)
    with pytest.raises(MediumFull, match=r"No space left on device; make room there"):
        medium.write(wanted, [[payload(1, 1 << 20)]] * 8)
    there = set(medium.scan())
    assert 1 <= len(there) < 8
    assert not list(tmpfs.rglob("*.tmp"))
    assert medium.bytes_written == len(there) << 20
    medium.ping()  # it can still be read
    medium.delete(list(there))
    assert medium.write(wanted[:1], [[payload(1, 1 << 20)]])[0].done
    medium.close()


def test_a_mount_that_goes_is_not_written_beneath(tmpfs: Path) -> None:
    medium = opened(tmpfs)
    medium.write(names(1), [[payload(1, 10)]])
    subprocess.run(["umount", "-l", tmpfs], check=True)
    for call in (medium.ping, lambda: medium.probe(names(1)), lambda: medium.write(names(1), [[payload(1, 10)]])):
        with pytest.raises(MediumUnavailable, match="another file system than before"):
            call()
    assert list(tmpfs.iterdir()) == []
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", tmpfs], check=True)
    medium.close()


def test_one_writer_never_exceeds_its_capacity(tmp_path: Path) -> None:
    """Ten times the capacity, blocks of all sizes, written again, foreign files and records among them."""
    root, source = tmp_path / "shared", random.Random(3)
    medium = opened(root, capacity=Bytes(4 << 20), sync=False)
    medium.ping()
    (root / "foreign").mkdir()
    (root / "foreign" / "file").write_bytes(bytes(600_000))
    wanted = spread(200, seed=3)
    for turn in range(400):
        size = source.choice([1, 4096, 70_000, 200_000])
        assert medium.write([wanted[source.randrange(200)]], [[payload(turn, size)]])[0].done
        if turn % 50 == 0:
            medium.remember("scope", source.randbytes(32), "x" * 3000)
        assert taken(root) <= 4 << 20, f"after {turn} writes"
    assert taken(root) > 3 << 20, "it makes use of its capacity"
    assert (root / "foreign" / "file").stat().st_size == 600_000
    (outcome,) = medium.write(wanted[:1], [[payload(1, 5 << 20)]])
    assert outcome.status is Status.FAILED
    assert "raise capacity" in outcome.detail
    medium.close()


def test_four_threads_never_exceed_the_capacity_at_any_time(tmpfs: Path) -> None:
    """The file system's own count, which is of one moment, looked at all the while."""
    medium = opened(tmpfs, capacity=Bytes(3 << 20))
    medium.ping()
    most, done = [0], threading.Event()

    def watch() -> None:
        while not done.is_set():
            now = os.statvfs(tmpfs)
            most[0] = max(most[0], (now.f_blocks - now.f_bfree) * now.f_frsize)

    def write(seed: int) -> None:
        for name in spread(75, seed):
            assert medium.write([name], [[payload(seed, 100_000)]])[0].done

    watcher = threading.Thread(target=watch)
    watcher.start()
    writers = [threading.Thread(target=write, args=(seed,)) for seed in range(4)]
    for each in writers:
        each.start()
    for each in writers:
        each.join(60)
    done.set()
    watcher.join(10)
    assert 2 << 20 < most[0] <= 3 << 20
    assert len(list(medium.scan())) > 15
    medium.close()


def test_four_processes_exceed_the_capacity_by_what_is_on_its_way_at_most(tmpfs: Path) -> None:
    """Nobody locks anybody out: two that look at once may both find room for what only one can have."""
    medium = opened(tmpfs, capacity=Bytes(2 << 20))
    medium.ping()
    program = WRITER.replace("capacity=1 << 40", "capacity=2 << 20")
    writers = [subprocess.Popen([sys.executable, "-c", program, tmpfs, "any", str(seed), "50"]) for seed in range(4)]
    most = 0
    while any(each.poll() is None for each in writers):
        now = os.statvfs(tmpfs)
        most = max(most, (now.f_blocks - now.f_bfree) * now.f_frsize)
    assert [each.returncode for each in writers] == [0] * 4
    assert 1 << 20 < most <= (2 << 20) + 3 * 217_088, (
        "a block of each other process, in whole pages and what goes with it"
    )
    assert whole(medium) >= 4
    medium._space.tend(0, 0.0)
    assert taken(tmpfs) <= 2 << 20
    medium.close()


def test_what_was_used_longest_ago_goes_first(tmp_path: Path) -> None:
    medium = opened(tmp_path, capacity=Bytes(1 << 20))
    wanted = spread(12, seed=5)
    medium.write(wanted[:4], [[payload(1, 100_000)]] * 4)
    for age, name in enumerate(wanted[:4]):
        os.utime(place(tmp_path, name), (time.time() - 100 + age,) * 2)
    medium.write(wanted[4:5], [[payload(1, 1000)]])  # now it knows them all
    medium.touch(wanted[:1])
    for name in wanted[5:]:
        medium.write([name], [[payload(1, 100_000)]])
    there = set(medium.scan())
    assert wanted[0] in there
    assert wanted[1] not in there
    assert wanted[11] in there
    medium.clear()
    for name in wanted[:3]:  # what is hidden goes before what was written just now, however often
        medium.write([name], [[payload(1, 100_000)]])
        os.utime(place(tmp_path, name, 1), (1, 1))
    medium.write(wanted[3:4], [[payload(1, 100_000)]])
    assert set(tmp_path.glob("??/?/*.1")) == {place(tmp_path, name, 1) for name in wanted[:4]}
    assert 0 < len(list(tmp_path.rglob("*.0"))) < len(there)
    medium.close()


def test_groups_share_the_capacity(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A large place has several groups, each looked through on its own."""
    monkeypatch.setattr("kvtier.storage_backends.fs_space.GROUP_BYTES", 8 << 20)
    medium = opened(tmp_path, capacity=Bytes(32 << 20), sync=False)
    assert medium._space.groups == 4
    for name in spread(1500, seed=6):
        assert medium.write([name], [[payload(1, 30_000)]])[0].done
    assert 26 << 20 < taken(tmp_path) <= 32 << 20
    assert len(list(medium.scan())) > 600
    medium.close()


def test_what_nobody_uses_goes_and_a_touch_keeps_it(tmp_path: Path) -> None:
    medium = opened(tmp_path, capacity=Bytes(8 << 20))  # one group
    wanted = names(3)
    medium.write(wanted, [[payload(1, 10)]] * 3)
    for name in wanted:
        os.utime(place(tmp_path, name), (1, 1))
    assert medium.probe(wanted) == 0
    assert medium.heads(wanted, 4) == [b""] * 3
    assert medium.read(wanted[:1], [[room(10)]]) == [Outcome(Status.ABSENT)]
    medium.touch(wanted[:1])
    assert medium.probe(wanted) == 1
    medium.close()
    medium = opened(tmp_path, capacity=Bytes(8 << 20))
    medium._space.tend(0, time.time() - 86400)
    assert [place(tmp_path, name).exists() for name in wanted] == [True, False, False]
    medium.close()


def test_the_sweep_comes_round_by_itself(tmp_path: Path) -> None:
    medium = opened(tmp_path, ttl=Seconds(0.2))
    medium.write(names(3), [[payload(1, 10)]] * 3)
    until = time.monotonic() + 20
    while any(path.is_file() for path in tmp_path.rglob("*.0")):
        assert time.monotonic() < until
        time.sleep(0.01)
    medium.close()


def test_two_who_share_it_see_the_same(tmp_path: Path) -> None:
    one, other = opened(tmp_path), opened(tmp_path)
    wanted = names(2)
    one.write(wanted, [[payload(1, 10)]] * 2)
    assert other.probe(wanted) == 2
    other.clear()
    one.clear()
    assert (other.probe(wanted), one.generation, other.generation) == (0, 2, 2)
    assert one.reclaim() == 2
    version = one.epochs_version
    threads = [
        threading.Thread(target=medium.raise_epochs, args=({f"n{turn % 3}": turn, "all": turn}, {}))
        for medium in (one, other)
        for turn in range(1, 20)
    ]
    for each in threads:
        each.start()
    for each in threads:
        each.join(30)
    assert one.epochs() == other.epochs() == {"n0": 18, "n1": 19, "n2": 17, "all": 19}
    assert len(list((tmp_path / "state").iterdir())) <= 10, "lower ones go"
    one.raise_epochs({"everything": 1, "long" * 1000: 2}, {"n0": 18, "n1": 18})
    assert other.epochs() == {"n1": 19, "n2": 17, "all": 19, "everything": 1, "long" * 1000: 2}
    one.probe([])
    assert one.epochs_version != version
    one.close()
    other.close()


def test_a_root_that_goes_is_unavailable_and_may_come_back(tmp_path: Path) -> None:
    medium = opened(tmp_path / "mount" / "kvtier")
    with pytest.raises(MediumUnavailable, match="No such file or directory; is it mounted"):
        medium.ping()
    (tmp_path / "mount").mkdir()
    medium.ping()
    medium.write(names(1), [[payload(1, 10)]])
    (tmp_path / "mount").rename(tmp_path / "away")
    with pytest.raises(MediumUnavailable):
        medium.probe(names(1))
    with pytest.raises(MediumUnavailable):
        medium.write(names(1), [[payload(1, 10)]])
    (tmp_path / "away").rename(tmp_path / "mount")
    assert medium.probe(names(1)) == 1
    medium.close()
    with pytest.raises(MediumUnavailable, match="closed"):
        medium.probe(names(1))


def test_a_root_that_is_not_ours_is_refused(tmp_path: Path) -> None:
    """Files of other rights are misses, a folder that may not be read refuses. As root: by a process that is not."""
    medium = opened(tmp_path / "shared")
    wanted = names(2)
    medium.write(wanted, [[payload(1, 10)]] * 2)
    medium.close()
    program = """
import os, sys
from kvtier.errors import MediumRefused
from kvtier.key import Address
from kvtier.storage_backends.fs import FsMedium
one, two = [Address(bytes.fromhex(name)) for name in sys.argv[2:]]
if os.geteuid() == 0: os.setresuid(65534, 65534, 65534)
medium = FsMedium(sys.argv[1], FsMedium.Params(capacity=1 << 40))
room = memoryview(bytearray(10))
assert [one.status.value for one in medium.read([one, two], [[room], [room]])] == ["absent", "done"]
assert medium.heads([one], 3) == [b""]
os.chmod(sys.argv[1] + "/state", 0)
try: medium.ping()
except MediumRefused as refused: print(refused)
medium.close()
"""
    for path in [*reversed(tmp_path.parents), tmp_path]:
        if path.stat().st_uid == os.geteuid() and "pytest" in str(path):
            path.chmod(0o711)
    if os.geteuid() == 0:
        for path in [tmp_path / "shared", *(tmp_path / "shared").rglob("*")]:
            os.chown(path, 65534, 65534)
    place(tmp_path / "shared", wanted[0]).chmod(0)
    found = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path / "shared"), *(name.hex() for name in wanted)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (found.returncode, found.stderr) == (0, "")
    assert "Permission denied" in found.stdout


def test_a_silent_server_costs_one_timeout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    medium = opened(tmp_path, timeout=Seconds(0.2))
    wanted = spread(512, seed=8)
    medium.write(wanted, [[payload(1, 10)]] * 512)
    assert medium.probe(wanted) == 512
    answers, lstat = threading.Event(), os.lstat

    def silent(path: str) -> os.stat_result:
        answers.wait(20)
        return lstat(path)

    monkeypatch.setattr("kvtier.storage_backends.fs.os.lstat", silent)
    for _ in range(4):  # also where all who look are stuck
        began = time.monotonic()
        with pytest.raises(MediumUnavailable, match=r"has not answered for 0.2 s"):
            medium.probe(wanted)
        assert time.monotonic() - began < 5
    answers.set()
    monkeypatch.undo()
    until = time.monotonic() + 20
    while True:
        try:
            assert medium.probe(wanted) == 512
            break
        except MediumUnavailable:
            assert time.monotonic() < until
    medium.close()


def test_links_are_not_followed(tmp_path: Path) -> None:
    root = tmp_path / "shared"
    medium = opened(root)
    one, two = names(2)
    medium.write([one], [[payload(1, 10)]])
    (tmp_path / "elsewhere").mkdir()
    text = two.hex()
    (root / text[:2]).symlink_to(tmp_path / "elsewhere")
    (tmp_path / "elsewhere" / text[2]).mkdir()
    (tmp_path / "elsewhere" / text[2] / f"{text}.0").write_bytes(b"value")
    assert list(medium.scan()) == [one]
    assert medium.read([two], [[room(10)]]) == [Outcome(Status.ABSENT)]
    assert medium.probe([two]) == 0
    assert medium.write([two], [[payload(2, 10)]])[0].status is Status.FAILED
    medium.touch([two])
    medium.delete([two])
    assert [path.name for path in (tmp_path / "elsewhere").rglob("*.0")] == [f"{text}.0"]
    medium.close()


@pytest.mark.parametrize("number", [1 << 32, 10**18 - 1])
def test_files_of_numbers_that_cannot_be_ours_are_passed_by(tmp_path: Path, number: int) -> None:
    one, other = opened(tmp_path), opened(tmp_path)
    (wanted,) = names(1)
    assert one.write([wanted], [[payload(1, 300)]])[0].done
    one.raise_epochs({"a": 3}, {})
    (mine,) = (tmp_path / "state").glob("epoch.*.3")
    mine.with_suffix(f".{number}").write_bytes(b"a")
    (tmp_path / "state" / f"generation.{number}").touch()
    assert one.epochs() == {"a": 3}
    other.raise_epochs({"a": 4}, {})
    assert one.epochs() == {"a": 4}
    assert one.probe([wanted]) == 1
    one.clear()
    late = opened(tmp_path)
    assert [medium.probe([wanted]) for medium in (one, other, late)] == [0, 0, 0]
    assert one.generation == other.generation == late.generation == 1
    for medium in (one, other, late):
        medium.close()


def test_the_last_generation_of_a_folder_is_not_passed(tmp_path: Path) -> None:
    medium = opened(tmp_path)
    medium.clear()
    last = tmp_path / "state" / f"generation.{(1 << 32) - 1}"
    last.touch()
    with pytest.raises(MediumError, match="no generation is left"):
        medium.clear()
    assert last.exists()
    assert not list(last.parent.glob(f"generation.{1 << 32}"))
    medium.close()


def test_what_was_cleared_stays_so_where_its_generation_is_lost(tmp_path: Path) -> None:
    medium = opened(tmp_path)
    medium.write(names(1), [[payload(1, 10)]])
    medium.clear()
    (tmp_path / "state" / "generation.1").unlink()
    assert medium.probe(names(1)) == 0
    other = opened(tmp_path)
    assert other.probe(names(1)) == 0
    assert other.generation == 1
    medium.close()
    other.close()


def test_the_doctor_finds_what_is_wrong_and_mends_what_is_ours(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store, keys = reopened(tmp_path), chain(1, 5)
    memory = EngineMemory(5)
    store.save(keys, filled(memory, keys)).result(20)
    assert store.drain(20)
    store.close()
    asked = ["doctor", "--tier", f"fs://{tmp_path}/shared?capacity=1GiB"]
    assert main(asked) == 0
    blocks = sorted((tmp_path / "shared").glob("??/?/*.0"))
    assert len(blocks) == 5
    for harm, path in zip(["cut", "flipped"], blocks, strict=False):
        spoil([path], harm)
    blocks[2].rename(blocks[2].with_name(blocks[2].name[:20] + "f" * 10 + blocks[2].name[30:]))
    foreign = blocks[3].with_name("notes.txt")
    foreign.write_text("mine")
    capsys.readouterr()
    assert main([*asked, "--fix"]) == 1
    told = capsys.readouterr().out
    for kind in ("wrong byte count", "flipped bit", "wrong name", "foreign file"):
        assert kind in told
    assert (foreign.read_text(), len(sorted((tmp_path / "shared").glob("??/?/*.0")))) == ("mine", 2)
    foreign.unlink()
    assert main(asked) == 0
    assert main(["doctor", "--tier", f"fs://{tmp_path}/nowhere?capacity=1GiB"]) == 2


def test_the_doctor_says_which_blocks_it_cannot_prove_without_their_key(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    key = tmp_path / "key"
    key.touch(0o600)
    key.write_bytes(bytes(range(32)))
    url = f"fs://{tmp_path}/shared?capacity=1GiB&write=through&encrypt={key}"
    (tmp_path / "shared").mkdir()
    tiers = [TierUrl.parse("dram://?capacity=4MiB"), TierUrl.parse(url)]
    store, keys, memory = open_store(tiers, IDENTITY, StoreSettings(), Metrics()), chain(1, 3), EngineMemory(3)
    store.save(keys, filled(memory, keys)).result(20)
    assert store.drain(20)
    store.close()
    assert main(["doctor", "--tier", url]) == 0
    assert "3 frames are sealed" in capsys.readouterr().out
