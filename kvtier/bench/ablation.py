"""``kvtier bench engine --ablate``: one list of arrivals, replayed by the real scheduler with one idea off at a time.

What is compared with: memory reserved for each sequence's greatest length (a slab, as before paging: Kwon et al., SOSP'23),
batches that are filled once (as before continuous batching: Yu et al., "Orca", OSDI'22), prompts computed whole, requests in
order of arrival, and preempted sequences computed again.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace

from kvtier.assembly.assemble import Assembly, assemble
from kvtier.bench.drive import Drive, Played
from kvtier.bench.report import Row, Stopped, percentile, progress, table
from kvtier.bench.workloads import WORKLOADS, Arrival, Draw, arrivals
from kvtier.config import Preemption, Settings
from kvtier.engine.engine import Engine
from kvtier.engine.scheduler import Admission
from kvtier.engine.sequence import Sequence as TokenSequence
from kvtier.engine.tally import Pace
from kvtier.errors import ConfigError
from kvtier.params import nearest

SETTLE_SECONDS = 60.0
EVERY = 4
"""Steps from one look at the memory to the next."""


@dataclass(slots=True)
class Found:
    """What was measured, as far as it went."""

    rows: list[dict[str, object]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)
    """Those of the notes by which something is invalid, slower than allowed, or inconclusive."""
    stopped: Stopped | None = None

    def note(self, sentence: str, *, holds: bool = True) -> None:
        self.notes.append(sentence)
        if not holds:
            self.faults.append(sentence)


@dataclass(frozen=True, slots=True)
class Variant:
    """The engine with or without an idea."""

    settings: Settings
    admission: Callable[[], Admission] | None = None
    reserved: int | None = None
    """Blocks that each sequence holds, whatever it has computed; None: those in its table."""


@dataclass(frozen=True, slots=True)
class Size:
    """What the ideas are turned off with."""

    longest: int
    """Tokens of the longest sequence, prompt and answer."""
    blocks: int
    """That it takes."""


def ideas(names: str) -> list[str]:
    """The ideas of a list with commas, or all. Raises ``ConfigError`` for one that there is not."""
    chosen = list(IDEAS) if names == "all" else list(dict.fromkeys(name.strip() for name in names.split(",")))
    for name in chosen:
        if name not in IDEAS:
            raise ConfigError(f"--ablate: unknown idea {name!r}{nearest(name, [*IDEAS, 'all'])}")
    return chosen


class Slab:
    """So many sequences at a time as reserved lengths fit in memory."""

    def __init__(self, most: int) -> None:
        self._most = most

    def __call__(self, waiting: list[TokenSequence], running: list[TokenSequence]) -> list[TokenSequence]:
        return waiting[: max(0, self._most - len(running))]


class StaticBatch:
    """Whoever waits when nothing runs makes a batch; nobody joins it before all of it has ended."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._batch: list[TokenSequence] = []

    def __call__(self, waiting: list[TokenSequence], running: list[TokenSequence]) -> list[TokenSequence]:
        if not running and not any(each in self._batch for each in waiting):
            self._batch = waiting[: self._most]
        return [each for each in waiting if each in self._batch]


def _slab(base: Settings, size: Size) -> Variant:
    """A sequence's memory is one piece, so none of it can be another's as well: without paging there is no prefix cache."""
    blocks = base.engine.hbm_blocks
    assert blocks is not None, "the list of arrivals has said how many"
    settings = replace(base, engine=replace(base.engine, prefix_cache=False), tiers=())
    return Variant(settings, lambda: Slab(blocks // size.blocks), reserved=size.blocks)


def _static(base: Settings, size: Size) -> Variant:
    del size
    return Variant(base, lambda: StaticBatch(base.engine.max_num_seqs))


def _fcfs(base: Settings, size: Size) -> Variant:
    del size
    return Variant(replace(base, engine=replace(base.engine, longest_prefix_first=False)))


def _whole(base: Settings, size: Size) -> Variant:
    """Room in one step for every prompt that may be waiting."""
    tokens = size.longest * base.engine.max_num_seqs
    return Variant(replace(base, engine=replace(base.engine, max_num_batched_tokens=tokens)))


def _recompute(base: Settings, size: Size) -> Variant:
    del size
    return Variant(replace(base, engine=replace(base.engine, preemption=Preemption.RECOMPUTE)))


IDEAS: dict[str, Callable[[Settings, Size], Variant]] = {
    "slab": _slab,
    "static-batching": _static,
    "fcfs": _fcfs,
    "no-chunking": _whole,
    "swap": _recompute,
}
"""What takes an idea's place. ``swap``: preempted sequences are computed again instead of demoted."""


class Memory:
    """The share of KV memory in use that holds real tokens, looked at between steps."""

    def __init__(self, engine: Engine, block_tokens: int, reserved: int | None) -> None:
        self._engine, self._block_tokens, self._reserved = engine, block_tokens, reserved
        self._steps = self._real = self._held = 0

    def look(self) -> None:
        self._steps += 1
        if self._steps % EVERY:
            return
        filled: dict[int, int] = {}
        running = 0
        for sequence in self._engine.sequences():
            running += bool(sequence.slots)
            for index, slot in enumerate(sequence.slots):
                tokens = min(self._block_tokens, max(0, sequence.computed - index * self._block_tokens))
                filled[slot] = max(filled.get(slot, 0), tokens)
        self._real += sum(filled.values())
        blocks = len(filled) if self._reserved is None else running * self._reserved
        self._held += blocks * self._block_tokens

    @property
    def share(self) -> float | None:
        return self._real / self._held if self._held else None


def ablate(
    settings: Settings, chosen: Sequence[str], requests: int, rate: float, scale: float, proceed: Callable[[], None]
) -> Found:
    """All ideas together, then without each of ``chosen``. ``proceed`` may raise ``Stopped``."""
    found = Found()
    listed = arrivals(Draw(2, settings.engine.seed, scale), requests, rate)
    base, size = _base(settings, listed)
    print(
        f"{requests} arrivals, {rate:g} a second, up to {size.longest} tokens, HBM of {base.engine.hbm_blocks} blocks, "
        f"steps of {base.engine.max_num_batched_tokens} tokens, seed {settings.engine.seed}",
        flush=True,
    )
    with progress(1 + len(chosen)) as step:
        try:
            for name in ("", *chosen):
                step(f"without {name}" if name else "all ideas")
                variant = IDEAS[name](base, size) if name else Variant(base)
                row, pace = _row(variant, requests, rate, scale, proceed)
                if row["failed"]:
                    found.note(f"without {name or 'nothing'}: invalid, {row['failed']} answers failed", holds=False)
                found.rows.append({"without": name or None, **row})
                if pace is not None:
                    found.note(
                        f"without {name or 'nothing'}: {pace.sentence()}", holds=pace.valid and not pace.wrong_loads
                    )
        except Stopped as stopped:
            found.stopped = stopped
    print(table(found.rows, COLUMNS))
    if "swap" in chosen and not any(row["preemptions"] for row in found.rows):
        found.note("swap: nobody had to give way, so it shows nothing; raise --rate or lower --hbm-blocks")
    elif "swap" in chosen and all(row["recompute_s"] is None for row in found.rows):
        found.note("swap: what giving way costs is known from the gate's fits; it takes --gate on and a tier")
    return found


def _base(settings: Settings, listed: Sequence[Arrival]) -> tuple[Settings, Size]:
    """Every idea on; without ``hbm_blocks`` an HBM that holds half of what could run, so that sequences have to give way."""
    engine = settings.engine
    blocks = [-(-(len(each.prompt) + each.answer) // engine.block_tokens) for each in listed]
    size = Size(max(len(each.prompt) + each.answer for each in listed), max(blocks))
    mean = sum(blocks) / len(blocks)
    half = max(int(mean * engine.max_num_seqs / 2), size.blocks + size.blocks // 4 + 1)
    preemption = Preemption.CHEAPER if engine.preemption is Preemption.RECOMPUTE else engine.preemption
    engine = replace(engine, hbm_blocks=engine.hbm_blocks or half, longest_prefix_first=True, preemption=preemption)
    return replace(settings, engine=engine), size


def _row(
    variant: Variant, requests: int, rate: float, scale: float, proceed: Callable[[], None]
) -> tuple[dict[str, object], Pace | None]:
    """The variant's figures, and how a paced model kept its time."""
    admission = None if variant.admission is None else variant.admission()
    with closing(assemble(variant.settings, admission=admission)) as assembly:
        engine, seed = assembly.engine, variant.settings.engine.seed
        drive = Drive(engine, proceed)
        drive.conversations(WORKLOADS["unique"](Draw(engine.vocab, seed + 1, 0.1)), 2)
        engine.settle(SETTLE_SECONDS)
        engine.reset_prefix_cache()
        memory = Memory(engine, variant.settings.engine.block_tokens, variant.reserved)
        listed = arrivals(Draw(engine.vocab, seed, scale), requests, rate)
        played = drive.arrivals(listed, memory.look)
        engine.settle(SETTLE_SECONDS)
        return _figures(assembly, listed, played, memory), engine.pace


def _figures(assembly: Assembly, listed: Sequence[Arrival], played: Played, memory: Memory) -> dict[str, object]:
    long = [wait for due, wait in zip(listed, played.waits, strict=True) if due.long and wait is not None]
    recomputed = sum(stats.recomputed_tokens for stats in played.stats)
    demoted = sum(stats.demoted_tokens for stats in played.stats)
    loads = sum(stats.preemptions for stats in played.stats if stats.demoted_tokens)
    metrics = assembly.metrics
    prefill = metrics.value("kvtier_gate_prefill_token_seconds")
    t0 = metrics.value("kvtier_gate_t0_seconds", tier="dram")
    bandwidth = metrics.value("kvtier_gate_bandwidth_bytes", tier="dram")
    token_bytes = assembly.engine.identity.layout.bytes_per_token
    return {
        "kv_share": memory.share,
        "tokens_per_s": played.tokens / played.seconds,
        "hit_rate": played.hit_rate,
        "itl_p99_s": percentile(played.gaps, 99),
        "ttft_p50_s": statistics.median(played.ttfts) if played.ttfts else None,
        "long_ttft_p50_s": statistics.median(long) if long else None,
        "failed": played.failed,
        "preemptions": sum(stats.preemptions for stats in played.stats),
        "recomputed_tokens": recomputed,
        "demoted_tokens": demoted,
        # Both by what the gate has fitted in this run, so that neither has another's wait in it. Blocks are saved as they
        # fill, whoever gives way later: what demotion adds is a load each time.
        "recompute_s": recomputed * prefill if prefill else None,
        "demotion_s": loads * t0 + demoted * token_bytes / bandwidth if bandwidth else None,
    }


def _number(name: str, form: str, times: float = 1.0) -> Callable[[Row], str]:
    return lambda row: "" if row[name] is None else format(times * float(str(row[name])), form)


COLUMNS: dict[str, Callable[[Row], str]] = {
    "without": lambda row: str(row["without"] or "nothing"),
    "KV share": _number("kv_share", ".1%"),
    "tokens/s": _number("tokens_per_s", ".1f"),
    "hits": _number("hit_rate", ".1%"),
    "inter-token p99 ms": _number("itl_p99_s", ".1f", 1e3),
    "TTFT p50 ms": _number("ttft_p50_s", ".1f", 1e3),
    "long prompts": _number("long_ttft_p50_s", ".1f", 1e3),
    "preempted": _number("preemptions", ".0f"),
    "recomputed ms": _number("recompute_s", ".1f", 1e3),
    "demoted ms": _number("demotion_s", ".1f", 1e3),
}
