"""Builders for the engine's tests, and a small connector that really works and can be told to misbehave."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace

import torch

from kvtier.abc.connector import (
    Finished,
    KVConnector,
    LoadPlan,
    SavePlan,
    SchedulerConnector,
    StepPlan,
    WorkerConnector,
)
from kvtier.abc.medium import SlotMedium
from kvtier.abc.store import NO_HINTS, Fence, Hints, Reason
from kvtier.config import Preemption
from kvtier.engine.architecture import ModelConfig, random_tensors
from kvtier.engine.engine import Engine, EngineConfig
from kvtier.engine.model import LlamaModel
from kvtier.engine.request import Output, Request
from kvtier.engine.sampler import SamplingParams, continuation_seed
from kvtier.engine.scheduler import Limits
from kvtier.engine.tokenizer import Tokenizer, TokenizerSource, Vocabulary
from kvtier.key import BlockKey, Identity, Span
from kvtier.layout import Layout
from kvtier.metrics import EngineMetrics
from kvtier.policy.lru import LruPolicy
from kvtier.pool import BlockPool
from kvtier.storage_backends.hbm import HbmMedium

BLOCK = 4
CONFIG = ModelConfig(
    name="tiny",
    layers=2,
    hidden=32,
    heads=4,
    kv_heads=2,
    head_dim=8,
    intermediate=48,
    vocab=258,
    rms_eps=1e-5,
    rope_theta=10000.0,
    max_positions=512,
    tie_embeddings=False,
    dtype="fp32",
    eos_ids=(257,),
)
TEMPLATE = (
    "{% for message in messages %}<{{ message.role }}>{{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def make_tokenizer(template: str = TEMPLATE) -> Tokenizer:
    """One token per byte, and two control tokens."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    alphabet = {byte: chr(byte) for byte in printable} | {byte: chr(256 + i) for i, byte in enumerate(others)}
    tokens = (*(alphabet[byte] for byte in range(256)), "<|start|>", "<|end|>")
    return Tokenizer(TokenizerSource(Vocabulary("gpt-2", tokens, (), frozenset({256, 257})), template))


_MODEL: list[LlamaModel] = []


def _louder(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """Layers that outshout the embedding: with 4, one changed prompt token changes what is generated in 35 of 36 tries."""
    return tensor * 4 if "_proj" in name else tensor


def tiny_model() -> LlamaModel:
    if not _MODEL:
        _MODEL.append(
            LlamaModel(CONFIG, {name: _louder(name, each) for name, each in random_tensors(CONFIG, 7).items()})
        )
    return _MODEL[0]


def make_engine(
    blocks: int = 64,
    *,
    connector: KVConnector | None = None,
    tokens: int = 64,
    sequences: int = 8,
    prefix_cache: bool = True,
    kv_dtype: str = "fp32",
    longest_prefix_first: bool = False,
    preemption: Preemption = Preemption.CHEAPER,
    clock: Callable[[], float] = time.monotonic,
    ask_seconds: float = 30.0,
    stall_seconds: float = 60.0,
    recompute_sample: float = 0.0,
    metrics: EngineMetrics | None = None,
    template: str = TEMPLATE,
    layout: Layout | None = None,
) -> Engine:
    """``layout``: what the identity says, where that is not what the memory has."""
    shape = (CONFIG.layers, 2, BLOCK, CONFIG.kv_heads, CONFIG.head_dim)
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[kv_dtype]
    hbm = HbmMedium.allocate(blocks, shape, dtype)
    return Engine(
        tiny_model(),
        make_tokenizer(template),
        hbm,
        hbm.tensor,
        BlockPool(blocks, LruPolicy(blocks)),
        Identity(CONFIG.name, "seed-7", kv_dtype, layout or CONFIG.layout(BLOCK, kv_dtype)),
        EngineConfig(
            Limits(tokens, sequences, longest_prefix_first, preemption),
            max_length=512,
            prefix_cache=prefix_cache,
            ask_seconds=ask_seconds,
            stall_seconds=stall_seconds,
            recompute_sample=recompute_sample,
        ),
        connector,
        metrics,
        clock,
    )


def greedy(name: str, prompt: Sequence[int], tokens: int = 8, **more: object) -> Request:
    sampling = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
    return Request(name, tuple(prompt), sampling, **more)  # type: ignore[arg-type]


def prompt(seed: int, length: int) -> tuple[int, ...]:
    rng = random.Random(seed)
    return tuple(rng.randrange(256) for _ in range(length))


def expected(requests: Sequence[Request]) -> dict[str, list[tuple[int, ...]]]:
    """What each continuation gives alone: a request of its own, in an engine without any cache."""
    return {request.id: [_alone(request, index) for index in range(request.sampling.n)] for request in requests}


def _alone(request: Request, index: int) -> tuple[int, ...]:
    seed = request.sampling.seed
    sampling = replace(request.sampling, n=1, seed=None if seed is None else continuation_seed(seed, index))
    engine = make_engine(128, prefix_cache=False, tokens=512)
    return engine.run([replace(request, sampling=sampling)])[0].tokens


@dataclass
class Faults:
    """How a `DictConnector` misbehaves. Everything is drawn from ``seed``."""

    seed: int = 0
    fail_loads: float = 0.0
    """Share of blocks whose load fails, leaving garbage."""
    wrong_loads: float = 0.0
    """Share of blocks that arrive with other bytes than were saved, unnoticed."""
    ask_later: int = 0
    """Up to how often a match answers "ask later" before it settles."""
    never_answer: float = 0.0
    """Share of requests whose match never settles."""
    save_ticks: int = 0
    """Up to how many polls a save takes; it reads its slots only at its end."""
    save_cap: int = 64
    """Slots that saves may hold at once."""
    raise_in: str = ""
    """Name of a verb that raises."""


@dataclass
class DictConnector(KVConnector):
    """Blocks in a dict. Keeps books of what it was asked, so that a test can demand that every transfer ended once."""

    faults: Faults = field(default_factory=Faults)
    blocks: dict[BlockKey, bytes] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.random = random.Random(self.faults.seed)
        self._scheduler = _Scheduler(self)
        self._worker = _Worker(self)

    @property
    def scheduler(self) -> _Scheduler:
        return self._scheduler

    @property
    def worker(self) -> _Worker:
        return self._worker

    def verb(self, name: str) -> None:
        if name == self.faults.raise_in:
            raise OSError(f"{name} is broken")

    def idle(self) -> list[str]:
        """What is left over although no request is open, in words."""
        found = [f"match of {each} is live" for each in self._scheduler.matches]
        found += [f"save for {each.request_id} runs" for each, _ in self._worker.saving]
        if self._scheduler.loads or self._scheduler.saves or self._scheduler.busy:
            found.append("plans were never fetched, or slots count as busy")
        return found


class _Scheduler(SchedulerConnector):
    def __init__(self, owner: DictConnector) -> None:
        self.owner = owner
        self.matches: dict[str, tuple[Span, int, int | None]] = {}
        """Request -> span, computed blocks, asks left before it settles (None: never)."""
        self.loads: list[LoadPlan] = []
        self.saves: list[SavePlan] = []
        self.busy = 0
        self.asked = 0
        self.expected: list[tuple[str, int, int]] = []
        """Requests that came, the blocks of their prompts, and those of them that the engine had."""
        self.answer: Future[None] | None = None
        """To what comes: when something is known of it."""
        self.hints: list[tuple[str, int, Hints]] = []
        """What matches (with their blocks) and offers (with theirs) came with, in order."""

    def get_num_new_matched_tokens(
        self, request_id: str, span: Span, computed_blocks: int = 0, hints: Hints = NO_HINTS
    ) -> int | None:
        self.owner.verb("get_num_new_matched_tokens")
        self.asked += 1
        assert span.depth == 0 and computed_blocks <= len(span)
        self.hints.append(("match", len(span), hints))
        faults, rng = self.owner.faults, self.owner.random
        assert self.matches.get(request_id, (span, computed_blocks))[1] == computed_blocks, "a live match cannot move"
        if request_id not in self.matches:
            left = None if rng.random() < faults.never_answer else rng.randint(0, faults.ask_later)
        else:
            left = self.matches[request_id][2]
        self.matches[request_id] = (span, computed_blocks, left - 1 if left else left)
        if left is None or left > 0:
            return None
        found = 0
        for key in span.keys[computed_blocks:]:
            if key not in self.owner.blocks:
                break
            found += 1
        return found * BLOCK

    def expect(self, request_id: str, span: Span, computed_blocks: int = 0) -> Future[None] | None:
        self.owner.verb("expect")
        assert span.depth == 0
        self.expected.append((request_id, len(span), computed_blocks))
        return self.answer

    def update_state_after_alloc(self, request_id: str, slots: Sequence[int], num_tokens: int) -> None:
        self.owner.verb("update_state_after_alloc")
        span, start, _ = self.matches.pop(request_id, (None, 0, None))
        assert num_tokens == len(slots) * BLOCK
        if slots:
            assert span is not None, "a load without a match"
            self.loads.append(LoadPlan(request_id, span, tuple(slots), start))

    def offer(self, request_id: str, span: Span, slots: Sequence[int], hints: Hints = NO_HINTS) -> int:
        self.owner.verb("offer")
        assert len(span) == len(slots) > 0
        self.hints.append(("offer", len(span), hints))
        taken = min(len(slots), self.owner.faults.save_cap - self.busy)
        if taken > 0:
            self.saves.append(SavePlan(request_id, span.head(taken), tuple(slots[:taken]), hints))
            self.busy += taken
        return max(taken, 0)

    def build_connector_meta(self) -> StepPlan:
        self.owner.verb("build_connector_meta")
        plan = StepPlan(tuple(self.loads), tuple(self.saves))
        self.loads, self.saves = [], []
        return plan

    def update_connector_output(self, finished: Finished) -> None:
        self.busy -= sum(len(slots) for _, slots in finished.saved)

    def drop(self, span: Span, reason: Reason) -> None:
        self.owner.verb("drop")
        for key in span.keys:
            self.owner.blocks.pop(key, None)

    def request_finished(self, request_id: str) -> bool:
        self.owner.verb("request_finished")
        self.matches.pop(request_id, None)
        return any(save.request_id == request_id for save, _ in self.owner.worker.saving)


class _Worker(WorkerConnector):
    def __init__(self, owner: DictConnector) -> None:
        self.owner = owner
        self.hbm: SlotMedium | None = None
        self.loading: list[tuple[int, bytes | None]] = []
        self.failed: frozenset[int] = frozenset()
        self.saving: list[tuple[SavePlan, int]] = []
        self.layers_waited: list[int] = []
        self.loaded_blocks = 0
        self.saved_blocks = 0

    def register_kv_caches(self, hbm: SlotMedium) -> None:
        self.hbm = hbm

    def _view(self, slot: int) -> memoryview:
        assert self.hbm is not None
        view = self.hbm.view(slot)
        assert view is not None
        return view

    def start_load_kv(self, plan: StepPlan) -> None:
        """Every slot is garbage until its layer has been waited for."""
        self.owner.verb("start_load_kv")
        self.loading = []
        for load in plan.loads:
            for key, slot in zip(load.span.keys[load.start :], load.slots, strict=False):
                self._view(slot)[:] = b"\x7f" * len(self._view(slot))
                fails = self.owner.random.random() < self.owner.faults.fail_loads
                self.loading.append((slot, None if fails else self._arriving(key)))
        self.failed = frozenset(slot for slot, data in self.loading if data is None)

    def _arriving(self, key: BlockKey) -> bytes:
        data = self.owner.blocks[key]
        return data[::-1] if self.owner.random.random() < self.owner.faults.wrong_loads else data

    def wait_for_layer_load(self, layer: int) -> None:
        self.owner.verb("wait_for_layer_load")
        self.layers_waited.append(layer)
        for slot, data in self.loading:
            if data is not None:
                size = len(data) // CONFIG.layers
                part = slice(layer * size, layer * size + size)
                self._view(slot)[part] = data[part]

    def get_block_ids_with_load_errors(self) -> frozenset[int]:
        self.owner.verb("get_block_ids_with_load_errors")
        self.loaded_blocks += sum(data is not None for _, data in self.loading)
        self.loading = []
        return self.failed

    def save_kv_layer(self, layer: int) -> None:
        self.owner.verb("save_kv_layer")

    def wait_for_save(self, plan: StepPlan, after: Fence | None = None) -> None:
        self.owner.verb("wait_for_save")
        for save in plan.saves:
            self.saving.append((save, self.owner.random.randint(0, self.owner.faults.save_ticks)))

    def get_finished(self) -> Finished:
        """A save reads its slots only now: whoever reused them too early finds the wrong bytes under the key later."""
        self.owner.verb("get_finished")
        ended = [save for save, ticks in self.saving if ticks == 0]
        self.saving = [(save, ticks - 1) for save, ticks in self.saving if ticks > 0]
        for save in ended:
            for key, slot in zip(save.span.keys, save.slots, strict=True):
                self.owner.blocks.setdefault(key, bytes(self._view(slot)))
            self.saved_blocks += len(save.slots)
        return Finished(saved=tuple((save.request_id, save.slots) for save in ended))


def assert_idle(engine: Engine, connector: DictConnector | None = None) -> None:
    assert engine.settle(5.0)
    assert engine.check_integrity() == []
    spare = int(engine.config.recompute_sample > 0)
    assert (engine.pool.referenced, engine.pool.writing, engine.pool.retiring) == (spare, spare, 0)
    if connector is not None:
        assert connector.idle() == []


def tokens_of(engine: Engine, requests: Sequence[Request]) -> dict[str, list[tuple[int, ...]]]:
    answers: dict[str, list[tuple[int, ...]]] = {request.id: [] for request in requests}
    for completion in engine.run(requests):
        answers[completion.request_id].append(completion.tokens)
    return answers


def drain(engine: Engine) -> list[Output]:
    outputs: list[Output] = []
    while engine.open_requests:
        outputs += engine.step()
    return outputs
