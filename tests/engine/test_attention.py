"""Paged attention against a plain one, and what must not change its bits."""

from __future__ import annotations

import pytest
import torch

from kvtier.engine import attention
from kvtier.engine.attention import AttentionPlan, Chunk

LAYERS, KV_HEADS, HEADS, DIM = 3, 2, 6, 16


class Cache:
    """A KV tensor, and the same K and V per sequence in plain order."""

    def __init__(self, slots: int, block_tokens: int, dtype: torch.dtype, seed: int = 1) -> None:
        self.kv = torch.zeros(slots, LAYERS, 2, block_tokens, KV_HEADS, DIM, dtype=dtype)
        self.dtype = dtype
        self.generator = torch.Generator().manual_seed(seed)
        self.plain: dict[int, list[torch.Tensor]] = {}

    def random(self, tokens: int, heads: int) -> torch.Tensor:
        return torch.empty(tokens, heads, DIM).normal_(generator=self.generator)

    def step(self, layer: int, chunks: list[tuple[int, Chunk]]) -> tuple[torch.Tensor, AttentionPlan, torch.Tensor]:
        """Write random K and V for ``(sequence, chunk)`` pairs; gives random queries, the plan and the expected output."""
        tokens = sum(len(chunk.tokens) for _, chunk in chunks)
        keys, values, queries = self.random(tokens, KV_HEADS), self.random(tokens, KV_HEADS), self.random(tokens, HEADS)
        step = attention.plan([chunk for _, chunk in chunks], self.kv, HEADS)
        attention.write(self.kv, layer, keys, values, step)
        expected, row = [], 0
        for sequence, chunk in chunks:
            count = len(chunk.tokens)
            new = torch.stack((keys[row : row + count], values[row : row + count])).to(self.dtype).float()
            old = self.plain.get(sequence)
            self.plain[sequence] = [new] if old is None else [*old, new]
            expected.append(
                self.reference(queries[row : row + count], torch.cat(self.plain[sequence], dim=1), chunk.start)
            )
            row += count
        return queries, step, torch.cat(expected)

    @staticmethod
    def reference(queries: torch.Tensor, both: torch.Tensor, start: int) -> torch.Tensor:
        group = HEADS // KV_HEADS
        keys, values = (each.repeat_interleave(group, dim=1).double() for each in both)
        scores = torch.einsum("qhd,khd->hqk", queries.double(), keys) / DIM**0.5
        positions = torch.arange(start, start + len(queries))
        scores = scores.masked_fill(torch.arange(both.shape[1]) > positions[:, None], float("-inf"))
        return torch.einsum("hqk,khd->qhd", scores.softmax(-1), values).float()


@pytest.mark.parametrize("block_tokens", [4, 16, 48, 128])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_chunks_and_single_tokens_of_several_sequences_match_plain_attention(
    block_tokens: int, dtype: torch.dtype
) -> None:
    cache = Cache(600, block_tokens, dtype)
    order = torch.randperm(600, generator=torch.Generator().manual_seed(2)).tolist()
    tables = [order[:150], order[150:300], order[300:450], order[450:]]
    steps = [
        [(0, Chunk(range(300), 0, tables[0])), (1, Chunk(range(5), 0, tables[1]))],
        [(0, Chunk(range(270), 300, tables[0])), (1, Chunk([1], 5, tables[1])), (2, Chunk([1], 0, tables[2]))],
        [(2, Chunk([1], 1, tables[2])), (0, Chunk([1], 570, tables[0])), (1, Chunk([1], 6, tables[1]))],
        [(3, Chunk(range(33), 0, tables[3])), (1, Chunk(range(2), 7, tables[1]))],
    ]
    for chunks in steps:
        queries, step, expected = cache.step(1, chunks)
        torch.testing.assert_close(attention.attend(queries, cache.kv, 1, step), expected, atol=2e-5, rtol=1e-5)
    assert not cache.kv[:, 0].any(), "another layer was written"
    assert not cache.kv[:, 2].any(), "another layer was written"


def test_a_large_batch_is_cut_into_groups_and_keeps_its_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "SCRATCH_BYTES", 100_000)
    cache = Cache(400, 16, torch.float32)
    tables = [list(range(40 * i, 40 * i + 40)) for i in range(9)]
    lengths = [3, 500, 17, 90, 33, 600, 1, 64, 250]
    cache.step(0, [(i, Chunk(range(n), 0, tables[i])) for i, n in enumerate(lengths)])
    queries, step, expected = cache.step(0, [(i, Chunk([0], n, tables[i])) for i, n in enumerate(lengths)])
    assert len(step.calls) == 3
    torch.testing.assert_close(attention.attend(queries, cache.kv, 0, step), expected, atol=2e-5, rtol=1e-5)


def test_what_was_left_in_a_slot_never_reaches_another_sequence() -> None:
    """Masked values still enter sums multiplied by zero: an infinity left behind would become NaN."""
    cache = Cache(8, 16, torch.float16)
    cache.kv.fill_(float("inf"))
    for start, count in ((0, 5), (5, 1), (6, 20), (26, 1)):
        queries, step, expected = cache.step(0, [(0, Chunk(range(count), start, [3, 5]))])
        torch.testing.assert_close(attention.attend(queries, cache.kv, 0, step), expected, atol=2e-5, rtol=1e-5)


def test_a_block_that_is_begun_has_zeros_behind_its_tokens_and_nothing_else_changes() -> None:
    cache = Cache(6, 4, torch.float32)
    cache.kv.fill_(7.0)
    cache.step(0, [(0, Chunk(range(6), 0, [4, 2]))])
    assert not cache.kv[2, :, :, 2:].any()
    assert (cache.kv[[0, 1, 3, 5]] == 7.0).all()
    before = cache.kv.clone()
    cache.step(0, [(0, Chunk([1], 6, [4, 2]))])
    changed = (cache.kv != before).flatten(4).any(-1).nonzero().tolist()
    assert changed == [[2, 0, 0, 2], [2, 0, 1, 2]]


def test_padding_picks_the_next_allowed_tail() -> None:
    widths = [attention._width(n, (64, 192, 512)) for n in (1, 64, 65, 193, 512, 513, 1024, 1100)]
    assert widths == [64, 64, 192, 512, 512, 576, 1024, 1216]
