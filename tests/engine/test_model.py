"""The forward pass against transformers, and bit-equality of hits with cold runs."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch

from kvtier.engine import attention
from kvtier.engine.architecture import ModelConfig
from kvtier.engine.attention import STRIDE, Chunk
from kvtier.engine.checkpoint import open_checkpoint
from kvtier.engine.exactness import exact_tails, self_test, settle
from kvtier.engine.linear import LEAST_ROWS
from kvtier.engine.model import LlamaModel, StepBatch
from kvtier.testing.reference import reference_model
from kvtier.testing.requirements import require_machine

from .conftest import RealModel
from .tiny import GAP, GAP_PROMPTS, GAP_STEPS, make_gap_checkpoint, make_tiny_checkpoint, smallest_gap

BLOCK = 16


def transformers_logits(
    config: ModelConfig, tensors: dict[str, torch.Tensor], tokens: list[int], rope: dict[str, object] | None = None
) -> torch.Tensor:
    """Float32 logits of ``LlamaForCausalLM`` with these weights, ``[tokens, vocab]``."""
    with torch.inference_mode():
        logits: torch.Tensor = reference_model(config, tensors, rope)(torch.tensor([tokens])).logits[0]
    return logits


def prefill(
    model: LlamaModel,
    kv: torch.Tensor,
    tokens: Sequence[int],
    start: int = 0,
    chunk: int = 1 << 30,
    table: Sequence[int] | None = None,
) -> torch.Tensor:
    """Run ``tokens`` from ``start`` on in chunks; the last token's logits."""
    table = range(len(kv)) if table is None else table
    logits = torch.empty(0)
    for begin in range(start, len(tokens), chunk):
        logits = model.forward(StepBatch((Chunk(tokens[begin : begin + chunk], begin, table),)), kv)
    return logits


def words(seed: int, count: int, vocab: int = 320) -> list[int]:
    chance = random.Random(seed)
    return [chance.randrange(vocab) for _ in range(count)]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> LlamaModel:
    checkpoint = open_checkpoint(str(make_tiny_checkpoint(tmp_path_factory.mktemp("tiny"))))
    model = LlamaModel(checkpoint.config, checkpoint.tensors())
    settle(model, "bf16", BLOCK)
    return model


@pytest.mark.parametrize(
    ("shape", "rope"),
    [
        ({}, None),
        ({"tied": True, "hidden": 96, "heads": 3, "kv_heads": 3}, None),
        ({"heads": 4, "kv_heads": 1, "head_dim": 16, "layers": 3}, {"rope_type": "linear", "factor": 4.0}),
        (
            {"vocab": 999},
            {
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 256,
            },
        ),
    ],
)
@pytest.mark.parametrize("block_tokens", [16, 24])
def test_logits_match_transformers(
    tmp_path: Path, shape: dict[str, Any], rope: dict[str, object] | None, block_tokens: int
) -> None:
    checkpoint = open_checkpoint(str(make_tiny_checkpoint(tmp_path, seed=4, **shape)), rope=rope)
    model = LlamaModel(checkpoint.config, checkpoint.tensors())
    tokens = words(1, 300, checkpoint.config.vocab)
    expected = transformers_logits(checkpoint.config, checkpoint.tensors(), tokens, rope)
    kv = model.allocate_kv(40, block_tokens, "fp32")
    table = random.Random(2).sample(range(40), 40)
    first = model.forward(StepBatch((Chunk(tokens[:130], 0, table, "all"),)), kv)
    rest = [model.forward(StepBatch((Chunk(tokens[i : i + 1], i, table),)), kv) for i in range(130, 150)]
    last = model.forward(StepBatch((Chunk(tokens[150:], 150, table, "all"),)), kv)
    ours = torch.cat((first, *rest, last))
    torch.testing.assert_close(ours, expected, atol=1e-4, rtol=0)
    assert torch.equal(ours.argmax(-1), expected.argmax(-1))


def test_logits_come_in_the_order_of_chunks_and_only_where_wanted(tiny: LlamaModel) -> None:
    a, b, c = words(1, 20), words(2, 7), words(3, 33)
    kv = tiny.allocate_kv(12, BLOCK, "fp32")
    alone = [tiny.forward(StepBatch((Chunk(t, 0, range(4), "all"),)), kv) for t in (a, b, c)]
    batch = StepBatch((Chunk(a, 0, [0, 1], "none"), Chunk(b, 0, [2], "all"), Chunk(c, 0, [3, 4, 5], "last")))
    assert batch.tokens == 60
    logits = tiny.forward(batch, kv)
    torch.testing.assert_close(logits, torch.cat((alone[1], alone[2][-1:])), atol=1e-5, rtol=0)
    assert tiny.forward(StepBatch((Chunk(a, 0, [0, 1], "none"),)), kv).shape == (0, 320)
    assert tiny.forward(StepBatch(()), kv).shape == (0, 320)


def test_the_last_layer_writes_every_token_and_works_only_for_wanted_rows(
    tiny: LlamaModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    attended: list[int] = []
    attend = attention.attend

    def counting(queries: torch.Tensor, *args: Any) -> torch.Tensor:
        attended.append(len(queries))
        return attend(queries, *args)

    monkeypatch.setattr(attention, "attend", counting)
    tokens = words(6, 100)
    caches = [tiny.allocate_kv(7, BLOCK, "bf16") for _ in range(3)]
    chunks = (Chunk(tokens, 0, range(7), "all"), Chunk(tokens, 0, range(7), "last"), Chunk(tokens, 0, range(7), "none"))
    everything, last, _none = (tiny.forward(StepBatch((chunk,)), kv) for chunk, kv in zip(chunks, caches, strict=True))
    assert attended == [100, 100, 100, LEAST_ROWS, 100]
    torch.testing.assert_close(last, everything[-1:], atol=1e-5, rtol=0)
    assert all(torch.equal(kv, caches[0]) for kv in caches[1:])


def test_hooks_run_around_every_layers_writes(tiny: LlamaModel) -> None:
    kv = tiny.allocate_kv(1, BLOCK, "fp32")
    seen: list[tuple[str, int, list[bool]]] = []

    def written() -> list[bool]:
        return [bool(kv[0, layer, :, :3].any()) for layer in range(2)]

    tiny.forward(
        StepBatch((Chunk([5, 6, 7], 0, [0]),)),
        kv,
        before_layer=lambda i: seen.append(("before", i, written())),
        after_layer=lambda i: seen.append(("after", i, written())),
    )
    assert seen == [
        ("before", 0, [False, False]),
        ("after", 0, [True, False]),
        ("before", 1, [True, False]),
        ("after", 1, [True, True]),
    ]


@pytest.mark.parametrize("kv_dtype", ["bf16", "fp16", "fp32"])
def test_k_and_v_are_rounded_to_the_kv_dtype_and_read_back(tiny: LlamaModel, kv_dtype: str) -> None:
    """Swapping the cache's content for another prompt's changes what the next token sees: nothing is kept beside it."""
    kv = tiny.allocate_kv(8, BLOCK, kv_dtype)
    assert kv.shape == (8, 2, 2, BLOCK, 2, 32)
    assert kv[0].numel() * kv.element_size() == tiny.config.layout(BLOCK, kv_dtype).block_bytes
    tokens, other = words(1, 65), words(2, 65)
    expected = prefill(tiny, kv, tokens)
    copied = kv.clone()
    prefill(tiny, kv, other)
    changed = tiny.forward(StepBatch((Chunk(tokens[64:], 64, range(8)),)), kv)
    assert (changed - expected).abs().max() > 0.1
    torch.testing.assert_close(
        tiny.forward(StepBatch((Chunk(tokens[64:], 64, range(8)),)), copied), expected, atol=1e-5, rtol=0
    )


def test_hits_are_bit_equal_to_cold_runs_where_the_self_test_says_so(tiny: LlamaModel) -> None:
    require_machine(self_test(tiny, "bf16", BLOCK), "the self-test finds no bit-equality here")
    for seed, length in enumerate((47, 300, 545, 700)):
        tokens = words(seed, length)
        kv = tiny.allocate_kv(length // BLOCK + 1, BLOCK, "bf16")
        cold = prefill(tiny, kv, tokens)
        last = (length - 1) // BLOCK * BLOCK
        for start, chunk in ((BLOCK, 96), (BLOCK, 256), (last // 2 // BLOCK * BLOCK, 512), (last, 1), (last, 256)):
            hit = torch.zeros_like(kv)
            hit[: start // BLOCK] = kv[: start // BLOCK]
            assert torch.equal(prefill(tiny, hit, tokens, start, chunk), cold), (seed, start, chunk)
            assert torch.equal(hit, kv), (seed, start, chunk)


def test_a_step_of_few_tokens_gives_the_rows_of_a_larger_one(tiny: LlamaModel) -> None:
    """Small steps are filled up to the least number of rows: nothing of the filling may show."""
    tokens = words(6, 40)
    kv = tiny.allocate_kv(9, BLOCK, "fp32")
    cold = tiny.forward(StepBatch((Chunk(tokens, 0, range(3), "all"),)), kv)
    for count in (1, 2, 3):
        chunks = (Chunk(tokens[:count], 0, [3], "all"), Chunk(tokens[30:32], 30, range(3), "last"))
        for batch, rows in ((chunks[:1], cold[:count]), (chunks, torch.cat((cold[:count], cold[31:32])))):
            kv[3:] = 0
            torch.testing.assert_close(tiny.forward(StepBatch(batch), kv), rows, atol=1e-5, rtol=0)
            torch.testing.assert_close(kv[3, :, :, :count], kv[0, :, :, :count], atol=1e-6, rtol=1e-5)
            assert not kv[3, :, :, count:].any()
            assert not kv[4:].any()


class Sloppy(LlamaModel):
    """Logits that depend on how many tokens a step has."""

    def forward(self, batch: StepBatch, *args: object, **kwargs: object) -> torch.Tensor:
        logits = super().forward(batch, *args, **kwargs)  # type: ignore[arg-type]
        return logits * (1 + 1e-7 * batch.tokens)


def test_the_self_test_sees_the_last_bit(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(str(make_tiny_checkpoint(tmp_path)))
    sloppy = Sloppy(checkpoint.config, checkpoint.tensors())
    assert not self_test(sloppy, "bf16", BLOCK)
    assert not settle(sloppy, "bf16", BLOCK)
    assert sloppy.attention_tails == exact_tails(sloppy)
    assert sloppy.attention_tails[-1] == STRIDE


def test_the_first_layers_share_weights_and_leave_the_model_alone(tiny: LlamaModel) -> None:
    part = tiny.first_layers(1)
    assert (part.config.layers, tiny.config.layers) == (1, 2)
    assert asdict(tiny.first_layers(9).config) == asdict(tiny.config)
    assert part.forward(StepBatch((Chunk([1], 0, [0]),)), part.allocate_kv(1, BLOCK, "fp32")).shape == (1, 320)


def test_a_gap_checkpoint_keeps_its_distance_and_depends_on_its_prompt(tmp_path: Path) -> None:
    path = make_gap_checkpoint(tmp_path)
    assert smallest_gap(path, GAP_PROMPTS, GAP_STEPS) > GAP
    checkpoint = open_checkpoint(str(path))
    model, tokenizer = LlamaModel(checkpoint.config, checkpoint.tensors()), checkpoint.tokenizer()

    def greedy(tokens: list[int]) -> list[int]:
        kv = model.allocate_kv(20, BLOCK, "bf16")
        logits, tokens, end = prefill(model, kv, tokens), list(tokens), len(tokens)
        for _ in range(GAP_STEPS):
            tokens.append(int(logits.argmax()))
            logits = model.forward(StepBatch((Chunk(tokens[-1:], len(tokens) - 1, range(20)),)), kv)
        return tokens[end:]

    prompt = tokenizer.encode(GAP_PROMPTS[0])
    changed = [[*prompt[:i], prompt[i] ^ 1, *prompt[i + 1 :]] for i in range(0, len(prompt), 7)]
    assert all(greedy(other) != greedy(prompt) for other in changed)


@pytest.mark.model
def test_smollm2_matches_transformers(smollm2: RealModel, prose: str) -> None:
    tokens = smollm2.tokenizer.encode(prose)[:600]
    kv = smollm2.model.allocate_kv(40, BLOCK, "fp32")
    ours = smollm2.model.forward(StepBatch((Chunk(tokens, 0, range(40), "all"),)), kv)
    expected = transformers_logits(smollm2.checkpoint.config, smollm2.tensors, tokens)
    difference = float((ours - expected).abs().max())
    print(f"largest difference of logits: {difference:.2e}")
    assert difference < 1e-3
    assert torch.equal(ours.argmax(-1), expected.argmax(-1))


@pytest.mark.model
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_smollm2_hits_are_bit_equal_to_cold_runs(smollm2: RealModel, prose: str, seed: int) -> None:
    """20 prompts of 300-900 tokens, hits at three boundaries each, and at each of them chunks of 96, 256 and 512.

    Where what is left fits one chunk, larger chunks are the same forward pass, which runs once.
    """
    require_machine(smollm2.exact, "the self-test finds no bit-equality here")
    ids = smollm2.tokenizer.encode(prose)
    chance = random.Random(seed)
    lengths = [880, *(chance.randrange(513, 560) for _ in range(7)), *(chance.randrange(300, 340) for _ in range(12))]
    kv, hit = (smollm2.model.allocate_kv(57, BLOCK, "bf16") for _ in range(2))
    for length in lengths:
        begin = chance.randrange(len(ids) - length)
        tokens = ids[begin : begin + length]
        cold = prefill(smollm2.model, kv, tokens)
        last = (length - 1) // BLOCK
        boundaries = (last, last * 3 // 4, chance.randrange(last // 4, last // 2))
        runs = {(kept, min(chunk, length - kept * BLOCK)) for kept in boundaries for chunk in (96, 256, 512)}
        for kept, chunk in sorted(runs):
            hit.zero_()
            hit[:kept] = kv[:kept]
            assert torch.equal(prefill(smollm2.model, hit, tokens, kept * BLOCK, chunk), cold), (length, kept, chunk)


@pytest.mark.model
def test_smollm2_decoded_blocks_give_the_same_tokens_as_prefilled_ones(smollm2: RealModel) -> None:
    model, tokenizer = smollm2.model, smollm2.tokenizer
    prompt = tokenizer.apply_chat_template([{"role": "user", "content": "Name three rivers and say where they flow."}])
    tokens = tokenizer.encode(prompt, add_special=False)
    end = len(tokens)
    kv = model.allocate_kv(10, BLOCK, "bf16")
    rows = [prefill(model, kv, tokens)]
    while len(tokens) < end + 40:
        tokens.append(int(rows[-1].argmax()))
        rows.append(prefill(model, kv, tokens, len(tokens) - 1))
    decoded = torch.cat(rows)
    cold = model.forward(StepBatch((Chunk(tokens, 0, range(10), "all"),)), torch.zeros_like(kv))[end - 1 :]
    gaps = cold.topk(2, dim=-1).values
    gap = float((gaps[:, 0] - gaps[:, 1]).min())
    difference = float((decoded - cold).abs().max())
    print(f"smallest gap of the two best logits {gap:.2e}, largest difference {difference:.2e}")
    assert difference < max(gap / 2, 1e-3)
    if gap > 1e-3:
        assert torch.equal(decoded.argmax(-1), cold.argmax(-1))
    text = tokenizer.decode(tokens[end:])
    assert "river" in text.lower(), text
