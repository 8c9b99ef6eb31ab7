"""Loaded blocks that are wrong although their sums prove: a recheck finds them, and nothing that it drops is served again."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from kvtier.abc.store import Found, Reason
from kvtier.assembly.assemble import assemble
from kvtier.codec.frame import content_sum
from kvtier.config import EngineSettings, KvDtype, Settings, StoreCodec, StoreSettings, TierUrl
from kvtier.engine.model import StepBatch
from kvtier.engine.recheck import Rechecker, tolerance
from kvtier.engine.request import Output, Request
from kvtier.engine.sampler import SamplingParams
from kvtier.errors import ConfigError
from kvtier.key import Origin, Scope, Span, chain_keys, root_key
from kvtier.pool import Slot

from .support import TINY_BLOCK_BYTES, House, Served, Tiny, make_tiny, real_prompts, without_cache

pytestmark = pytest.mark.timeout(300)

BLOCK, NEW_TOKENS = 16, 8
TIERS = ("dram://?capacity=4MiB&verify=always",)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    return make_tiny(tmp_path_factory.mktemp("recheck"), seed=11, count=24)


class Pinned(random.Random):
    """Draws a load as ``draws`` has it, or at 0, and of each the block at ``index``, or the nearest one."""

    index = 0
    draws: list[float] = []  # noqa: RUF012 - set as a whole

    def random(self) -> float:
        return self.draws.pop(0) if self.draws else 0.0

    def randrange(self, start: int, stop: int | None = None, step: int = 1) -> int:
        assert stop is not None
        return min(max(self.index, start), stop - 1)


class Spoiler:
    """A house whose DRAM can be spoiled behind its sums, and whose rechecks fall where a test wants them."""

    def __init__(self, tiny: Tiny) -> None:
        self.house = House(TIERS, tiny.engine(160, recompute_sample=1.0))
        rechecker = self.house.engine._rechecker
        assert isinstance(rechecker, Rechecker)
        self.rechecker = rechecker
        self.chance = Pinned()
        self.arena = self.house.store._arena

    def span(self, prompt: Sequence[int]) -> Span:
        """The chain of a prompt, as the engine names it."""
        identity, scope = self.house.engine.identity, Scope()
        root = root_key(identity, scope)
        origin = Origin(identity.digest(), scope.digest(), scope.tenant_id)
        return Span(origin, root, 0, tuple(chain_keys(root, list(prompt), BLOCK)))

    def saved(self, prompt: Sequence[int]) -> Span:
        """Serve ``prompt`` cold, let it be saved, and forget it in HBM."""
        self.house.serve([prompt], 1)
        self.forget_hbm()
        return self.span(prompt)

    def forget_hbm(self) -> None:
        self.house.settle()
        self.house.engine.reset_prefix_cache()

    def spoil(self, span: Span, index: int, how: Callable[[np.ndarray], None]) -> None:
        """Change a block's bytes in DRAM and make its sum anew, so that only a recheck can notice."""
        [entry] = self.house.store.geometry.addresses(span)[index : index + 1]
        slot = self.arena.pool.slot(entry)
        assert slot is not None
        view = self.arena.view(slot)[:TINY_BLOCK_BYTES]
        how(np.frombuffer(view, np.uint8))
        self._sum(slot, content_sum(view))

    def _sum(self, slot: Slot, content: bytes) -> None:
        size = len(content)
        self.arena.headers._contents[size * slot : size * (slot + 1)] = content

    def pin(self, index: int) -> None:
        self.chance.index = index
        self.rechecker._random = self.chance

    def counts(self) -> tuple[int, int]:
        """(rechecks, mismatches)"""
        value = self.house.metrics.value
        return int(value("kvtier_rechecks_total")), int(value("kvtier_recheck_mismatches_total"))


@pytest.fixture
def spoiler(tiny: Tiny) -> Iterator[Spoiler]:
    made = Spoiler(tiny)
    with made.house:
        yield made


def flip(block: np.ndarray) -> None:
    """The top bits of exponents in every layer, K and V."""
    block[1::64] ^= 0x20


def flip_in_last_layer(block: np.ndarray) -> None:
    block[len(block) // 2 + 1 :: 64] ^= 0x20


def nan(block: np.ndarray) -> None:
    block[4:6] = 0xFF


def expect_right(served: Served, tiny: Tiny, number: int) -> None:
    assert served.tokens == tiny.expected[number]
    stats = served.stats
    assert stats.hbm_tokens + stats.external_tokens + stats.computed_tokens == stats.prompt_tokens


@pytest.mark.parametrize(
    ("how", "spoiled", "chosen", "first"),
    [
        (flip, 0, 0, 0),
        (flip, 2, 2, 2),
        (flip, 0, 3, 0),
        (flip, 2, 4, 0),
        (nan, 2, 2, 2),
        (nan, 1, 4, 0),
        (flip_in_last_layer, 0, 0, 0),
        (flip_in_last_layer, 2, 2, 0),
    ],
)
def test_a_wrong_block_is_caught_and_computed_over(
    spoiler: Spoiler,
    tiny: Tiny,
    how: Callable[[np.ndarray], None],
    spoiled: int,
    chosen: int,
    first: int,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Whether the block itself is recomputed or one behind it; ``first`` is what is dropped, and all that follows it."""
    prompt = tiny.prompts[0]
    span = spoiler.saved(prompt)
    spoiler.spoil(span, spoiled, how)
    spoiler.pin(chosen)
    with caplog.at_level(logging.WARNING):
        [served] = spoiler.house.serve([prompt], NEW_TOKENS)
    expect_right(served, tiny, 0)
    assert [each.name for each in caplog.records].count("kvtier.engine.recheck") == spoiler.counts()[1] == 1
    loaded = (len(prompt) - 1) // BLOCK * BLOCK
    assert served.stats.failed_tokens == loaded
    assert served.stats.external_tokens == first * BLOCK, "what is before a block that is wrong for sure stays"
    spoiler.house.expect_idle()
    told = spoiler.house.store.explain("request 2")
    assert told[first].found is Found.MISS
    assert told[first].reason is Reason.RECOMPUTED_DIFFERENTLY
    spoiler.forget_hbm()
    [again] = spoiler.house.serve([prompt], NEW_TOKENS)
    expect_right(again, tiny, 0)
    assert again.stats.external_tokens == loaded, "what was computed has been saved in its place"
    assert spoiler.counts()[1] == 1
    spoiler.house.expect_idle()


def test_the_same_bytes_change_the_answer_where_nothing_is_rechecked(spoiler: Spoiler, tiny: Tiny) -> None:
    span = spoiler.saved(tiny.prompts[0])
    spoiler.spoil(span, 0, flip)
    spoiler.rechecker._share = 0.0
    [served] = spoiler.house.serve([tiny.prompts[0]], NEW_TOKENS)
    assert served.tokens != tiny.expected[0]
    assert spoiler.house.count("sum_failures", "dram") == 0
    assert spoiler.counts() == (0, 0)


def test_whoever_runs_on_a_wrong_block_computes_again(spoiler: Spoiler, tiny: Tiny) -> None:
    """One request has loaded a wrong block unchecked and runs on; another finds it in HBM, and has its own load checked."""
    prompt = tiny.prompts[0]
    short = prompt[: 3 * BLOCK + 1]
    spoiler.spoil(spoiler.saved(prompt), 1, flip)
    spoiler.pin(4)
    engine = spoiler.house.engine
    sampling = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
    running = engine.add_request(Request("running", short, sampling))
    spoiler.rechecker._share = 0.0
    while running.completion_tokens < 20:
        engine.step()
    assert running.external_tokens == 3 * BLOCK
    spoiler.rechecker._share = 1.0
    [checked] = engine.run([Request("checked", prompt, replace(sampling, max_tokens=NEW_TOKENS))])
    assert checked.tokens == tiny.expected[0]
    assert checked.stats.cached_tokens == 0
    assert spoiler.counts() == (1, 1)
    assert running.recomputed_tokens >= 3 * BLOCK, "with what it had generated"
    spoiler.house.expect_idle()
    for text in (prompt, short):
        [again] = spoiler.house.serve([text], NEW_TOKENS)
        with House((), without_cache(tiny.engine())) as alone:
            assert again.tokens == alone.serve([text], NEW_TOKENS)[0].tokens
        assert again.stats.hbm_tokens == (len(text) - 1) // BLOCK * BLOCK
    spoiler.house.expect_idle()


def test_two_loads_of_one_step_share_a_wrong_block(spoiler: Spoiler, tiny: Tiny) -> None:
    """Only one load a step is rechecked: the other one, which took the same bytes unchecked, is computed again as well."""
    prompt = tiny.prompts[0]
    spoiler.spoil(spoiler.saved(prompt), 0, flip)
    spoiler.pin(0)
    spoiler.chance.draws = [0.0, 1.0]
    spoiler.rechecker._share = 0.5
    served = spoiler.house.serve([prompt, prompt], NEW_TOKENS)
    for each in served:
        expect_right(each, tiny, 0)
        assert each.stats.failed_tokens == (len(prompt) - 1) // BLOCK * BLOCK
    assert spoiler.counts() == (1, 1)
    spoiler.house.expect_idle()


def test_every_load_is_rechecked_one_a_step(spoiler: Spoiler, tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight loads at once: all answers are right, and no step runs the model more than twice."""
    house = spoiler.house
    prompts = tiny.prompts[:8]
    house.serve(prompts, NEW_TOKENS)
    spoiler.forget_hbm()
    sizes: list[list[int]] = []
    forward, step = house.engine._model.forward, house.engine.step

    def counted(batch: StepBatch, *more: Any, **named: Any) -> torch.Tensor:
        sizes[-1].append(batch.tokens)
        return forward(batch, *more, **named)

    def stepped() -> list[Output]:
        sizes.append([])
        return step()

    monkeypatch.setattr(house.engine._model, "forward", counted)
    monkeypatch.setattr(house.engine, "step", stepped)
    served = house.serve(prompts, NEW_TOKENS)
    for number, each in enumerate(served):
        expect_right(each, tiny, number)
        assert each.stats.external_tokens > 0
    rechecks = [each[1] for each in sizes if len(each) > 1]
    assert max(map(len, sizes)) == 2
    assert rechecks == [BLOCK] * 8
    assert spoiler.counts() == (8, 0)
    house.expect_idle()


@pytest.mark.parametrize("kv_dtype", [KvDtype.BF16, KvDtype.FP32])
def test_no_false_alarm(tiny: Tiny, kv_dtype: KvDtype, seed: int) -> None:
    """Prompts and, as second turns, what was decoded after them, served in ever other company."""
    rng = random.Random(seed)
    rechecked = 0
    with House(("dram://?capacity=64MiB",), tiny.engine(256, recompute_sample=1.0, kv_dtype=kv_dtype)) as house:
        texts = list(tiny.prompts)
        for turn in range(4):
            served = house.in_batches(texts, rng.randint(2, 8), rng.randint(16, 24))
            texts = [(*text, *each.tokens) for text, each in zip(texts, served, strict=True)]
            rng.shuffle(texts)
            house.settle()
            house.engine.reset_prefix_cache()
            if turn:
                rechecked += sum(each.stats.external_tokens > 0 for each in served)
        assert house.metrics.value("kvtier_rechecks_total") >= rechecked > 2 * len(texts)
        assert house.metrics.value("kvtier_recheck_mismatches_total") == 0
        house.expect_idle()


@pytest.mark.model
@pytest.mark.timeout(900)
def test_no_false_alarm_on_the_real_model(seed: int) -> None:
    """With the default dtype of its KV; a tiny model has both."""
    settings = EngineSettings(hbm_blocks=128, max_num_seqs=4, recompute_sample=1.0)
    with House(("dram://?capacity=256MiB",), settings) as house:
        texts = real_prompts(house.tokenizer, seed, 8, 60, 120)
        for _ in range(3):
            served = house.in_batches(texts, 4, 20)
            texts = [(*text, *each.tokens) for text, each in zip(texts, served, strict=True)]
            house.settle()
            house.engine.reset_prefix_cache()
        assert house.metrics.value("kvtier_rechecks_total") >= 16
        assert house.metrics.value("kvtier_recheck_mismatches_total") == 0


def test_without_rechecks_nothing_is_spent(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    def forbidden(*_: object) -> None:
        raise AssertionError("a recheck was asked for")

    monkeypatch.setattr(Rechecker, "__init__", forbidden)
    with House(TIERS, tiny.engine(14)) as house:
        assert house.engine.pool.free == 14
        assert house.engine.max_length == 14 * BLOCK
        for external in (False, True):
            [served] = house.serve([tiny.prompts[0]], NEW_TOKENS)
            expect_right(served, tiny, 0)
            assert bool(served.stats.external_tokens) is external
            house.settle()
            house.engine.reset_prefix_cache()


def test_a_spare_slot_is_set_aside(tiny: Tiny) -> None:
    """The longest sequence still fits beside it."""
    with House(TIERS, tiny.engine(15, recompute_sample=1.0)) as house:
        assert house.engine.max_length == 14 * BLOCK
        prompt = tiny.prompts[0]
        for _ in range(2):
            served = house.serve([prompt], 14 * BLOCK - len(prompt))
            assert served[0].tokens[:NEW_TOKENS] == tiny.expected[0]
            house.expect_idle()
            house.engine.reset_prefix_cache()
        assert house.metrics.value("kvtier_rechecks_total") == 1


@pytest.mark.parametrize(("dtype", "roundings"), [(torch.bfloat16, 5), (torch.float16, 5), (torch.float32, 500)])
def test_the_tolerance_has_room_for_other_sums_and_for_little_else(dtype: torch.dtype, roundings: int) -> None:
    step = torch.finfo(dtype).eps / 2
    assert 2 * roundings * step < tolerance(dtype) < 0.1


def test_a_lossy_codec_and_rechecks_exclude_each_other(tiny: Tiny) -> None:
    settings = Settings(
        tiers=(TierUrl.parse(TIERS[0]),),
        engine=tiny.engine(recompute_sample=0.1),
        store=StoreSettings(codec=StoreCodec.INT8),
    )
    with pytest.raises(ConfigError, match=r"recompute_sample .* int8"):
        assemble(settings)
