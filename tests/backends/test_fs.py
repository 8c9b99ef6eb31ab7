"""A folder on a shared file system: whole files or none, one bound for all who write, and what others do to it meanwhile."""

from __future__ import annotations

import contextlib
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
from kvtier.errors import ConfigError, MediumError, MediumUnavailable
from kvtier.key import Address, Span
from kvtier.metrics import Metrics
from kvtier.quantity import Bytes, Seconds
from kvtier.registry import plan_tier
from kvtier.storage_backends.fs import FsMedium
from kvtier.store.open import open_store
from kvtier.store.store import TieredStore
from kvtier.testing.blocks import IDENTITY, LAYOUT, EngineMemory, chain, filled
from kvtier.testing.media import KeyMediumSuite, names, payload, room
from kvtier.testing.stores import PATIENCE, StoreSuite
from kvtier.url import TierUrl
from tests.store.builders import rotten
from tests.support import until

from .fs import opened, place, spread, whole, writer


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
        return rotten(store, keys)

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
    settings = StoreSettings(deadline=Seconds(PATIENCE))
    return open_store([TierUrl.parse(url) for url in urls], IDENTITY, settings, Metrics())


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
        wanted = before + source.randrange(3, 40)
        until(lambda wanted=wanted: sum(1 for _ in medium.scan()) >= wanted, 60.0, "files are written")  # type: ignore[misc]  # of this turn
        started.kill()
        started.wait(60)
        started.stdout.close()  # type: ignore[union-attr]
        assert whole(medium) >= wanted
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

    def answers_again() -> bool:
        with contextlib.suppress(MediumUnavailable):
            return medium.probe(wanted) == 512
        return False

    until(answers_again, 60.0, "all files are found in time")
    answers, lstat = threading.Event(), os.lstat

    def silent(path: str) -> os.stat_result:
        answers.wait(60)
        return lstat(path)

    monkeypatch.setattr("kvtier.storage_backends.fs.os.lstat", silent)
    for _ in range(4):  # also where all who look are stuck
        began = time.monotonic()
        with pytest.raises(MediumUnavailable, match=r"has not answered for 0.2 s"):
            medium.probe(wanted)
        assert time.monotonic() - began < 15
    answers.set()
    monkeypatch.undo()
    until(answers_again, 60.0, "it answers again")
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
    unproven = "3 sealed frames proven but for the payload"
    for asked, says in ((url, False), (url.partition("&encrypt=")[0], True)):
        assert main(["doctor", "--tier", asked]) == 0
        assert (unproven in capsys.readouterr().out) == says
