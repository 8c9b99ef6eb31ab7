"""Each kind of tier, opened where it may be measured: beside what is the user's, and gone afterwards."""

from __future__ import annotations

import os
import random
import shutil
import tempfile
from collections.abc import Iterator
from concurrent.futures import Executor
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from kvtier.abc.medium import KeyMedium, MediumContext, PersistentSlotMedium
from kvtier.bench.limits import LIFE_MS, FileLimit, FolderLimit, Limit, SocketLimit
from kvtier.bench.plane import Blocks, DramPlane, FramePlane, Plane
from kvtier.codec.catalogue import codec_named
from kvtier.codec.frame import HEADER_BYTES
from kvtier.codec.seal import Sealer
from kvtier.config import Verify
from kvtier.errors import CapacityError, ConfigError, MediumError
from kvtier.machine import require_memory
from kvtier.quantity import Bytes, Seconds, rounded_bytes
from kvtier.registry import TierPlan
from kvtier.storage_backends.dram import DramMedium
from kvtier.storage_backends.fs import FsMedium
from kvtier.storage_backends.nvme import NvmeMedium, SizeClass
from kvtier.storage_backends.nvme_directory import TRIAL
from kvtier.storage_backends.redis import RedisMedium, connection_maker
from kvtier.storage_backends.redis_names import prefix_of
from kvtier.storage_backends.redis_wire import Wire, translated

MARK = b"kvtier bench "
"""Keys of what is written to a server begin with this and a few random bytes."""
SPARE_SHARE = 0.05
"""Of a file system or a server's memory, that is left free."""


@contextmanager
def opened(plan: TierPlan, block_bytes: int, count: int, rng: random.Random, workers: Executor) -> Iterator[Plane]:
    """The tier of ``plan`` with room for ``count`` blocks, to be measured. Nothing is left of it afterwards.

    Raises ``CapacityError`` where the tier, its device or this machine has no room for them beside what is there, and
    other ``KvtierError`` where the tier cannot be used.
    """
    with ExitStack() as stack:
        require_memory((4 if plan.url.scheme == "dram" else 2) * count * block_bytes, f"{plan.url}")
        mark = MARK + os.urandom(8) + b" " if issubclass(_kind(plan), RedisMedium) else b""
        blocks = stack.enter_context(closing(Blocks(block_bytes, count, rng, mark)))
        yield _plane(plan, blocks, rng, workers, stack)


def _kind(plan: TierPlan) -> type[Any]:
    """The medium's class, as far as it is one of ours."""
    return plan.factory if isinstance(plan.factory, type) else object


def _plane(plan: TierPlan, blocks: Blocks, rng: random.Random, workers: Executor, stack: ExitStack) -> Plane:
    kind, needed = _kind(plan), blocks.count * (blocks.block_bytes + HEADER_BYTES)
    if issubclass(kind, DramMedium):
        return _dram(plan, blocks, rng, workers, stack)
    if issubclass(kind, NvmeMedium):
        return _nvme(plan, blocks, rng, stack)
    if issubclass(kind, FsMedium):
        folder = stack.enter_context(_folder_at(Path(plan.url.path)))
        _require(needed, min(plan.params.capacity, _free(folder)), plan)
        fs = FsMedium(str(folder / "tier"), plan.params)
        stack.callback(fs.close)
        fs.ping()
        return _framed(plan, blocks, fs, FolderLimit(folder / "limit", sync=plan.params.sync), stack)
    if issubclass(kind, RedisMedium):
        return _redis(plan, blocks, stack)
    medium = plan.open(MediumContext(blocks.block_bytes))
    stack.callback(medium.close)
    if not isinstance(medium, KeyMedium):
        raise ConfigError(f"{plan.url}: its slots may be in use, and this bench knows no place beside them")
    medium.ping()
    return _framed(plan, blocks, medium, None, stack)


def _framed(
    plan: TierPlan,
    blocks: Blocks,
    medium: KeyMedium | PersistentSlotMedium,
    limit: Limit | None,
    stack: ExitStack,
    **more: Any,  # noqa: ANN401 - of the plane
) -> FramePlane:
    sealer = None if plan.options.encrypt is None else Sealer.from_file(plan.options.encrypt)
    plane = FramePlane(blocks, medium, limit, codec=codec_named(plan.options.codec), sealer=sealer, **more)
    stack.callback(plane.close)
    return plane


def _dram(plan: TierPlan, blocks: Blocks, rng: random.Random, workers: Executor, stack: ExitStack) -> Plane:
    """A slice of the arena, so that nobody waits for all of it; beside as much that stands for the engine's memory."""
    _require(blocks.count * blocks.block_bytes, plan.params.capacity, plan)
    engine = DramMedium(2 * blocks.count, blocks.block_bytes)
    stack.callback(engine.close)
    engine.wait_prefaulted(60.0)
    share = {"share": 1.0} if plan.options.verify is Verify.ALWAYS else {}
    return DramPlane(blocks, engine, rng, workers, **share)


def _nvme(plan: TierPlan, blocks: Blocks, rng: random.Random, stack: ExitStack) -> Plane:
    budget = blocks.count * (blocks.block_bytes + 8192) + (8 << 20)
    while SizeClass.of(budget, blocks.block_bytes).slots < blocks.count:
        budget += budget // 8
    folder = stack.enter_context(_folder_at(Path(plan.url.path)))
    _require(budget, min(plan.params.capacity, _free(folder)), plan)
    medium = NvmeMedium(folder, blocks.block_bytes, replace(plan.params, capacity=Bytes(budget)))
    stack.callback(medium.close)
    slots = rng.sample(range(medium.slots), blocks.count)
    limit = FileLimit(medium, folder, slots, plan.params.threads)
    return _framed(plan, blocks, medium, limit, stack, slots=slots)


def _redis(plan: TierPlan, blocks: Blocks, stack: ExitStack) -> Plane:
    """Under names of its own; what no one removes, because this process was killed, expires within minutes."""
    params = replace(plan.params, ttl=Seconds(min(plan.params.ttl, LIFE_MS / 1000)))
    make = connection_maker(plan.url, params)
    medium = RedisMedium.open(plan.url, params, MediumContext(blocks.block_bytes))
    stack.callback(medium.close)
    medium.ping()
    medium.probe([])  # brings its generation up to date
    with closing(Wire(make)) as wire:
        free = _free_on_server(wire)
    if free is not None:  # one at its limit would evict what is the user's, or refuse
        _require(blocks.count * (blocks.block_bytes + HEADER_BYTES), free, plan)
    names = [prefix_of(medium.generation) + name for name in blocks.names]
    with translated(str(plan.url).partition("?")[0]):
        limit = SocketLimit(make, names, params.connections)
    return _framed(plan, blocks, medium, limit, stack)


def _free_on_server(wire: Wire) -> int | None:
    """Bytes up to the server's limit; None where it has none, or does not let us ask."""
    try:
        with translated("INFO"):
            text = bytes(wire.call("INFO", "memory")).decode("ascii", "replace")
            rows = dict(line.split(":", 1) for line in text.splitlines() if ":" in line)
            most, used = int(rows["maxmemory"]), int(rows["used_memory"])
    except MediumError:
        return None
    return int(most * (1 - SPARE_SHARE)) - used if most else None


def _require(needed: int, free: int, plan: TierPlan) -> None:
    if needed > free:
        raise CapacityError(
            f"{plan.url}: {rounded_bytes(needed)} are needed for blocks of this size, {rounded_bytes(max(0, free))} are free"
        )


def _free(folder: Path) -> int:
    disk = os.statvfs(folder)
    return int(disk.f_bavail * disk.f_frsize - SPARE_SHARE * disk.f_blocks * disk.f_frsize)


@contextmanager
def _folder_at(directory: Path) -> Iterator[Path]:
    """A temporary folder on the file system of ``directory``, which need not exist: beside it, or else inside.

    Inside, a server that starts meanwhile would find it among its own: so only where beside is another file system, or closed.
    """
    if directory.exists() and not directory.is_dir():
        raise ConfigError(f"{directory}: no folder")
    place = directory
    while not place.is_dir():
        place = place.parent
    if place == directory and os.access(place.parent, os.W_OK) and place.parent.stat().st_dev == place.stat().st_dev:
        place = place.parent
    try:
        folder = Path(tempfile.mkdtemp(prefix=TRIAL, dir=place))
    except OSError as error:
        raise ConfigError(f"{place}: no temporary folder can be made there: {error.strerror}") from None
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
