"""Attention over paged K and V by FlashInfer: the same three functions as `kvtier.engine.attention`.

Its prefill wrapper takes chunks of any length over a table of pages, and pages that lie apart by any stride: a layer of the
KV tensor is a pair of such views, so nothing is copied. Imported only where ``flashinfer`` is installed and asked for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import flashinfer
import torch

from kvtier.engine.attention import STRIDE, Chunk, token_rows, write

__all__ = ["attend", "plan", "write"]

_WORKSPACE_BYTES = 128 << 20
"""What FlashInfer recommends for its split work."""
_workspaces: dict[torch.device, torch.Tensor] = {}


@dataclass(frozen=True, slots=True)
class FlashInferPlan:
    """What a step's attention shares between layers."""

    written: torch.Tensor
    """Token rows that K and V of every new token go to, by layer: ``[layers, 2 * tokens]``."""
    wrapper: Any
    """FlashInfer's own plan."""
    tokens: int
    """New tokens of the step."""


def plan(chunks: Sequence[Chunk], kv: torch.Tensor, heads: int, tails: Sequence[int] = (STRIDE,)) -> FlashInferPlan:
    """Prepare one step over ``kv`` ``[slot, layer, 2, token, kv_head, head_dim]``. ``tails`` mean nothing here."""
    del tails
    block_tokens, kv_heads, head_dim = kv.shape[3:]
    pages = [-(-chunk.end // block_tokens) for chunk in chunks]
    slots = [slot for chunk, used in zip(chunks, pages, strict=True) for slot in chunk.slots[:used]]

    def numbers(values: Sequence[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32).to(kv.device)

    if kv.device not in _workspaces:
        _workspaces[kv.device] = torch.zeros(_WORKSPACE_BYTES, dtype=torch.uint8, device=kv.device)
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(_workspaces[kv.device], "NHD")
    counts = [len(chunk.tokens) for chunk in chunks]
    wrapper.plan(
        numbers([0, *accumulate(counts)]),
        numbers([0, *accumulate(pages)]),
        numbers(slots),
        numbers([(chunk.end - 1) % block_tokens + 1 for chunk in chunks]),
        heads,
        kv_heads,
        head_dim,
        block_tokens,
        causal=True,
        sm_scale=head_dim**-0.5,
        q_data_type=kv.dtype,
        kv_data_type=kv.dtype,
    )
    return FlashInferPlan(token_rows(chunks, kv), wrapper, sum(counts))


def attend(queries: torch.Tensor, kv: torch.Tensor, layer: int, step: FlashInferPlan) -> torch.Tensor:
    """As `kvtier.engine.attention.attend`, with factors in the dtype of ``kv``."""
    out = torch.zeros(queries.shape, device=queries.device)
    own = queries[: step.tokens].to(kv.dtype).contiguous()
    out[: step.tokens] = step.wrapper.run(own, (kv[:, layer, 0], kv[:, layer, 1]))
    return out
