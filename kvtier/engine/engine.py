"""The engine: requests in, tokens and text out, one step at a time.

`Engine` is synchronous. ``add_request`` and ``abort`` may be called from any thread and only leave a note; everything else
happens inside ``step``, on the one thread that runs steps. The engine's lock guards its pool and sequences: it is held
while a step is planned and while its results are noted, not while the model computes.
"""

from __future__ import annotations

import collections
import itertools
import logging
import random
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

import torch

from kvtier.abc.connector import KVConnector
from kvtier.abc.medium import SlotMedium
from kvtier.engine.block_cache import BlockCache
from kvtier.engine.exchange import ASK_SECONDS, Exchange
from kvtier.engine.model import Model, StepBatch, misfit
from kvtier.engine.prefill import PrefillTimes
from kvtier.engine.recheck import Rechecker
from kvtier.engine.recording import Recorder
from kvtier.engine.request import Completion, FinishReason, Output, Request, RequestStats
from kvtier.engine.sampler import Logprob, logprobs, sample
from kvtier.engine.scheduler import Limits, Schedule, Scheduler, Work
from kvtier.engine.sequence import Chain, Group, Sequence
from kvtier.engine.stop import StopMatcher
from kvtier.engine.tally import Pace, StepTimes, Tally
from kvtier.engine.tokenizer import Tokenizer
from kvtier.errors import RequestError
from kvtier.key import Identity, Origin, Scope, root_key
from kvtier.metrics import EngineMetrics
from kvtier.pool import BlockPool, Slot

_log = logging.getLogger(__name__)

IDLE_SECONDS = 0.002
"""How long whoever drives steps sleeps after one that could do nothing (a match or a save is under way)."""


MOST_GRACE_SECONDS, GRACE_SHARE = 0.002, 0.05
"""How long a step waits for what tiers that others share have of requests that have just come, and that as a share of the step
before: a request whose answer comes too late waits for the whole step."""


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """What an engine allows."""

    limits: Limits
    max_length: int
    """Longest sequence in tokens, prompt and generated ones together."""
    prefix_cache: bool = True
    """Find again in HBM what earlier requests filled."""
    seed: int = 0
    """Where the seeds of requests without one come from."""
    ask_seconds: float = ASK_SECONDS
    """How long a connector may answer "ask later" for one request."""
    exact: bool = False
    """Whether hits are bit-equal to cold runs on this machine, as the self-test has found."""
    recompute_sample: float = 0.0
    """Share of loads of which one block is computed again and compared; above 0 that takes a slot for itself."""
    stall_seconds: float = 60.0
    """A sequence that could get no slot for so long, because saves hold them and do not end, is given up."""


class Engine:
    """Continuous batching over a paged KV cache."""

    def __init__(
        self,
        model: Model,
        tokenizer: Tokenizer | None,
        hbm: SlotMedium,
        kv: torch.Tensor,
        pool: BlockPool,
        identity: Identity,
        config: EngineConfig,
        connector: KVConnector | None = None,
        metrics: EngineMetrics | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``kv`` is the tensor behind ``hbm``, ``[slot, layer, K/V, token, kv_head, head_dim]``, one slot per slot of ``pool``.

        Pool, medium and connector come from a door; from here on the pool belongs to the engine and to ``lock``.
        """
        block_tokens = identity.layout.block_tokens
        assert kv.shape[0] == hbm.slots == pool.capacity, (kv.shape, hbm.slots, pool.capacity)
        assert kv.shape[3] == block_tokens, (kv.shape, block_tokens)
        self.tokenizer = tokenizer
        self.identity = identity
        self.config = config
        self.pool = pool
        self.lock = threading.RLock()
        self.times = StepTimes()
        self._tally = Tally(metrics)
        self._rechecker: Rechecker | None = None
        if config.recompute_sample:
            spare = pool.allocate(1, clock())
            assert spare is not None, "the pool is new"
            self._rechecker = Rechecker(config.recompute_sample, config.seed, model, kv, spare.slots[0], self._tally)
        slots = pool.capacity - len(self._own_slots())
        self.max_length = min(config.max_length, model.config.max_positions, slots * block_tokens)
        """Longest sequence that this engine can ever hold."""
        self.recorder: Recorder | None = None
        """Who writes down what is asked; whoever sets it closes it."""
        self.progressed = False
        """Whether the last step computed anything."""
        self._model, self._hbm, self._kv, self._clock = model, hbm, kv, clock
        self._eos = frozenset(model.config.eos_ids)
        self._origin = identity.digest()
        self._cache = BlockCache(pool, block_tokens, hbm.slot_bytes, clock, reuse=config.prefix_cache)
        self._exchange = Exchange(connector, self._cache, clock, config.ask_seconds)
        self._scheduler = Scheduler(self._cache, self._exchange, config.limits, clock, self._rechecker)
        self._prefill = PrefillTimes(self._exchange.observe_prefill, behind=kv.device.type != "cpu")
        self._random = random.Random(config.seed)  # noqa: S311 - chooses words, guards nothing
        self._arrivals = itertools.count()
        self._door = threading.Lock()
        self._inbox: collections.deque[Sequence | list[Sequence]] = collections.deque()
        """What has come, and the continuations of what is to end: an id may have been given again by then."""
        self._groups: dict[str, list[Sequence]] = {}
        self._names: set[str] = set()
        """What the connector knows the continuations of open requests by."""
        self._last_progress = clock()
        self._last_step = 0.0
        self._exchange.register(hbm, misfit(kv, identity.layout))

    @property
    def has_work(self) -> bool:
        """Whether a step could do anything: requests are open, or saves still hold slots."""
        return bool(self._groups or self._inbox or self._exchange.held)

    @property
    def open_requests(self) -> int:
        return len(self._groups)

    @property
    def vocab(self) -> int:
        """Token ids are below it."""
        return self._model.config.vocab

    @property
    def pace(self) -> Pace | None:
        """How a paced model has kept its time; None for any other."""
        return self._model.pace

    @property
    def cache_fault(self) -> str | None:
        """Why the connector is not used any more; None while all is well."""
        return self._exchange.fault

    @property
    def saves_dropped(self) -> int:
        """Blocks that were filled and never taken for saving."""
        return self._exchange.dropped

    def add_request(self, request: Request) -> RequestStats:
        """Queue a request. Any thread; never waits for a step. Raises `RequestError` for what can never be served."""
        request.check(
            vocab=self.vocab,
            max_length=self.max_length,
            sequences=self.config.limits.sequences,
            spells=self.tokenizer is not None,
        )
        stats = RequestStats(len(request.prompt), self._clock())
        sampling = request.sampling
        scope = Scope(tenant=request.tenant, salt=request.salt)
        scope = replace(scope, epoch=self._exchange.epoch(scope))
        before = self._exchange.former_epoch(scope)
        former = [] if before is None else [root_key(self.identity, replace(scope, epoch=before))]
        origin = Origin.of(self._origin, scope)
        chain = Chain(origin, root_key(self.identity, scope), self._cache.block_tokens, former=former)
        tokens = list(request.prompt)
        chain.extend(tokens)
        with self._door:
            if not self._names.isdisjoint(request.names):
                raise RequestError(f"a request with the id {request.id!r} is already open, or known by the same name")
            seed = self._random.getrandbits(62) if sampling.seed is None else sampling.seed
            sequence = Sequence(
                group=Group(request, stats, seed, unfinished=sampling.n),
                index=0,
                chain=chain,
                tokens=tokens,
                arrival=(next(self._arrivals), 0),
                detokenizer=self.tokenizer.detokenizer() if self.tokenizer is not None else None,
                stops=StopMatcher(sampling.stop),
                forks=sampling.n - 1,
            )
            self._groups[request.id] = [sequence]
            self._names |= request.names
            if not sequence.hints.no_load:
                usable = (len(request.prompt) - 1) // self._cache.block_tokens
                self._exchange.expect(
                    request.id, chain.span(0, usable), len(self._cache.match(chain.addresses[:usable]))
                )
            if self.recorder is not None:
                self.recorder.came(request.id)
            self._inbox.append(sequence)
        return stats

    def abort(self, request_id: str) -> None:
        """End a request, in whatever state it is, at the next step. Any thread; unknown ids are no error."""
        with self._door:
            if request_id in self._groups:
                self._inbox.append(self._groups[request_id])

    def abort_all(self) -> None:
        """End every open request at the next step. Any thread."""
        with self._door:
            self._inbox.extend(self._groups.values())

    def step(self) -> list[Output]:
        """Plan, load, compute, sample, note. Returns what it added to each sequence; nothing where there was nothing to do."""
        began = time.perf_counter()
        self._exchange.await_answers(min(MOST_GRACE_SECONDS, GRACE_SHARE * self._last_step))
        with self.lock:
            outputs = self._read_inbox()
            self._exchange.collect()
            schedule = self._scheduler.schedule()
            plan = self._exchange.plan()
            outputs += self._give_up_stalled(schedule)
        self.progressed = bool(schedule.work)
        self._tally.queue(len(self._scheduler.running), len(self._scheduler.waiting))
        self._tally.preempted(schedule.preempted, schedule.demoted, schedule.freed)
        planned = time.perf_counter()
        self.times.plan += planned - began
        if plan.saves:  # of sequences that have just given way, or that were offered when there was nothing to compute
            self._exchange.start_saves(plan, self._hbm.fence())
        if not schedule.work:
            return outputs
        waited = self._exchange.waited
        for source, target in schedule.copies:
            self._kv[target].copy_(self._kv[source])
        self._exchange.start_loads(plan)
        work = list(schedule.work.values())
        batch = StepBatch(tuple(each.chunk() for each in work))
        logits = self._model.forward(
            batch,
            self._kv,
            before_layer=self._exchange.wait_for_layer if plan.loads else None,
            after_layer=self._exchange.layer_written if self._exchange.active else None,
        )
        written = self._hbm.fence()
        failed = self._exchange.failed(plan, frozenset(slot for each in work for slot in each.loaded))
        waited = self._exchange.waited - waited
        self._prefill.computed(work, planned, time.perf_counter(), waited, loads=bool(plan.loads))
        spoilt = self._model.wrong_loads(batch, self._kv, failed)
        failed |= spoilt
        wrong = self._judge(schedule, failed)
        computed = time.perf_counter()
        self.times.forward += computed - planned
        with self.lock:
            if schedule.recheck is not None and wrong is not None:
                self._scheduler.drop(schedule.recheck.sequence, wrong, schedule)
            outputs += self._note(work, schedule, logits, failed)
            outputs += self._end_spoilt(work, spoilt)
            plan = self._exchange.plan()
        self._tally.queue(len(self._scheduler.running), len(self._scheduler.waiting))
        self._prefill.noted()
        self._exchange.start_saves(plan, written)
        ended = time.perf_counter()
        self.times.note += ended - computed
        self._last_step = ended - began
        self.times.steps += 1
        self.times.tokens += sum(each.count for each in work)
        return outputs

    def run(self, requests: Iterable[Request]) -> list[Completion]:
        """Serve ``requests`` together, to their ends; in order of request and continuation. For scripts and tests."""
        order = {request.id: position for position, request in enumerate(requests) if self.add_request(request)}
        pieces: dict[tuple[str, int], list[Output]] = collections.defaultdict(list)
        unfinished = set(order)
        while unfinished:
            for output in self.step():
                pieces[output.request_id, output.index].append(output)
                if output.last:
                    unfinished.discard(output.request_id)
            if not self.progressed and unfinished:
                time.sleep(IDLE_SECONDS)
        ended = [Completion.of(outputs) for (request_id, _), outputs in pieces.items() if request_id in order]
        return sorted(ended, key=lambda each: (order[each.request_id], each.index))

    def settle(self, timeout: float) -> bool:
        """Run steps until no request is open and no save holds a slot; whether that was reached in ``timeout`` seconds."""
        deadline = time.monotonic() + timeout
        while self.has_work:
            if time.monotonic() > deadline:
                return False
            self.step()
            if not self.progressed:
                time.sleep(IDLE_SECONDS)
        return True

    def sequences(self) -> list[Sequence]:
        """Every unfinished sequence, to look at between steps: first those that have slots."""
        return [*self._scheduler.running, *self._scheduler.waiting]

    def reset_prefix_cache(self) -> int:
        """Drop every HBM block that no sequence and no save holds; returns how many. Tiers below keep theirs."""
        with self.lock:
            return self._cache.reset()

    def check_integrity(self) -> list[str]:
        """Disagreements between pool, block tables and saves under way, in words. Between steps only."""
        with self.lock:
            found = self._cache.check(self.sequences(), [*self._exchange.held_slots(), *self._own_slots()])
            busy = self.pool.writing + self.pool.retiring - len(self._own_slots())
            if not self._groups and busy and not self._exchange.held:
                found.append(f"idle, and {self.pool.writing} slots are in writing, {self.pool.retiring} retiring")
        return found

    def _own_slots(self) -> list[Slot]:
        """Slots that belong to no sequence and no save."""
        return [] if self._rechecker is None else [self._rechecker.spare]

    def _judge(self, schedule: Schedule, failed: frozenset[int]) -> int | None:
        """The block from which on the step's recheck distrusts its sequence; None where there is none, or it agrees."""
        if self._rechecker is None or schedule.recheck is None:
            return None
        return self._rechecker.judge(schedule.recheck, failed)

    def _read_inbox(self) -> list[Output]:
        outputs: list[Output] = []
        while self._inbox:
            note = self._inbox.popleft()
            if isinstance(note, Sequence):
                self._scheduler.add(note)
                continue
            outputs += [self._end(sequence, FinishReason.ABORT) for sequence in note if sequence.finish is None]
        return outputs

    def _give_up_stalled(self, schedule: Schedule) -> list[Output]:
        now = self._clock()
        stuck = self.sequences()
        if schedule.work or not stuck or not self._exchange.held:
            self._last_progress = now
        if now - self._last_progress < self.config.stall_seconds:
            return []
        self._last_progress = now
        sequence = min(stuck, key=lambda each: each.arrival)
        _log.error("%s got no slot for %.0f s: saves hold them and do not end", sequence.id, self.config.stall_seconds)
        return [self._end(sequence, FinishReason.ERROR)]

    def _end_spoilt(self, work: list[Work], spoilt: frozenset[int]) -> list[Output]:
        """End the requests whose model has found what was loaded for them to be wrong: no tier may give such bytes."""
        outputs: list[Output] = []
        for each in work if spoilt else ():
            if not spoilt.isdisjoint(each.loaded):
                _log.error("request %s was given a wrong block by the cache", each.sequence.id)
                outputs.append(self._end(each.sequence, FinishReason.ERROR))
        return outputs

    def _note(self, work: list[Work], schedule: Schedule, logits: torch.Tensor, failed: frozenset[int]) -> list[Output]:
        """Advance every sequence of the step; choose the next token where the last one was reached and nothing failed."""
        chosen: list[tuple[Sequence, int]] = []
        row = 0
        for each in work:
            samples = each.samples
            if self._scheduler.complete(each, failed) and samples:
                chosen += [(member, row) for member in (each.sequence, *self._fork(each.sequence))]
            row += samples
        self._scheduler.offer_leftovers(schedule.work)
        return self._choose(chosen, logits)

    def _fork(self, sequence: Sequence) -> list[Sequence]:
        if not sequence.forks:
            return []
        children = self._scheduler.fork(sequence, self.tokenizer)
        self._groups[sequence.group.request.id] += children
        return children

    def _choose(self, chosen: list[tuple[Sequence, int]], logits: torch.Tensor) -> list[Output]:
        if not chosen:
            return []
        began = time.perf_counter()
        rows = [row for _, row in chosen]
        picked = logits if rows == list(range(len(logits))) else logits[rows]
        tokens = sample(picked, [sequence.draw() for sequence, _ in chosen])
        spent = time.perf_counter() - began
        self.times.sample += spent
        self.times.note -= spent
        return [self._advance(each, picked[i], tokens[i]) for i, (each, _) in enumerate(chosen)]

    def _advance(self, sequence: Sequence, logits: torch.Tensor, token: int) -> Output:
        """Add a token to a sequence, and end it where that is its last."""
        group, sampling = sequence.group, sequence.group.request.sampling
        now = self._clock()
        if group.stats.first_token is None:
            group.stats.first_token = now
            if group.request.capture_logits:
                group.stats.first_logits = logits.clone()
            self._tally.first_token(group.stats)
            if self.recorder is not None:
                self.recorder.began(group.request.id, sequence.chain.keys[: sequence.prompt_blocks], group.stats)
        sequence.tokens.append(token)
        group.stats.completion_tokens += 1
        extra = None if sampling.logprobs is None else logprobs(logits[None], [token], sampling.logprobs)[0]
        text, finish = sequence.say(token, self._eos)
        if finish is None and (sequence.generated == sampling.max_tokens or len(sequence.tokens) >= self.max_length):
            finish = FinishReason.LENGTH
        if finish is None:
            return Output(group.request.id, sequence.index, (token,), text, group.stats, logprob=extra)
        return self._end(sequence, finish, (token,), text, extra)

    def _end(
        self,
        sequence: Sequence,
        finish: FinishReason,
        tokens: tuple[int, ...] = (),
        text: str = "",
        logprob: tuple[Logprob, list[Logprob]] | None = None,
    ) -> Output:
        """Take a sequence out of everything; its last output carries what its text still held back."""
        group = sequence.group
        sequence.finish = finish
        self._scheduler.remove(sequence)
        if finish is not FinishReason.ABORT:
            text += sequence.rest()
        group.unfinished -= 1 + sequence.forks
        sequence.forks = 0
        if not group.unfinished:
            group.stats.finished = self._clock()
            if self.recorder is not None:
                self.recorder.ended(group.request.id)
            with self._door:  # last: from here on its id may be given again
                del self._groups[group.request.id]
                self._names -= group.request.names
            self._tally.finished(group.stats, group.request.sampling.n, finish)
        return Output(
            group.request.id, sequence.index, tokens, text, group.stats, finish, not group.unfinished, logprob
        )
