"""The engine on a GPU: attention, hits from DRAM, and what saving costs a token."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator

import pytest
import torch

from kvtier.engine import attention
from kvtier.engine import paged_attention_triton as paged
from kvtier.engine.attention import Chunk
from kvtier.engine.engine import Engine
from kvtier.engine.exactness import settle
from kvtier.engine.model import LlamaModel, StepBatch
from kvtier.store.store import TieredStore

from .support import BLOCK, CONFIG, greedy, make_dram, make_engine, make_hbm, make_model, make_store

pytestmark = pytest.mark.gpu

SLOWER = 1.05
"""Inter-token latency while blocks are saved, against the same without a store."""
SEQUENCES, TOKENS = 16, 128


@pytest.mark.parametrize("heads", [(8, 8), (32, 8), (9, 3), (16, 1)], ids=["mha", "gqa", "gqa of three", "mqa"])
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize(("dtype", "error"), [(torch.bfloat16, 0.02), (torch.float32, 1e-4)], ids=["bf16", "fp32"])
def test_triton_attention_gives_what_torch_gives(
    heads: tuple[int, int], head_dim: int, dtype: torch.dtype, error: float
) -> None:
    generator = torch.Generator().manual_seed(3)
    slots, kv_heads = 200, heads[1]
    kv = torch.empty(slots, 2, 2, BLOCK, kv_heads, head_dim).normal_(generator=generator).to(dtype)
    order = torch.randperm(slots, generator=generator).tolist()
    steps = [
        [Chunk(range(700), 0, order[:80]), Chunk(range(33), 100, order[80:120]), Chunk([0], 500, order[120:])],
        [Chunk([0], 700, order[:80]), Chunk([0], 133, order[80:120]), Chunk([0], 501, order[120:])],
    ]
    for chunks in steps:
        tokens = sum(len(chunk.tokens) for chunk in chunks)
        queries = torch.empty(tokens, heads[0], head_dim).normal_(generator=generator)
        on_cpu = attention.attend(queries, kv, 1, attention.plan(chunks, kv, heads[0]))
        device_kv, device_queries = kv.cuda(), queries.cuda()
        for module in (paged, attention):
            step = module.plan(chunks, device_kv, heads[0])
            got = module.attend(device_queries, device_kv, 1, step)
            worst = float((got.cpu() - on_cpu).abs().max())
            assert worst < error, module.__name__


@pytest.fixture(scope="module")
def model() -> LlamaModel:
    return make_model(torch.device("cuda", 0))


@pytest.fixture
def store() -> Iterator[TieredStore]:
    made = make_store(make_dram(2048, CONFIG.layout(BLOCK, "bf16").block_bytes))
    yield made
    assert made.check_integrity() == []
    made.close()


def test_the_model_on_a_gpu_is_near_to_the_model_on_a_cpu(model: LlamaModel) -> None:
    tokens = [7 * i % CONFIG.vocab for i in range(200)]
    batch = StepBatch((Chunk(tokens, 0, range(13)),))
    ours, theirs = (
        each.forward(batch, each.allocate_kv(13, BLOCK, "bf16")).cpu()
        for each in (model, make_model(torch.device("cpu")))
    )
    similar = torch.nn.functional.cosine_similarity(ours, theirs).item()
    print(f"\ncosine of the logits {similar:.5f}")
    assert similar > 0.99


def test_the_self_test_says_whether_hits_are_exact_here(model: LlamaModel) -> None:
    print(f"\nexact: {settle(model, 'bf16', BLOCK)}")


def test_a_hit_from_dram_has_the_bits_of_a_hit_from_hbm(model: LlamaModel, store: TieredStore) -> None:
    engine = make_engine(model, make_hbm(256, CONFIG.layers), store)
    prompt = [(13 * i + 5) % CONFIG.vocab for i in range(1000)]
    cold, warm = (engine.run([greedy(name, prompt, 8)])[0] for name in ("cold", "warm"))
    assert engine.settle(60)
    assert engine.reset_prefix_cache() >= 62
    hit = engine.run([greedy("hit", prompt, 8)])[0]
    assert (cold.stats.computed_tokens, warm.stats.hbm_tokens, hit.stats.external_tokens) == (1000, 992, 992)
    assert hit.stats.hbm_tokens == 0
    assert warm.stats.first_logits is not None
    assert hit.stats.first_logits is not None
    assert torch.equal(hit.stats.first_logits, warm.stats.first_logits)
    assert hit.tokens == warm.tokens
    assert engine.check_integrity() == []


def decode(engine: Engine, round_number: int) -> float:
    """Median seconds of a step in which all sequences decode."""
    for index in range(SEQUENCES):
        prompt = [(31 * index + 7 * i + round_number) % CONFIG.vocab for i in range(40)]
        engine.add_request(greedy(f"{round_number}-{index}", prompt, TOKENS))
    times = []
    while engine.open_requests:
        start = time.perf_counter()
        outputs = engine.step()
        if len(outputs) == SEQUENCES:
            times.append(time.perf_counter() - start)
    assert len(times) >= TOKENS - 8
    assert engine.settle(60)
    return statistics.median(times)


def test_saving_does_not_slow_tokens_down(model: LlamaModel, store: TieredStore) -> None:
    saving = make_engine(model, make_hbm(512, CONFIG.layers), store)
    plain = make_engine(model, make_hbm(512, CONFIG.layers), None)
    for engine in (saving, plain):
        decode(engine, 0)
    rounds = [(decode(saving, number), decode(plain, number)) for number in range(1, 6)]
    with_store, without = (statistics.median(each) for each in zip(*rounds, strict=True))
    print(
        f"\n{1e3 * with_store:.2f} ms a token while saving, {1e3 * without:.2f} ms without: {with_store / without:.3f}"
    )
    assert store.held("dram") > 5 * SEQUENCES * (TOKENS // BLOCK)
    assert with_store / without <= SLOWER
