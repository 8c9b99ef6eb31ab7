"""From tier URLs to an open store."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from kvtier import policy
from kvtier.abc.medium import KeyMedium, Medium, MediumContext, PersistentSlotMedium, SlotMedium
from kvtier.codec.catalogue import codec_named, keeping, lossy_codec
from kvtier.codec.seal import Sealer
from kvtier.config import GateMode, StoreSettings, WriteMode
from kvtier.cost import DRAM, FittedGate, Gate, Guarded, OpenGate
from kvtier.errors import ConfigError, MediumUnavailable
from kvtier.key import Identity, Shard
from kvtier.metrics import Metrics
from kvtier.policy.admission import BURSTS
from kvtier.registry import TierPlan, plan_tier
from kvtier.store.arena import Arena
from kvtier.store.geometry import Geometry
from kvtier.store.parts import Parts
from kvtier.store.records import identity_text
from kvtier.store.store import TieredStore
from kvtier.tier.key import KeyTier
from kvtier.tier.lower import LowerTier
from kvtier.tier.slot import SlotTier
from kvtier.transfer.workers import Workers
from kvtier.url import TierUrl

_log = logging.getLogger(__name__)

DRAM_THREADS = 2
MOST_SAVES = 256
"""Saves that may wait for a DRAM thread; one more is dropped."""


def open_store(
    tiers: Sequence[TierUrl],
    identity: Identity,
    settings: StoreSettings,
    metrics: Metrics,
    *,
    shard: Shard = Shard(),  # noqa: B008 - frozen
    gate: Gate | None = None,
    require_all: bool = False,
    around: Callable[[str, Medium], Medium] | None = None,
) -> TieredStore:
    """Open every tier and the store over them, fastest first; the first is ``dram://``.

    ``around`` may put something around each medium, given the name of its tier: a fault, for trials.

    Raises ``ConfigError`` for whatever is wrong in a URL, for a medium that answers and refuses, and for one that does not
    answer where ``require_all`` is set; otherwise that tier starts degraded and is used as soon as it answers. What was
    opened before an error is closed again.
    """
    plans = [plan_tier(url) for url in tiers]
    check_tiers(plans)
    layout = identity.layout.shard(shard.tp_size, shard.group)
    codec = lossy_codec(settings.codec.value, layout, identity.engine_format)
    if identity != keeping(identity, settings.codec.value):
        raise ConfigError(
            f"codec: the store's is {settings.codec.value}, and the identity says {identity.codec or 'raw'}"
        )
    block_bytes = layout.block_bytes if codec is None else codec.encoded_bytes(layout.block_bytes)
    geometry = Geometry(shard, layout.fingerprint(), block_bytes, layout.block_tokens, codec)
    context = MediumContext(slot_bytes=geometry.block_bytes)
    opened: list[Medium] = []
    workers: list[Workers] = []
    lock = threading.Lock()
    try:
        dram = plans[0].open(context)
        opened.append(dram)
        if around is not None:
            dram = around(DRAM, dram)
        assert isinstance(dram, SlotMedium), "dram:// is slot-addressed"
        lower: list[LowerTier] = []
        for plan, name in zip(plans[1:], tier_names(plans[1:]), strict=True):
            medium = plan.open(context)
            opened.append(medium)
            if around is not None:
                medium = around(name, medium)
            workers.append(Workers(name, settings.transfer_threads))
            tier = _lower_tier(name, plan, medium, workers[-1], metrics, lock, geometry.block_bytes)
            lower.append(tier)
            _greet(tier, identity, require_all=require_all)
        workers.append(Workers(DRAM, DRAM_THREADS, most_saves=MOST_SAVES))
        arena = Arena(dram, policy.make(plans[0].options.policy, dram.slots))
        parts = Parts(
            geometry,
            arena,
            metrics.tier(DRAM),
            tuple(lower),
            workers[-1],
            Guarded(gate or (FittedGate(metrics.gate) if settings.gate is GateMode.ON else OpenGate())),
            lock,
            identity,
        )
        return TieredStore(
            parts,
            verify=plans[0].options.verify,
            deadline=settings.deadline,
            copier=ThreadPoolExecutor(1, "kvtier-copier"),
        )
    except BaseException:
        for each in workers:
            each.close()
        for one in opened:
            one.close()
        raise


def open_at_rest(tiers: Sequence[TierUrl], advice: str) -> TieredStore:
    """The tiers that outlive their process, for one who has no engine: they can be looked at and cleared.

    No thread runs: whoever calls ``keep`` has to run what it queues (``workers`` of the tiers). A directory that a process
    holds is a ``ConfigError`` that gives ``advice``.
    """
    plans = [plan for plan in map(plan_tier, tiers) if plan.url.scheme != DRAM]
    metrics, lock = Metrics(), threading.Lock()
    opened: list[Medium] = []
    lower: list[LowerTier] = []
    try:
        for plan, name in zip(plans, tier_names(plans), strict=True):
            opened.append(plan.open(MediumContext(slot_bytes=0, advice=advice)))
            lower.append(_lower_tier(name, plan, opened[-1], Workers(name, 0), metrics, lock, 0))
    except BaseException:
        for one in opened:
            one.close()
        raise
    block_bytes = max((medium.slot_bytes for medium in opened if isinstance(medium, SlotMedium)), default=1)
    dram = plan_tier(TierUrl(DRAM, params={"capacity": "4KiB", "prefault": "false"})).open(MediumContext(slot_bytes=1))
    assert isinstance(dram, SlotMedium), "dram:// is slot-addressed"
    parts = Parts(
        Geometry(Shard(), bytes(16), block_bytes, 1),
        Arena(dram, policy.make("lru", dram.slots)),
        metrics.tier(DRAM),
        tuple(lower),
        Workers(DRAM, 0),
        OpenGate(),
        lock,
    )
    return TieredStore(parts, keeper=False)


def check_tiers(plans: Sequence[TierPlan]) -> None:
    """Refuse what can be told from the URLs and key files alone, before anything is opened. Raises ``ConfigError``."""
    schemes = [plan.url.scheme for plan in plans]
    if not plans or schemes[0] != DRAM or DRAM in schemes[1:]:
        named = ", ".join(f"{scheme}://" for scheme in schemes) or "none"
        raise ConfigError(
            f"tiers: the first tier, and only that, has to be dram://, because every lower tier is fed through it; got {named}"
        )
    if plans[0].options.write is not WriteMode.THROUGH:
        raise ConfigError(f"{plans[0].url}: write: dram is offered every block, so only through is possible")
    if plans[0].options.encrypt is not None:
        raise ConfigError(
            f"{plans[0].url}: encrypt: dram is this process's own memory, where blocks are in use; "
            f"only tiers below it can be encrypted"
        )
    chosen = {"admission", "write_budget"} & set(plans[0].url.params)
    if chosen:
        raise ConfigError(f"{plans[0].url}: {min(chosen)}: dram takes every block; only tiers below it choose")
    for plan in plans:
        check_tier(plan)
    if plans[0].options.codec != "raw":
        raise ConfigError(f"{plans[0].url}: codec: dram keeps blocks as they are; only raw is possible")


def check_tier(plan: TierPlan) -> None:
    """The part of `check_tiers` that concerns one tier alone: codec, policy and key file. Raises ``ConfigError``."""
    try:
        codec_named(plan.options.codec)
    except ConfigError as wrong:
        raise ConfigError(f"{plan.url}: codec: {wrong}") from None
    policy.check(plan.options.policy, f"{plan.url}: policy")
    if plan.options.encrypt is not None:
        try:
            Sealer.from_file(plan.options.encrypt)
        except ConfigError as wrong:
            raise ConfigError(f"{plan.url}: {wrong}") from None


def tier_names(plans: Sequence[TierPlan]) -> list[str]:
    """A short name per tier: its scheme, numbered from the second of a kind on."""
    seen: dict[str, int] = {}
    names = []
    for plan in plans:
        kind = "redis" if plan.url.scheme.startswith("redis") else plan.url.scheme
        seen[kind] = seen.get(kind, 0) + 1
        names.append(kind if seen[kind] == 1 else f"{kind}-{seen[kind]}")
    return names


def _lower_tier(
    name: str,
    plan: TierPlan,
    medium: Medium,
    workers: Workers,
    metrics: Metrics,
    lock: threading.Lock,
    block_bytes: int,
) -> LowerTier:
    codec = codec_named(plan.options.codec)
    budget = plan.options.write_budget
    if budget is not None and budget < BURSTS * block_bytes:
        raise ConfigError(
            f"{plan.url}: write_budget: {budget} bytes a day are less than a block an hour ({BURSTS * block_bytes})"
        )
    if isinstance(medium, PersistentSlotMedium):
        if not codec.fixed_ratio:
            raise ConfigError(
                f"{plan.url}: codec: a slot-addressed tier takes codecs of a fixed ratio only, and {codec.name} is not one"
            )
        order = policy.make(plan.options.policy, medium.slots)
        return SlotTier(name, plan.options, medium, codec, workers, metrics.tier(name), lock, order)
    if isinstance(medium, KeyMedium):
        if "policy" in plan.url.params:
            raise ConfigError(f"{plan.url}: policy: {plan.url.scheme}:// itself chooses what goes; leave it out")
        return KeyTier(name, plan.options, medium, codec, workers, metrics.tier(name), lock)
    raise ConfigError(f"{plan.url}: {plan.url.scheme}:// cannot be a tier below dram")


def _greet(tier: LowerTier, identity: Identity, *, require_all: bool) -> None:
    """See that the tier answers, and give it the readable record of our identity."""
    try:
        tier.greet(identity.digest(), identity_text(identity))
    except MediumUnavailable as silent:
        if require_all:
            raise
        tier.degrade(str(silent))
