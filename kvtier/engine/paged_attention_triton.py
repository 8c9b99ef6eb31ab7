"""Attention over paged K and V on a GPU: the same three functions as `kvtier.engine.attention`, as one Triton kernel.

A program takes a tile of queries of one chunk and one KV head, the query heads of that KV head as neighbouring rows, and
walks the chunk's block table once with running maxima and sums (Dao et al., "FlashAttention-2", 2023). K and V are read
from the slots; nothing is gathered first. Every row walks from position 0 in the same strides, and what the causal mask
hides leaves maxima and sums as they are: so a row gets the same bits whatever is computed beside it in tiles of its height.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import triton
import triton.language as tl

from kvtier.engine.attention import STRIDE, Chunk, token_rows, write

__all__ = ["attend", "plan", "write"]

TILE_ROWS = 64
"""Rows of queries (tokens times query heads of a KV head) per program where a chunk has several tokens."""
DECODE_ROWS = 16
"""The same where every chunk is one token: the least that a matrix unit takes."""
WIDTH = 64
"""Positions of K and V per turn of the loop."""


@dataclass(frozen=True, slots=True)
class TritonPlan:
    """What a step's attention shares between layers."""

    written: torch.Tensor
    """Token rows that K and V of every new token go to, by layer: ``[layers, 2 * tokens]``."""
    tables: torch.Tensor
    """Block tables of all chunks, int32 ``[chunks, blocks]``, short ones filled up with anything."""
    tiles: torch.Tensor
    """int32 ``[tiles, 4]``: chunk, row of the first query, number of queries, position of the first query."""
    rows: int
    """Rows per tile."""


def plan(chunks: Sequence[Chunk], kv: torch.Tensor, heads: int, tails: Sequence[int] = (STRIDE,)) -> TritonPlan:
    """Prepare one step over ``kv`` ``[slot, layer, 2, token, kv_head, head_dim]``. ``tails`` mean nothing here."""
    del tails
    block_tokens, kv_heads = kv.shape[3:5]
    group = triton.next_power_of_2(heads // kv_heads)
    several = any(len(chunk.tokens) > 1 for chunk in chunks)
    rows = max(TILE_ROWS if several else DECODE_ROWS, group)
    most = rows // group
    used = [-(-chunk.end // block_tokens) for chunk in chunks]
    tables = np.zeros((len(chunks), max(used)), np.int32)
    tiles: list[tuple[int, int, int, int]] = []
    first = 0
    for index, chunk in enumerate(chunks):
        tables[index, : used[index]] = chunk.slots[: used[index]]
        count = len(chunk.tokens)
        tiles += [(index, first + at, min(most, count - at), chunk.start + at) for at in range(0, count, most)]
        first += count
    return TritonPlan(
        token_rows(chunks, kv),
        torch.from_numpy(tables).to(kv.device),
        torch.tensor(tiles, dtype=torch.int32).to(kv.device),
        rows,
    )


def attend(queries: torch.Tensor, kv: torch.Tensor, layer: int, step: TritonPlan) -> torch.Tensor:
    """Causal attention of the step's new tokens over everything of theirs in ``kv``, whose dtype products are made in.

    ``queries`` is float32 ``[tokens, heads, head_dim]``, and so is what comes back; rows beyond the step's tokens give zeros.
    The new tokens' own K and V must have been written. Sums are float32, scores scaled by ``head_dim ** -0.5``.
    """
    block_tokens, kv_heads, head_dim = kv.shape[3:]
    heads = queries.shape[1]
    queries = queries.contiguous()
    out = torch.zeros_like(queries)
    paged_attention[len(step.tiles), kv_heads](
        queries,
        kv[:, layer],
        out,
        step.tables,
        step.tiles,
        math.log2(math.e) * head_dim**-0.5,
        kv.stride(0),
        kv.stride(2),
        step.tables.stride(0),
        BLOCK_TOKENS=block_tokens,
        HEADS=heads,
        KV_HEADS=kv_heads,
        GROUP_ROWS=triton.next_power_of_2(heads // kv_heads),
        HEAD_DIM=head_dim,
        DIMS=max(16, triton.next_power_of_2(head_dim)),
        ROWS=step.rows,
        WIDTH=WIDTH,
        WIDEN=not isinstance(paged_attention, triton.JITFunction),  # Triton's interpreter cannot multiply bfloat16
        num_warps=4,
        num_stages=2,
    )
    return out


@triton.jit  # type: ignore[untyped-decorator]  # Triton ships no types
def paged_attention(  # type: ignore[no-untyped-def]  # what it takes is Triton's own
    queries,  # float32 [tokens, HEADS, HEAD_DIM]
    kv,  # one layer of the KV tensor, first slot
    out,  # as queries
    tables,  # int32 [chunks, blocks]
    tiles,  # int32 [tiles, 4]
    scale,  # of scores, times log2(e)
    slot_stride,  # elements from slot to slot
    value_offset,  # elements from a block's K to its V
    table_stride,  # elements from table to table
    BLOCK_TOKENS: tl.constexpr,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    GROUP_ROWS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIMS: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    WIDEN: tl.constexpr,
):
    """One tile of queries against one KV head. ``WIDEN``: factors are rounded as ever, and multiplied as float32."""
    tile = tiles + 4 * tl.program_id(0)
    head = tl.program_id(1)
    table = tables + tl.load(tile) * table_stride
    first = tl.load(tile + 1)
    count = tl.load(tile + 2)
    start = tl.load(tile + 3)
    group: tl.constexpr = HEADS // KV_HEADS

    row = tl.arange(0, ROWS)
    token = row // GROUP_ROWS
    member = row % GROUP_ROWS
    dim = tl.arange(0, DIMS)
    live = ((token < count) & (member < group))[:, None] & (dim < HEAD_DIM)[None, :]
    places = ((first + token) * HEADS + head * group + member)[:, None].to(tl.int64) * HEAD_DIM + dim[None, :]
    query = tl.load(queries + places, mask=live, other=0.0).to(kv.dtype.element_ty)
    if WIDEN:
        query = query.to(tl.float32)

    best = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    mixed = tl.zeros([ROWS, DIMS], tl.float32)
    end = start + count
    for begin in range(0, end, WIDTH):
        position = begin + tl.arange(0, WIDTH)
        written = position < end
        slot = tl.load(table + position // BLOCK_TOKENS, mask=written, other=0).to(tl.int64)
        place = kv + slot * slot_stride + (position % BLOCK_TOKENS) * (KV_HEADS * HEAD_DIM) + head * HEAD_DIM
        there = written[:, None] & (dim < HEAD_DIM)[None, :]  # beyond the end a slot may hold anything, infinities too
        keys = tl.load(place[:, None] + dim[None, :], mask=there, other=0.0)
        values = tl.load(place[:, None] + value_offset + dim[None, :], mask=there, other=0.0)
        if WIDEN:
            keys = keys.to(tl.float32)
        scores = tl.dot(query, tl.trans(keys), input_precision="ieee") * scale
        scores = tl.where(position[None, :] <= (start + token)[:, None], scores, float("-inf"))
        better = tl.maximum(best, tl.max(scores, 1))
        weights = tl.exp2(scores - better[:, None])
        fading = tl.exp2(best - better)
        total = total * fading + tl.sum(weights, 1)
        weights = weights.to(values.dtype)
        if WIDEN:
            weights = weights.to(tl.float32)
            values = values.to(tl.float32)
        mixed = mixed * fading[:, None] + tl.dot(weights, values, input_precision="ieee")
        best = better
    tl.store(out + places, mixed / total[:, None], mask=live)
