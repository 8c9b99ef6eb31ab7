"""What FlashInfer is asked: its place is taken by a wrapper that attends, by torch, to just what it was told."""

from __future__ import annotations

import importlib
import sys
from types import ModuleType

import pytest
import torch

from kvtier.engine import attention
from kvtier.engine.attention import AttentionBackend, Chunk

HEADS, KV_HEADS, DIM, BLOCK = 6, 2, 16, 4


class Wrapper:
    """``BatchPrefillWithPagedKVCacheWrapper`` as its documentation has it: layout NHD, causal from the end of each request."""

    def __init__(self, workspace: torch.Tensor, layout: str) -> None:
        assert workspace.dtype is torch.uint8
        assert layout == "NHD"

    def plan(
        self,
        queries: torch.Tensor,
        pages: torch.Tensor,
        indices: torch.Tensor,
        last: torch.Tensor,
        heads: int,
        kv_heads: int,
        head_dim: int,
        page_size: int,
        **more: object,
    ) -> None:
        assert (heads, kv_heads, head_dim, page_size) == (HEADS, KV_HEADS, DIM, BLOCK)
        assert {each.dtype for each in (queries, pages, indices, last)} == {torch.int32}
        assert more["causal"] is True
        self.queries, self.pages = queries.tolist(), pages.tolist()
        self.indices, self.last = indices.tolist(), last.tolist()

    def run(self, queries: torch.Tensor, cache: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        parts = []
        for request, last in enumerate(self.last):
            own = queries[self.queries[request] : self.queries[request + 1]].float()
            slots = self.indices[self.pages[request] : self.pages[request + 1]]
            length = (len(slots) - 1) * BLOCK + last
            keys, values = (each[slots].flatten(0, 1)[:length].float() for each in cache)
            keys, values = (each.repeat_interleave(HEADS // KV_HEADS, dim=1) for each in (keys, values))
            scores = torch.einsum("qhd,khd->hqk", own, keys) / DIM**0.5
            seen = torch.arange(length) <= torch.arange(length - len(own), length)[:, None]
            weights = scores.masked_fill(~seen, float("-inf")).softmax(-1)
            parts.append(torch.einsum("hqk,khd->qhd", weights, values))
        return torch.cat(parts).to(queries.dtype)


@pytest.fixture
def backend(monkeypatch: pytest.MonkeyPatch) -> AttentionBackend:
    fake = ModuleType("flashinfer")
    fake.BatchPrefillWithPagedKVCacheWrapper = Wrapper  # type: ignore[attr-defined]  # a module made here
    monkeypatch.setitem(sys.modules, "flashinfer", fake)
    monkeypatch.delitem(sys.modules, "kvtier.engine.paged_attention_flashinfer", raising=False)
    return importlib.import_module("kvtier.engine.paged_attention_flashinfer")


def test_flashinfer_is_told_what_torch_is_told(backend: AttentionBackend) -> None:
    generator = torch.Generator().manual_seed(2)
    kv = torch.empty(20, 3, 2, BLOCK, KV_HEADS, DIM).normal_(generator=generator).bfloat16()
    chunks = [Chunk(range(9), 0, [7, 3, 11, 2]), Chunk([0], 11, [5, 19, 0]), Chunk(range(4), 4, [1, 8])]
    queries = torch.empty(16, HEADS, DIM).normal_(generator=generator)  # two spare rows
    got, expected = (
        each.attend(queries, kv.clone(), 1, each.plan(chunks, kv.clone(), HEADS)) for each in (backend, attention)
    )
    torch.testing.assert_close(got, expected, atol=0.02, rtol=0.02)
    assert not got[14:].any()
