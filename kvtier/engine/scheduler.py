"""Who runs in the next step, on which slots, and who has to give way.

Continuous batching with chunked prefill: a step's token budget goes to decodes first, then to prompts in order of arrival.
Where slots run out the sequence that arrived last loses its own and computes again later; what it had published it finds
again as hits. Called under the engine's lock, on the thread that runs steps.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import takewhile
from typing import TypeAlias

from kvtier.abc.store import Reason
from kvtier.config import Preemption
from kvtier.engine.attention import Chunk
from kvtier.engine.block_cache import BlockCache
from kvtier.engine.exchange import Exchange
from kvtier.engine.recheck import Recheck, Rechecker
from kvtier.engine.sequence import Sequence
from kvtier.engine.tokenizer import Tokenizer
from kvtier.pool import Slot

PATIENCE_SECONDS = 5.0
"""With longest-prefix-first: whoever has waited this long goes in order of arrival, before all others."""


Admission: TypeAlias = Callable[[list[Sequence], list[Sequence]], list[Sequence]]
"""From the waiting and the running sequences to those of the waiting that may start, in the same order."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What one step may hold."""

    tokens: int
    """New tokens of all sequences together."""
    sequences: int
    """Sequences that run at once."""
    longest_prefix_first: bool = False
    """Start waiting sequences in order of what is in HBM of them or is being computed, instead of arrival."""
    preemption: Preemption = Preemption.CHEAPER
    """What becomes of the blocks of a sequence that has to give way."""
    admission: Admission | None = None
    """Who of the waiting may start at all; None: everybody. For comparisons with other ways to batch."""

    def __post_init__(self) -> None:
        if self.tokens < 1 or self.sequences < 1:
            raise ValueError(f"a step needs room for a token and a sequence: {self}")


@dataclass(frozen=True, slots=True, eq=False)
class Work:
    """One sequence's part of a step: ``count`` tokens from position ``start``."""

    sequence: Sequence
    start: int
    count: int
    loaded: tuple[Slot, ...] = ()
    """Slots of the blocks right before ``start`` that the connector fills during this step."""

    @property
    def samples(self) -> bool:
        """Whether the step reaches the sequence's last token, so that the next one can be chosen."""
        return self.start + self.count == len(self.sequence.tokens)

    def chunk(self) -> Chunk:
        """The same as the model takes it."""
        sequence = self.sequence
        sequence.chain.extend(sequence.tokens)
        return Chunk(
            sequence.tokens[self.start : self.start + self.count],
            self.start,
            sequence.slots,
            "last" if self.samples else "none",
            sequence.chain.keys,
            len(self.loaded),
        )


@dataclass(slots=True)
class Schedule:
    """One step."""

    work: dict[int, Work] = field(default_factory=dict)
    """By ``id()`` of the sequence, in batch order."""
    copies: list[tuple[Slot, Slot]] = field(default_factory=list)
    """(from, to): partly filled blocks to copy before anything is written, in this order."""
    recheck: Recheck | None = None
    """A block that is loaded in this step and then computed again."""
    budget: int = 0
    """Tokens still to give away."""
    preempted: int = 0
    demoted: int = 0
    """Tokens of preempted sequences that the tiers below keep."""
    freed: int = 0
    """Tokens of preempted sequences that are to be computed again, where HBM does not keep them by chance."""


class Scheduler:
    """The queue, the running sequences, and the rules between them."""

    def __init__(
        self,
        cache: BlockCache,
        exchange: Exchange,
        limits: Limits,
        clock: Callable[[], float],
        rechecker: Rechecker | None = None,
    ) -> None:
        self._cache = cache
        self._exchange = exchange
        self._limits = limits
        self._clock = clock
        self._rechecker = rechecker
        self.waiting: list[Sequence] = []
        """In order of arrival."""
        self.running: list[Sequence] = []
        """In order of admission."""

    def add(self, sequence: Sequence) -> None:
        insort(self.waiting, sequence, key=_arrival)

    def schedule(self) -> Schedule:
        """Plan the next step: slots are taken, matches answered, nothing is computed yet."""
        step = Schedule(budget=self._limits.tokens)
        for sequence in sorted(self.running, key=_filling):
            if step.budget == 0:
                break
            if sequence.slots:
                self._continue(sequence, step)
        if not step.preempted:
            self._admit(step)
        return step

    def complete(self, work: Work, failed: frozenset[int]) -> bool:
        """Note what a step has done for one sequence. False: a load failed, so what was computed behind it is void."""
        sequence, size = work.sequence, self._cache.block_tokens
        if not sequence.slots:
            return False  # what it rested on was dropped in this step
        lost = next((index for index, slot in enumerate(work.loaded) if slot in failed), None)
        if lost is None:
            sequence.computed = work.start + work.count
        else:
            arrived = work.start // size - len(work.loaded) + lost
            sequence.computed = arrived * size
            sequence.offered = min(sequence.offered, arrived)
            self._note_lost(sequence, work.start - sequence.computed)
        self._cache.publish(sequence)
        self._exchange.offer(sequence)
        return lost is None

    def drop(self, wrong: Sequence, first: int, step: Schedule) -> None:
        """Forget the chain of ``wrong`` from block ``first`` on, everywhere; whoever runs on that block computes again.

        What such a sequence has computed over it goes as well. It never loads that far again: were the block given out once
        more, the rounds would have an end all the same. Between the forward pass and `complete`.
        """
        key = wrong.chain.keys[first]
        resting = [each for each in self.running if each.slots[first:] and each.chain.keys[first : first + 1] == [key]]
        for each in resting:
            self._exchange.drop(each.chain.span(first, len(each.chain.keys)), Reason.RECOMPUTED_DIFFERENTLY)
            self._cache.drop(each.chain.addresses[first:])
        for each in resting:
            work = step.work.get(id(each))
            each.group.stats.failed_tokens += len(work.loaded) * self._cache.block_tokens if work else 0
            each.admitted &= each.group.stats.first_token is not None or bool(each.group.stats.preemptions)
            each.offered = min(each.offered, first)
            each.trusted = first if each.trusted is None else min(each.trusted, first)
            self.running.remove(each)
            self._cache.free(each)
            self.add(each)

    def offer_leftovers(self, served: dict[int, Work]) -> None:
        """Offer again what was not taken earlier, for running sequences outside ``served``."""
        for sequence in self.running:
            if sequence.offered < sequence.committed and id(sequence) not in served:
                self._exchange.offer(sequence)

    def fork(self, sequence: Sequence, tokenizer: Tokenizer | None) -> list[Sequence]:
        """Split the continuations off that ``sequence`` still stands for; they share all of its blocks."""
        children = [sequence.fork(index, tokenizer) for index in range(1, sequence.forks + 1)]
        for child in children:
            self._cache.share(child.slots)
        sequence.tail_shared = bool(children)
        sequence.forks = 0
        self.running += children
        return children

    def remove(self, sequence: Sequence) -> None:
        """Take an ended sequence out, wherever it is, and let its slots go."""
        (self.running if sequence in self.running else self.waiting).remove(sequence)
        self._exchange.finished(sequence)
        self._cache.free(sequence)

    def _continue(self, sequence: Sequence, step: Schedule) -> None:
        count = min(sequence.remaining, step.budget)
        fresh = self._slots_for(sequence, count, step)
        if fresh is None:
            return
        if not self._cache.own_tail(sequence):
            index = sequence.computed // self._cache.block_tokens
            shared, sequence.slots[index] = sequence.slots[index], fresh.pop()
            step.copies.append((shared, sequence.slots[index]))
            self._cache.release([shared])
        sequence.tail_shared = False
        sequence.slots += fresh
        step.work[id(sequence)] = Work(sequence, sequence.computed, count)
        step.budget -= count

    def _slots_for(self, sequence: Sequence, count: int, step: Schedule) -> list[Slot] | None:
        """Slots that ``count`` more tokens need, from others if it must be; None where the sequence cannot go on now."""
        while True:
            # A sequence whose load failed has more slots than it has computed tokens for.
            needed = max(0, self._cache.blocks(sequence.computed + count) - len(sequence.slots))
            needed += int(not self._cache.own_tail(sequence))
            fresh = self._cache.allocate(needed) if needed else []
            if fresh is not None:
                return fresh
            if len(self.running) == 1:
                return None  # only saves under way can be in the way: they end
            victim = max(self.running, key=_arrival)
            self._preempt(victim, step)
            if victim is sequence:
                return None

    def _preempt(self, victim: Sequence, step: Schedule) -> None:
        taken = step.work.pop(id(victim), None)
        if taken is not None:
            step.budget += taken.count
        step.preempted += 1
        victim.group.stats.preemptions += 1
        demoted = self._demoted(victim)
        victim.group.stats.demoted_tokens += demoted
        step.demoted += demoted
        step.freed += victim.computed - demoted
        self.running.remove(victim)
        self._cache.free(victim)
        self.add(victim)

    def _demoted(self, victim: Sequence) -> int:
        """Leave the blocks of a sequence that gives way to the tiers below, where that costs less than computing them again.

        Returns the tokens of those that are there or on their way. What saves under way may not hold as well is lost.
        """
        mode = self._limits.preemption
        victim.recompute = mode is Preemption.RECOMPUTE
        if not victim.committed or not self._exchange.active or victim.hints.no_store or victim.recompute:
            return 0
        if mode is Preemption.CHEAPER and not self._exchange.demotes(victim):
            return 0
        self._exchange.offer(victim)
        return victim.offered * self._cache.block_tokens

    def _admit(self, step: Schedule) -> None:
        for sequence in self._queue():
            seats = sum(other.seats for other in self.running)
            if step.budget == 0 or seats + sequence.seats > self._limits.sequences:
                break
            usable = (len(sequence.tokens) - 1) // self._cache.block_tokens
            sequence.chain.extend(sequence.tokens)
            hits = self._cache.match(sequence.chain.addresses[:usable])
            wanted = 0 if sequence.recompute else usable
            loadable = self._exchange.match(sequence, sequence.chain.span(0, wanted), min(len(hits), wanted))
            if loadable is None:
                continue
            if sequence.trusted is not None:
                loadable = max(0, min(loadable, sequence.trusted - len(hits)))
            drawn = self._rechecker is not None and loadable > 0 and self._rechecker.draws(sequence)
            if drawn and step.recheck is not None:
                continue  # one a step: its turn comes with the next
            if not self._start(sequence, hits, loadable, step):
                break
            if drawn and self._rechecker is not None:
                step.recheck = self._rechecker.choose(sequence, len(hits), len(hits) + loadable)

    def _queue(self) -> Iterable[Sequence]:
        admission = self._limits.admission
        waiting = list(self.waiting) if admission is None else admission(self.waiting, self.running)
        if not self._limits.longest_prefix_first:
            return waiting
        late = self._clock() - PATIENCE_SECONDS
        coming = {address for each in self.running for address in each.chain.addresses}

        def rank(sequence: Sequence) -> tuple[int, tuple[int, int]]:
            if sequence.group.stats.submitted < late:
                return -(1 << 40), sequence.arrival
            sequence.chain.extend(sequence.tokens)
            addresses = sequence.chain.addresses
            shared = sum(1 for _ in takewhile(coming.__contains__, addresses))
            return -max(shared, len(self._cache.match(addresses))), sequence.arrival

        return sorted(waiting, key=rank)

    def _start(self, sequence: Sequence, hits: list[Slot], loadable: int, step: Schedule) -> bool:
        """Admit ``sequence``, or leave everything as it was where its whole text would not fit beside the running ones."""
        cache = self._cache
        start = (len(hits) + loadable) * cache.block_tokens
        count = min(len(sequence.tokens) - start, step.budget)
        cache.acquire(hits)
        whole = cache.blocks(len(sequence.tokens)) - len(hits)
        fits = cache.available >= whole + len(self.running)
        fresh = cache.allocate(cache.blocks(start + count) - len(hits)) if fits else None
        if fresh is None:
            cache.release(hits)
            return False
        loaded = tuple(fresh[:loadable])
        self._exchange.allocated(sequence, loaded)
        sequence.slots = [*hits, *fresh]
        sequence.computed, sequence.committed = start, len(hits)
        known = 0 if sequence.hints.pin_seconds else len(hits) + loadable  # what is to be pinned has to be below
        sequence.offered = min(sequence.offered, known) if sequence.admitted else known
        self._note_admission(sequence, len(hits) * cache.block_tokens, start)
        self.waiting.remove(sequence)
        self.running.append(sequence)
        sequence.drawn = None
        step.work[id(sequence)] = Work(sequence, start, count, loaded)
        step.budget -= count
        return True

    def _note_admission(self, sequence: Sequence, hbm: int, start: int) -> None:
        stats = sequence.group.stats
        if sequence.admitted:
            stats.recomputed_tokens += len(sequence.tokens) - start
            return
        sequence.admitted = True
        stats.scheduled = self._clock()
        stats.hbm_tokens, stats.external_tokens = hbm, start - hbm
        stats.computed_tokens = stats.prompt_tokens - start

    def _note_lost(self, sequence: Sequence, tokens: int) -> None:
        stats = sequence.group.stats
        stats.failed_tokens += tokens
        if stats.first_token is None and not stats.preemptions:
            stats.external_tokens -= tokens
            stats.computed_tokens += tokens
        else:
            stats.recomputed_tokens += tokens


def _arrival(sequence: Sequence) -> tuple[int, int]:
    return sequence.arrival


def _filling(sequence: Sequence) -> bool:
    return sequence.remaining > 1
