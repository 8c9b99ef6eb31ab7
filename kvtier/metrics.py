"""Counters, gauges and histograms of one store and one engine, in Prometheus form.

Each ``Metrics`` has a registry of its own, so two stores in a process never mix. Nothing here raises: a value that makes no
sense (a negative increment, a NaN) changes nothing, is counted in ``kvtier_metric_faults_total`` and logged once. Hits and
misses are given together, once per settled match, and lookups are their sum, so a hit rate cannot lie.
"""

from __future__ import annotations

import enum
import functools
import logging
import math
import threading
from collections.abc import Callable, Mapping
from typing import Concatenate, ParamSpec, TypeAlias, TypeVar

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

_log = logging.getLogger(__name__)

Label: TypeAlias = "str | enum.Enum"
"""A label's value; of an enum member, its name in lower case."""

P = ParamSpec("P")
S = TypeVar("S", bound="_Recorder")

_STEP_SECONDS = (0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1.0, 2.5, 5.0)
_FIRST_TOKEN_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0)
_TRANSFER_SECONDS = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)


def _text(label: Label) -> str:
    return label.name.lower() if isinstance(label, enum.Enum) else label


class _Recorder:
    """Holds the fault counter that ``_never_raises`` needs."""

    def __init__(self, faults: Counter) -> None:
        self._faults = faults
        self._complained = False

    def _fault(self, method: str, wrong: Exception) -> None:
        self._faults.inc()
        if not self._complained:
            self._complained = True
            _log.warning("metric dropped in %s: %s (further ones are only counted)", method, wrong)


def _never_raises(method: Callable[Concatenate[S, P], None]) -> Callable[Concatenate[S, P], None]:
    @functools.wraps(method)
    def guarded(self: S, /, *args: P.args, **kwargs: P.kwargs) -> None:
        try:
            method(self, *args, **kwargs)
        except Exception as wrong:  # noqa: BLE001 - statistics may not fail what they count
            self._fault(method.__name__, wrong)

    return guarded


def _checked(*amounts: float) -> None:
    for amount in amounts:
        if not (math.isfinite(amount) and amount >= 0):
            raise ValueError(f"not an amount: {amount!r}")


class TierMetrics(_Recorder):
    """What one tier counts. Safe from any thread."""

    def __init__(self, metrics: Metrics, tier: str) -> None:
        super().__init__(metrics.faults)
        self._metrics = metrics
        self.tier = tier
        for counter in (metrics.lookups, metrics.hits, metrics.read_bytes, metrics.written_bytes, metrics.sum_failures):
            counter.labels(tier)
        metrics.degraded.labels(tier)

    @_never_raises
    def settled(self, hits: int, misses: Mapping[Label, int]) -> None:
        """One match has settled: blocks that this tier gave, and those that it was asked for and did not, by reason."""
        _checked(hits, *misses.values())
        self._metrics.lookups.labels(self.tier).inc(hits + sum(misses.values()))
        self._metrics.hits.labels(self.tier).inc(hits)
        for reason, count in misses.items():
            self._metrics.misses.labels(self.tier, _text(reason)).inc(count)

    @_never_raises
    def read(self, blocks: int, nbytes: int, seconds: float) -> None:
        """A batch of blocks came out of this tier and proved."""
        _checked(blocks, nbytes, seconds)
        self._metrics.read_blocks.labels(self.tier).inc(blocks)
        self._metrics.read_bytes.labels(self.tier).inc(nbytes)
        self._metrics.transfer_seconds.labels(self.tier, "read").observe(seconds)

    @_never_raises
    def written(self, blocks: int, nbytes: int, seconds: float) -> None:
        """A batch of blocks went into this tier and was committed."""
        _checked(blocks, nbytes, seconds)
        self._metrics.written_blocks.labels(self.tier).inc(blocks)
        self._metrics.written_bytes.labels(self.tier).inc(nbytes)
        self._metrics.transfer_seconds.labels(self.tier, "write").observe(seconds)

    @_never_raises
    def evicted(self, reason: Label, blocks: int = 1) -> None:
        """Blocks left this tier."""
        _checked(blocks)
        self._metrics.evictions.labels(self.tier, _text(reason)).inc(blocks)

    @_never_raises
    def save_dropped(self, reason: Label, blocks: int = 1) -> None:
        """Blocks were offered to this tier and not kept."""
        _checked(blocks)
        self._metrics.saves_dropped.labels(self.tier, _text(reason)).inc(blocks)

    @_never_raises
    def offered(self, verdict: Label, left: float | None) -> None:
        """A block was offered to this tier; ``left``: bytes of its write budget, None where it has none."""
        self._metrics.offers.labels(self.tier, _text(verdict)).inc()
        if left is not None:
            _checked(left)
            self._metrics.write_budget_left.labels(self.tier).set(left)

    @_never_raises
    def regretted(self, regret: Label, blocks: int) -> None:
        """Decisions to take or to decline blocks turned out wrong."""
        _checked(blocks)
        self._metrics.regrets.labels(self.tier, _text(regret)).inc(blocks)

    @_never_raises
    def sum_failed(self, blocks: int = 1) -> None:
        """Blocks came out of this tier and did not prove."""
        _checked(blocks)
        self._metrics.sum_failures.labels(self.tier).inc(blocks)

    @_never_raises
    def failed(self, verb: str, items: int = 1) -> None:
        """The medium failed at ``verb`` (read, write, probe, delete)."""
        _checked(items)
        self._metrics.failures.labels(self.tier, verb).inc(items)

    @_never_raises
    def queued(self, kind: str, depth: int) -> None:
        """Transfers of a ``kind`` (load, prefetch, save) that now wait for a thread."""
        _checked(depth)
        self._metrics.queue_depth.labels(self.tier, kind).set(depth)

    @_never_raises
    def leased(self, matches: int, blocks: int) -> None:
        """Matches that are live now, and blocks that they hold or wait for."""
        _checked(matches, blocks)
        self._metrics.matches.labels(self.tier).set(matches)
        self._metrics.leased_blocks.labels(self.tier).set(blocks)

    @_never_raises
    def pins_refused(self, blocks: int) -> None:
        """Blocks were to be pinned beyond the share of the tier that pins may take."""
        _checked(blocks)
        self._metrics.pins_refused.labels(self.tier).inc(blocks)

    @_never_raises
    def pinned(self, blocks: int) -> None:
        """Blocks that are pinned now."""
        _checked(blocks)
        self._metrics.pinned_blocks.labels(self.tier).set(blocks)

    def chose(self, *, current: str, switches: int, references: int, hits: Mapping[str, float]) -> None:
        """As `PolicyMetrics.chose`."""
        self._metrics.policy.chose(self.tier, current=current, switches=switches, references=references, hits=hits)

    @_never_raises
    def set_degraded(self, degraded: bool) -> None:
        """Whether the tier is out of use for now."""
        self._metrics.degraded.labels(self.tier).set(int(degraded))

    @_never_raises
    def blocks(self, *, free: int, writing: int, ready: int, retiring: int) -> None:
        """The tier's slots by state; together they are its capacity."""
        states = {"free": free, "writing": writing, "ready": ready, "retiring": retiring}
        _checked(*states.values())
        for state, count in states.items():
            self._metrics.blocks.labels(self.tier, state).set(count)


class GateMetrics(_Recorder):
    """What the gate counts. Safe from any thread."""

    def __init__(self, metrics: Metrics) -> None:
        super().__init__(metrics.faults)
        self._metrics = metrics

    @_never_raises
    def decided(self, tier: str, verdict: str, tokens: int) -> None:
        """A run of blocks was ``admitted`` or ``declined``, or is ``tried``: loaded, or read in the background, to learn."""
        _checked(tokens)
        self._metrics.gate_runs.labels(tier, verdict).inc()
        self._metrics.gate_tokens.labels(tier, verdict).inc(tokens)

    @_never_raises
    def fitted(self, tier: str, t0: float, bandwidth: float) -> None:
        """What loads from a tier take now: seconds, and bytes per second."""
        _checked(t0, bandwidth)
        self._metrics.gate_t0.labels(tier).set(t0)
        self._metrics.gate_bandwidth.labels(tier).set(bandwidth)

    @_never_raises
    def prefill(self, seconds: float) -> None:
        """What computing a token takes now."""
        _checked(seconds)
        self._metrics.gate_prefill_seconds.set(seconds)


class PolicyMetrics(_Recorder):
    """What policies say that choose among others. Safe from any thread."""

    def __init__(self, metrics: Metrics) -> None:
        super().__init__(metrics.faults)
        self._metrics = metrics
        self._lock = threading.Lock()
        self._told: dict[Counter, float] = {}

    @_never_raises
    def chose(self, tier: str, *, current: str, switches: int, references: int, hits: Mapping[str, float]) -> None:
        """Which of the policies named in ``hits`` decides now in ``tier``; the numbers are all there were so far."""
        _checked(switches, references, *hits.values())
        so_far: dict[Counter, float] = {
            self._metrics.policy_switches.labels(tier): switches,
            self._metrics.policy_references.labels(tier): references,
            **{self._metrics.policy_shadow_hits.labels(tier, name): hit for name, hit in hits.items()},
        }
        with self._lock:
            for counter, amount in so_far.items():
                counter.inc(max(0.0, amount - self._told.get(counter, 0.0)))
                self._told[counter] = amount
        for name in hits:
            self._metrics.policy_current.labels(tier, name).set(int(name == current))


class EngineMetrics(_Recorder):
    """What the engine counts. Safe from any thread."""

    def __init__(self, metrics: Metrics) -> None:
        super().__init__(metrics.faults)
        self._metrics = metrics

    @_never_raises
    def queue(self, *, running: int, waiting: int) -> None:
        """Requests that now run and that now wait."""
        _checked(running, waiting)
        self._metrics.requests_running.set(running)
        self._metrics.requests_waiting.set(waiting)

    @_never_raises
    def finished(self, outcome: Label) -> None:
        """A request ended: ``stop``, ``length``, ``abort`` or ``error``."""
        self._metrics.requests.labels(_text(outcome)).inc()

    @_never_raises
    def prompt_tokens(self, source: str, tokens: int) -> None:
        """Prompt tokens by where their KV came from: ``computed``, ``hbm`` or a tier's name. Once per token."""
        _checked(tokens)
        self._metrics.prompt_tokens.labels(source).inc(tokens)

    @_never_raises
    def generated(self, tokens: int = 1) -> None:
        """Tokens sampled."""
        _checked(tokens)
        self._metrics.generated_tokens.inc(tokens)

    @_never_raises
    def preempted(self, requests: int = 1) -> None:
        """Running requests gave up their HBM slots."""
        _checked(requests)
        self._metrics.preemptions.inc(requests)

    @_never_raises
    def preempted_tokens(self, *, demoted: int, freed: int) -> None:
        """Tokens of requests that gave up their HBM slots: left to the tiers below, and left to be computed again."""
        _checked(demoted, freed)
        self._metrics.preempted_tokens.labels("demoted").inc(demoted)
        self._metrics.preempted_tokens.labels("freed").inc(freed)

    @_never_raises
    def rechecked(self, *, differed: bool) -> None:
        """A loaded block was computed again."""
        self._metrics.rechecks.inc()
        self._metrics.recheck_mismatches.inc(int(differed))

    @_never_raises
    def first_token(self, seconds: float) -> None:
        """From submission to the first token."""
        _checked(seconds)
        self._metrics.first_token_seconds.observe(seconds)

    @_never_raises
    def next_token(self, seconds: float) -> None:
        """From one token of a request to its next."""
        _checked(seconds)
        self._metrics.inter_token_seconds.observe(seconds)


class Metrics:
    """One registry with everything declared in it."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.faults = self._counter("kvtier_metric_faults", "Observations that made no sense and were dropped")

        self.lookups = self._counter("kvtier_tier_lookups", "Blocks that settled matches asked the tier for", "tier")
        self.hits = self._counter("kvtier_tier_hits", "Blocks that settled matches got from the tier", "tier")
        self.misses = self._counter("kvtier_tier_misses", "Blocks asked for and not got, by reason", "tier", "reason")
        self.read_blocks = self._counter("kvtier_tier_read_blocks", "Blocks read and proved", "tier")
        self.read_bytes = self._counter("kvtier_tier_read_bytes", "Bytes of blocks read and proved", "tier")
        self.written_blocks = self._counter("kvtier_tier_written_blocks", "Blocks written and committed", "tier")
        self.written_bytes = self._counter("kvtier_tier_written_bytes", "Bytes of blocks written and committed", "tier")
        self.evictions = self._counter(
            "kvtier_tier_evictions", "Blocks that left the tier, by reason", "tier", "reason"
        )
        self.offers = self._counter(
            "kvtier_tier_offers", "Blocks offered to a tier that chooses, by verdict", "tier", "verdict"
        )
        self.regrets = self._counter(
            "kvtier_tier_regrets", "Blocks declined and then wanted, or written and never read", "tier", "regret"
        )
        self.write_budget_left = self._gauge(
            "kvtier_tier_write_budget_left_bytes", "Bytes that the write budget allows at once", "tier"
        )
        self.saves_dropped = self._counter("kvtier_tier_saves_dropped", "Blocks not kept, by reason", "tier", "reason")
        self.sum_failures = self._counter("kvtier_tier_sum_failures", "Blocks read that did not prove", "tier")
        self.failures = self._counter("kvtier_tier_failures", "Items the medium failed at, by verb", "tier", "verb")
        self.queue_depth = self._gauge("kvtier_tier_queue_depth", "Transfers waiting for a thread", "tier", "kind")
        self.matches = self._gauge("kvtier_tier_matches", "Matches that are live", "tier")
        self.leased_blocks = self._gauge("kvtier_tier_leased_blocks", "Blocks that matches hold or wait for", "tier")
        self.pins_refused = self._counter(
            "kvtier_tier_pins_refused", "Blocks not pinned because pins have their share of the tier", "tier"
        )
        self.pinned_blocks = self._gauge("kvtier_tier_pinned_blocks", "Blocks that are pinned", "tier")
        self.degraded = self._gauge("kvtier_tier_degraded", "1 while the tier is out of use", "tier")
        self.blocks = self._gauge("kvtier_tier_blocks", "Slots by state; their sum is the capacity", "tier", "state")
        self.transfer_seconds = self._histogram(
            "kvtier_tier_transfer_seconds", "Time of one batch, queueing excluded", _TRANSFER_SECONDS, "tier", "verb"
        )

        self.gate_runs = self._counter(
            "kvtier_gate_runs", "Runs of blocks by verdict: admitted, declined, tried", "tier", "verdict"
        )
        self.gate_tokens = self._counter(
            "kvtier_gate_tokens", "Tokens of those runs; declined ones are computed on purpose", "tier", "verdict"
        )
        self.gate_t0 = self._gauge("kvtier_gate_t0_seconds", "Fitted: time of a load before its first byte", "tier")
        self.gate_bandwidth = self._gauge("kvtier_gate_bandwidth_bytes", "Fitted: bytes per second of a load", "tier")
        self.gate_prefill_seconds = self._gauge("kvtier_gate_prefill_token_seconds", "Fitted: time to compute a token")

        self.policy_current = self._gauge(
            "kvtier_policy_current",
            "1 for the policy that decides, 0 for the others that adaptive has",
            "tier",
            "policy",
        )
        self.policy_switches = self._counter("kvtier_policy_switches", "Times that another policy took over", "tier")
        self.policy_references = self._counter(
            "kvtier_policy_references", "Blocks asked for, as shadow hits are counted", "tier"
        )
        self.policy_shadow_hits = self._counter(
            "kvtier_policy_shadow_hits", "Blocks that each policy would have hit alone", "tier", "policy"
        )

        self.requests = self._counter("kvtier_requests", "Requests that ended, by outcome", "outcome")
        self.requests_running = self._gauge("kvtier_requests_running", "Requests that run now")
        self.requests_waiting = self._gauge("kvtier_requests_waiting", "Requests that wait now")
        self.prompt_tokens = self._counter("kvtier_prompt_tokens", "Prompt tokens by source of their KV", "source")
        self.generated_tokens = self._counter("kvtier_generated_tokens", "Tokens sampled")
        self.preemptions = self._counter("kvtier_preemptions", "Running requests that gave up their HBM slots")
        self.preempted_tokens = self._counter(
            "kvtier_preempted_tokens", "Tokens of those requests: demoted to the tiers below, or freed", "fate"
        )
        self.rechecks = self._counter("kvtier_rechecks", "Loaded blocks that were computed again and compared")
        self.recheck_mismatches = self._counter("kvtier_recheck_mismatches", "Rechecked blocks that differed")
        self.first_token_seconds = self._histogram(
            "kvtier_first_token_seconds", "From submission to the first token", _FIRST_TOKEN_SECONDS
        )
        self.inter_token_seconds = self._histogram(
            "kvtier_inter_token_seconds", "From one token of a request to its next", _STEP_SECONDS
        )
        self.engine = EngineMetrics(self)
        self.gate = GateMetrics(self)
        self.policy = PolicyMetrics(self)
        self._tiers: dict[str, TierMetrics] = {}

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(name, text, labels, registry=self.registry)

    def _gauge(self, name: str, text: str, *labels: str) -> Gauge:
        return Gauge(name, text, labels, registry=self.registry)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...], *labels: str) -> Histogram:
        return Histogram(name, text, labels, registry=self.registry, buckets=buckets)

    def tier(self, name: str) -> TierMetrics:
        """The one recorder of the tier called ``name``."""
        return self._tiers.setdefault(name, TierMetrics(self, name))

    def value(self, name: str, **labels: str) -> float:
        """The present value of a sample by its exposed name (``kvtier_tier_hits_total``); 0 where nothing was recorded."""
        return self.registry.get_sample_value(name, labels) or 0.0

    def render(self) -> bytes:
        """Everything in the Prometheus text format, for ``/metrics``."""
        return generate_latest(self.registry)
