"""From the arithmetic to a machine: how many GPUs, how much KV they hold, which tiers below are worth having and how large."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from kvtier.errors import ConfigError
from kvtier.quantity import rounded_bytes
from kvtier.sim.planner import (
    UTILISATION,
    Disaggregation,
    Gpu,
    Link,
    ModelShape,
    blocks_in,
    break_even_bandwidth,
    break_even_tokens,
    colocated_cost,
    disaggregate,
    kv_bytes,
    paged_useful_share,
    prefill_seconds,
    slab_useful_share,
    swap_seconds,
    transfer_seconds,
)
from kvtier.sim.replay import Workload, replay

HBM_SHARE = 0.9
"""Share of a GPU's memory for weights and KV; the rest is for activations, as vLLM's default has it."""
MOST_GPUS, MACHINE_GPUS = 64, 8
DRAM_TIMES, LOWER_TIMES = 2, 4
"""Without a trace: DRAM of so many times the HBM cache, a tier below of so many times the DRAM."""
SATURATED = 0.95
"""Share of an infinite tier's hits at which a larger one is not worth its price."""
SIZES = (0.01, 0.02, 0.05, 0.1, 0.2, 0.4, 0.7, 1.0)
"""Shares of a trace's distinct blocks that are tried."""


@dataclass(frozen=True, slots=True)
class Demand:
    """What is to be served."""

    context: int
    """Tokens of a prompt."""
    output: int
    """Tokens generated for it."""
    concurrency: int
    """Requests that decode at once."""
    block_tokens: int = 16
    utilisation: float = UTILISATION
    hbm_share: float = HBM_SHARE


@dataclass(frozen=True, slots=True)
class Pool:
    """What HBM holds beside the weights."""

    nbytes: float
    blocks: int
    sequences: int
    """Sequences of prompt and output that it holds in pages."""
    slab_sequences: int
    """The same where each has the longest sequence's room reserved."""
    paged_share: float
    """Share of the pages that hold tokens."""
    slab_share: float
    """Share of the reserved room that does."""


@dataclass(frozen=True, slots=True)
class Way:
    """A prompt's KV over one link, beside computing it."""

    link: Link
    seconds: float
    swap_seconds: float
    times_break_even: float
    """Its speed over the one at which loading takes as long as computing."""
    least_tokens: int | None
    """Shortest prefix worth loading; None: no prompt of this model is long enough."""


@dataclass(frozen=True, slots=True)
class Pair:
    """Prefill on one kind of GPU, decode on another."""

    prefill: str
    decode: str
    batch: int
    split: Disaggregation


@dataclass(frozen=True, slots=True)
class Size:
    """One size of a tier on a trace."""

    blocks: int
    nbytes: float
    hit_rate: float


@dataclass(frozen=True, slots=True)
class TraceNeeds:
    """What a trace asks of the tiers."""

    requests: int
    working_set: float
    """Bytes of its distinct blocks."""
    reuse: float
    """Hit rate of an infinite tier."""
    sizes: tuple[Size, ...]
    saturating: Size | None
    """The first of ``sizes`` with nearly all hits that there are; None where nothing is reused."""


@dataclass(frozen=True, slots=True)
class Proposal:
    tier: str
    nbytes: float
    why: str


def pool_bytes(shape: ModelShape, gpu: Gpu, share: float) -> float:
    """Memory for KV: a share of HBM less the weights; not above 0 where the weights do not fit."""
    return gpu.memory * share - shape.weight_bytes


def fewest_gpus(shape: ModelShape, gpu: Gpu, demand: Demand, sequences: int = 1) -> int:
    """The least power of two whose HBM holds weights and ``sequences``. Raises ``ConfigError`` past `MOST_GPUS`."""
    room = sequences * kv_bytes(shape, demand.context + demand.output + demand.block_tokens)
    count = 1
    while pool_bytes(shape, gpu.times(count), demand.hbm_share) < room:
        count *= 2
        if count > MOST_GPUS:
            raise ConfigError(f"{shape.name} and {sequences} sequences do not fit on {MOST_GPUS} x {gpu.name}")
    return count


def gpus_for(shape: ModelShape, gpu: Gpu, demand: Demand) -> int:
    """As many as hold the model and all requests at once, but no more than one machine has, unless the model needs more."""
    least = fewest_gpus(shape, gpu, demand)
    try:
        return max(least, min(fewest_gpus(shape, gpu, demand, demand.concurrency), MACHINE_GPUS))
    except ConfigError:
        return max(least, MACHINE_GPUS)


def pool_of(shape: ModelShape, gpu: Gpu, demand: Demand) -> Pool:
    """Raises ``ConfigError`` where weights or a single sequence do not fit."""
    nbytes, length = pool_bytes(shape, gpu, demand.hbm_share), demand.context + demand.output
    sequences = int(nbytes // (-(-length // demand.block_tokens) * shape.layout(demand.block_tokens).block_bytes))
    if sequences < 1:
        one = replace(gpu, count=1, memory=gpu.memory / gpu.count)
        raise ConfigError(
            f"{shape.name} takes {rounded_bytes(int(shape.weight_bytes))} and {rounded_bytes(kv_bytes(shape, length))} per "
            f"sequence; {gpu.count} x {gpu.name} have {rounded_bytes(int(gpu.memory * demand.hbm_share))} for both, and at "
            f"least {fewest_gpus(shape, one, demand)} are needed"
        )
    reserved = max(shape.max_positions, length)
    return Pool(
        nbytes,
        blocks_in(nbytes, shape, demand.block_tokens),
        sequences,
        int(nbytes // kv_bytes(shape, reserved)),
        paged_useful_share(demand.context + demand.output / 2, demand.block_tokens),
        slab_useful_share(demand.context, demand.output, reserved),
    )


def ways_of(shape: ModelShape, gpu: Gpu, demand: Demand, links: Iterable[Link]) -> list[Way]:
    nbytes = kv_bytes(shape, demand.context)
    even = break_even_bandwidth(shape, gpu, demand.context, utilisation=demand.utilisation)
    return [
        Way(
            link,
            transfer_seconds(nbytes, link),
            swap_seconds(nbytes, link),
            link.bandwidth / even,
            break_even_tokens(shape, gpu, link, utilisation=demand.utilisation),
        )
        for link in links
    ]


def pairs_of(shape: ModelShape, gpus: Sequence[Gpu], link: Link, demand: Demand) -> list[Pair]:
    """Every pair of ``gpus``, cheapest first: for prefill the fewest that hold the model, for decode what `gpus_for` says."""
    prefill = [gpu.times(count) for gpu in gpus if (count := _fitting(shape, gpu, demand, fewest_gpus))]
    decode = [gpu.times(count) for gpu in gpus if (count := _fitting(shape, gpu, demand, gpus_for))]
    found = []
    for last in decode:
        batch = min(demand.concurrency, pool_of(shape, last, demand).sequences)
        found += [
            Pair(_named(first), _named(last), batch, _split(shape, first, last, link, demand, batch))
            for first in prefill
        ]
    return sorted(found, key=lambda pair: pair.split.cost)


def _fitting(shape: ModelShape, gpu: Gpu, demand: Demand, needed: Callable[[ModelShape, Gpu, Demand], int]) -> int:
    """How many ``gpu`` are needed; 0 where no number would do, or what they would talk over is missing."""
    try:
        count = needed(shape, gpu, demand)
    except ConfigError:
        return 0
    return count if count == 1 or gpu.nvlink is not None else 0


def _named(gpu: Gpu) -> str:
    return gpu.name if gpu.count == 1 else f"{gpu.count} x {gpu.name}"


def _split(shape: ModelShape, prefill: Gpu, decode: Gpu, link: Link, demand: Demand, batch: int) -> Disaggregation:
    return disaggregate(
        shape, prefill, decode, link,
        context=demand.context, output=demand.output, batch=batch, utilisation=demand.utilisation,
    )  # fmt: skip


def split_of(shape: ModelShape, gpu: Gpu, link: Link, demand: Demand) -> tuple[Disaggregation, float]:
    """Prefill and decode on alike machines, and what a request costs where one machine does both."""
    batch = min(demand.concurrency, pool_of(shape, gpu, demand).sequences)
    both = colocated_cost(
        shape, gpu, context=demand.context, output=demand.output, batch=batch, utilisation=demand.utilisation
    )
    return _split(shape, gpu, gpu, link, demand, batch), both


def needs_of(work: Workload, shape: ModelShape) -> TraceNeeds:
    """Replay a trace through tiers of growing size under LRU, until a larger one would not hit more."""
    block = kv_bytes(shape, work.block_tokens)
    infinite = work.infinite
    sizes: list[Size] = []
    saturating = None
    for blocks in dict.fromkeys(max(1, int(work.unique * share)) for share in SIZES):
        sizes.append(Size(blocks, blocks * block, replay(work, "lru", blocks)))
        if infinite and sizes[-1].hit_rate >= SATURATED * infinite:
            saturating = sizes[-1]
            break
    return TraceNeeds(len(work.chains), work.unique * block, infinite, tuple(sizes), saturating)


def refuse_small_dram(nbytes: float, pool: Pool) -> None:
    """Raises ``ConfigError`` for a DRAM tier that cannot be hit: what it holds is what HBM holds as well."""
    if nbytes < pool.nbytes:
        raise ConfigError(
            f"a DRAM tier of {rounded_bytes(int(nbytes))} is smaller than the HBM cache of {rounded_bytes(int(pool.nbytes))}: "
            "both keep what was used last, so whatever it holds HBM holds too, and it is never hit; give it more than that, "
            "or leave it out"
        )


def proposed(
    shape: ModelShape,
    gpu: Gpu,
    demand: Demand,
    pool: Pool,
    lower: Sequence[Link],
    needs: TraceNeeds | None,
    dram: int | None = None,
) -> list[Proposal]:
    """Sizes of the tiers below HBM, fastest first; of 0 bytes where a tier is not worth having, with the reason.

    ``dram`` is its size where somebody has chosen it.
    """
    wanted = None if needs is None or needs.saturating is None else needs.saturating.nbytes
    if needs is not None and wanted is None:
        return [Proposal("dram", 0, "nothing in the trace is used twice")]
    if wanted is not None and wanted <= pool.nbytes and dram is None:
        return [Proposal("dram", 0, f"HBM holds the {rounded_bytes(int(wanted))} at which the trace's hits saturate")]
    size, why = pool.nbytes * DRAM_TIMES, f"{DRAM_TIMES} x the HBM cache: half of it is not in HBM as well"
    if dram is not None:
        size, why = float(dram), f"as asked for: {dram / pool.nbytes:.1f} x the HBM cache"
    elif wanted is not None and wanted < size:
        size, why = wanted, "the trace's hits saturate there"
    found = [Proposal("dram", size, why)]
    even = break_even_bandwidth(shape, gpu, demand.context, utilisation=demand.utilisation)
    below = size * LOWER_TIMES if wanted is None else wanted
    for link in lower:
        if link.bandwidth <= even:
            slow = f"{link.bandwidth / 1e9:.3g} GB/s is slower than computing, which makes {even / 1e9:.3g} GB/s"
            found.append(Proposal(link.name, 0, slow))
        elif below <= size:
            found.append(Proposal(link.name, 0, "DRAM holds what the trace hits"))
        else:
            why = f"{LOWER_TIMES} x the DRAM" if wanted is None else "the trace's hits saturate there"
            found.append(Proposal(link.name, below, why))
    return found


@dataclass(frozen=True, slots=True)
class Plan:
    """Everything above, for one model on one machine."""

    model: ModelShape
    machine: Gpu
    demand: Demand
    bytes_per_token: int
    bytes_per_block: int
    context_bytes: int
    pool: Pool
    prefill_seconds: float
    prefill_seconds_without_attention: float
    break_even_bandwidth: float
    ways: tuple[Way, ...]
    """The first is the one to the host's memory."""
    split: Disaggregation
    """On machines of one kind."""
    shared_cost: float
    """Assumed USD of one request where one machine does both."""
    pairs: tuple[Pair, ...]
    """Cheapest first."""
    trace: TraceNeeds | None
    tiers: tuple[Proposal, ...]


def planned(
    shape: ModelShape,
    gpu: Gpu,
    demand: Demand,
    *,
    ways: Sequence[Link],
    network: Link,
    lower: Sequence[Link],
    gpus: Sequence[Gpu],
    dram: int | None = None,
    work: Workload | None = None,
) -> Plan:
    """``gpu`` holds the model; ``gpus`` are one of each kind to compare, ``lower`` the tiers below DRAM, fastest first.

    Raises ``ConfigError`` where the model does not fit, or a ``dram`` of so many bytes would never be hit.
    """
    pool = pool_of(shape, gpu, demand)
    if dram is not None:
        refuse_small_dram(dram, pool)
    needs = None if work is None else needs_of(work, shape)
    split, shared = split_of(shape, gpu, network, demand)
    context, share = demand.context, demand.utilisation
    return Plan(
        model=shape,
        machine=gpu,
        demand=demand,
        bytes_per_token=kv_bytes(shape, 1),
        bytes_per_block=shape.layout(demand.block_tokens).block_bytes,
        context_bytes=kv_bytes(shape, context),
        pool=pool,
        prefill_seconds=prefill_seconds(shape, gpu, context, utilisation=share),
        prefill_seconds_without_attention=prefill_seconds(shape, gpu, context, utilisation=share, attention=False),
        break_even_bandwidth=break_even_bandwidth(shape, gpu, context, utilisation=share),
        ways=tuple(ways_of(shape, gpu, demand, ways)),
        split=split,
        shared_cost=shared,
        pairs=tuple(pairs_of(shape, gpus, network, demand)),
        trace=needs,
        tiers=tuple(proposed(shape, gpu, demand, pool, lower, needs, dram)),
    )
