"""What memory the machine has left."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from kvtier import machine as ours
from kvtier.machine import available_memory


def machine(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


MEMINFO = {"proc/meminfo": "MemTotal:  16777216 kB\nMemAvailable:    8388608 kB\n"}


def test_without_a_limit_the_machine_decides(tmp_path: Path) -> None:
    found = available_memory(
        machine(tmp_path, MEMINFO | {"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/memory.max": "max\n"})
    )
    assert (found.nbytes, found.where) == (8 << 30, "memory")


def test_the_tightest_cgroup_decides_whatever_its_depth(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "0::/pod/container\n",
        "sys/fs/cgroup/pod/memory.max": str(4 << 30),
        "sys/fs/cgroup/pod/memory.current": str(3 << 30),
        "sys/fs/cgroup/pod/memory.stat": f"anon 1\ninactive_file {1 << 30}\n",
        "sys/fs/cgroup/pod/container/memory.max": "max\n",
    }
    found = available_memory(machine(tmp_path, MEMINFO | files))
    assert (found.nbytes, found.where) == (2 << 30, str(tmp_path / "sys/fs/cgroup/pod/memory.max"))


def test_the_first_version_of_cgroups_is_read_too(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "5:cpu:/x\n4:memory:/docker/1\n",
        "sys/fs/cgroup/memory/memory.limit_in_bytes": str(1 << 30),
        "sys/fs/cgroup/memory/memory.usage_in_bytes": str(1 << 29),
    }
    assert available_memory(machine(tmp_path, MEMINFO | files)).nbytes == 1 << 29


def test_a_machine_that_says_nothing(tmp_path: Path) -> None:
    assert available_memory(tmp_path).nbytes == 1 << 30


HEAPS = """
import ctypes, sys, threading
from kvtier.machine import use_few_heaps
use_few_heaps()
held, go = [], threading.Barrier(9)
def hold():
    held.append(bytes(4096))
    go.wait()
threads = [threading.Thread(target=hold) for _ in range(8)]
for thread in threads:
    thread.start()
libc = ctypes.CDLL(None)
libc.fopen.restype = ctypes.c_void_p
out = ctypes.c_void_p(libc.fopen(sys.argv[1].encode(), b"w"))
libc.malloc_info(0, out)
libc.fclose(out)
go.wait()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's heaps")
@pytest.mark.parametrize(("asked", "heaps"), [(None, range(2, 3)), ("64", range(4, 10))])
def test_threads_share_two_heaps_unless_someone_said_otherwise(asked: str | None, heaps: range, tmp_path: Path) -> None:
    """Each thread's own grows to the most it ever held: a server of a dozen threads grows for hours."""
    environment = {name: value for name, value in os.environ.items() if name != "MALLOC_ARENA_MAX"}
    if asked is not None:
        environment["MALLOC_ARENA_MAX"] = asked
    out = tmp_path / "heaps.xml"
    subprocess.run([sys.executable, "-c", HEAPS, str(out)], env=environment, check=True, timeout=60)
    assert out.read_text().count("<heap nr=") in heaps


@pytest.mark.parametrize("name", ["MALLOC_ARENA_MAX", "GLIBC_TUNABLES"])
def test_whoever_says_how_many_heaps_there_are_is_believed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[tuple[int, int]] = []
    monkeypatch.setattr(ours, "_libc", SimpleNamespace(mallopt=lambda *given: told.append(given)))
    monkeypatch.delenv("MALLOC_ARENA_MAX", raising=False)
    monkeypatch.delenv("GLIBC_TUNABLES", raising=False)
    ours.use_few_heaps()
    assert told == [(-8, 2)]
    monkeypatch.setenv(name, "glibc.malloc.arena_max=8")
    ours.use_few_heaps()
    assert len(told) == 1
