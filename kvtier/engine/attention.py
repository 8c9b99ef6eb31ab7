"""Attention over paged K and V, behind one function: `attend`. Torch, on a CPU or any other device.

What a row of queries gets must not depend on what is computed beside it, or a prefix hit would differ from a cold run in
the last bits. Torch's CPU kernel (``aten/src/ATen/native/cpu/FlashAttentionKernel.cpp``) walks K and V in strides of 512
tokens, and the matrix product of a shorter last stride may sum in another order. So K and V are always read back from the
slots and padded to whole strides, queries to a multiple of `ROWS`, and causality is always an explicit mask. Where a shorter
last stride is as exact (with MKL 2024.2 on AVX2 and AVX-512: 64, 128, 192, 384 and 448 tokens, but not 256 and 320), it
may be used, which is faster: `plan` takes the ones that `kvtier.engine.exactness` has found.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import torch
import torch.nn.functional as F

from kvtier.key import BlockKey

STRIDE = 512
"""Tokens of K and V that the kernel takes at a time."""
PIECE_ROWS = 512
"""Rows of queries per KV head and call of a long chunk at most: shorter pieces compute less of what the mask throws away, and
192 to 767 rows are multiplied in tiles of 64."""
ROWS = 16
"""Queries are padded to a multiple of this many rows."""
SCRATCH_BYTES = 10_000_000
"""Gathered float32 K and V of one call beyond this leave the caches: the batch is cut."""
GROUP = 4
"""Sequences per call once a whole batch would pass `SCRATCH_BYTES`."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """Consecutive new tokens of one sequence in a step: a prompt, a part of one, or a single decoded token."""

    tokens: Sequence[int]
    """Ids of the new tokens; at least one."""
    start: int
    """Position of the first of them: how many tokens of the sequence are in the cache already."""
    slots: Sequence[int]
    """The block table: the HBM slot of each logical block, enough for ``start + len(tokens)`` tokens; more is fine."""
    logits: Literal["none", "last", "all"] = "last"
    """Rows of logits wanted: ``none``, of the ``last`` new token, or of ``all`` of them."""
    keys: Sequence[BlockKey] = field(default=(), compare=False)
    """Names of the table's full blocks, for a model that makes K and V from them; empty where nobody gave any."""
    loaded: int = 0
    """How many blocks right before ``start`` arrive from below during this step."""

    @property
    def end(self) -> int:
        """Tokens of the sequence in the cache once this chunk has run."""
        return self.start + len(self.tokens)


@dataclass(frozen=True, slots=True)
class _Piece:
    """Queries of one chunk whose positions lie in the same stretch, with as much of K and V as the last one sees."""

    first: int
    """Row of its first query among the step's tokens."""
    count: int
    mask: torch.Tensor
    """Additive, ``[rows, width]``, the query heads of a KV head as neighbouring rows."""


@dataclass(frozen=True, slots=True)
class _Prefill:
    """One chunk of several tokens: K and V gathered once, queries piece by piece."""

    blocks: torch.Tensor
    """Block rows to gather, by layer: ``[layers, 2 * blocks]``, those of K before those of V."""
    pieces: tuple[_Piece, ...]


@dataclass(frozen=True, slots=True)
class _Decode:
    """Chunks of one token each, in one padded call with the query heads of a KV head as rows."""

    blocks: torch.Tensor
    """Block rows to gather, by layer: ``[layers, 2 * sequences * blocks]``, those of K before those of V."""
    queries: torch.Tensor
    """Rows of the queries among the step's tokens, ``[sequences]``."""
    mask: torch.Tensor
    """Additive, ``[sequences, 1, 1, width]``."""


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """What a step's attention shares between layers: where tokens go, which rows to gather, masks. Made by `plan`."""

    written: torch.Tensor
    """Token rows that K and V of every new token go to, by layer: ``[layers, 2 * tokens]``, K and V in turn."""
    calls: tuple[_Prefill | _Decode, ...]


class StepPlan(Protocol):
    """What a backend's ``plan`` gives its ``attend``, as far as `write` looks at it."""

    @property
    def written(self) -> torch.Tensor:
        """Token rows that K and V of every new token go to, by layer: ``[layers, 2 * tokens]``, K and V in turn."""
        ...


class AttentionBackend(Protocol):
    """A module with this one's three functions; its plans are its own."""

    def plan(self, chunks: Sequence[Chunk], kv: torch.Tensor, heads: int, tails: Sequence[int] = ..., /) -> Any: ...  # noqa: ANN401 - opaque
    def write(self, kv: torch.Tensor, layer: int, keys: torch.Tensor, values: torch.Tensor, step: Any, /) -> None: ...  # noqa: ANN401 - opaque
    def attend(self, queries: torch.Tensor, kv: torch.Tensor, layer: int, step: Any, /) -> torch.Tensor: ...  # noqa: ANN401 - opaque


def plan(chunks: Sequence[Chunk], kv: torch.Tensor, heads: int, tails: Sequence[int] = (STRIDE,)) -> AttentionPlan:
    """Prepare one step over ``kv`` ``[slot, layer, 2, token, kv_head, head_dim]`` and zero the unused ends of new blocks.

    ``heads`` counts the query heads; ``tails`` are the lengths a last stride may be padded to, rising and up to `STRIDE`.
    """
    for chunk in chunks:
        last, used = divmod(chunk.end, kv.shape[3])
        if used and chunk.start <= last * kv.shape[3]:
            # Stale values there are masked, but infinities among them would still turn sums into NaN.
            kv[chunk.slots[last], :, :, used:] = 0
    with (
        contextlib.nullcontext() if kv.device.type == "cpu" else kv.device
    ):  # a device's context costs every call a little
        return AttentionPlan(token_rows(chunks, kv), _calls(chunks, kv, heads, tails))


def _calls(
    chunks: Sequence[Chunk], kv: torch.Tensor, heads: int, tails: Sequence[int]
) -> tuple[_Prefill | _Decode, ...]:
    calls: list[_Prefill | _Decode] = []
    single: list[tuple[int, Chunk]] = []
    first = 0
    for chunk in chunks:
        if len(chunk.tokens) == 1:
            single.append((first, chunk))
        else:
            calls.append(_prefill(chunk, first, kv, heads // kv.shape[4], tails))
        first += len(chunk.tokens)
    calls.extend(_decode(some, kv, tails) for some in _batches(single, kv, tails))
    return tuple(calls)


def token_rows(chunks: Sequence[Chunk], kv: torch.Tensor) -> torch.Tensor:
    """Rows of ``kv``, seen as rows of one token, that K and V of every new token go to, ``[layers, 2 * tokens]``, in turn."""
    layers, block_tokens = kv.shape[1], kv.shape[3]
    written: list[int] = []
    for chunk in chunks:
        for position in range(chunk.start, chunk.end):
            block, offset = divmod(position, block_tokens)
            written.append(chunk.slots[block] * layers * 2 * block_tokens + offset)
    keys = torch.tensor(written, device=kv.device)
    pairs = torch.stack((keys, keys + block_tokens), dim=1).flatten()
    return _by_layer(pairs, layers, 2 * block_tokens)


def write(kv: torch.Tensor, layer: int, keys: torch.Tensor, values: torch.Tensor, step: StepPlan) -> None:
    """Put the step's new K and V (``[tokens, kv_heads, head_dim]``) into their slots, rounded to the dtype of ``kv``.

    Rows beyond the step's tokens are left out.
    """
    width = kv.shape[4] * kv.shape[5]
    both = torch.stack((keys, values), dim=1).to(kv.dtype).view(-1, width)
    kv.view(-1, width).index_copy_(0, step.written[layer], both[: step.written.shape[1]])


def attend(queries: torch.Tensor, kv: torch.Tensor, layer: int, step: AttentionPlan) -> torch.Tensor:
    """Causal attention of the step's new tokens over everything of theirs in ``kv``, K and V read back from the slots.

    ``queries`` is float32 ``[tokens, heads, head_dim]``, and so is what comes back; rows beyond the step's tokens give zeros.
    The new tokens' own K and V must have been written. Sums are float32, scores scaled by ``head_dim ** -0.5``.
    """
    out = torch.zeros(queries.shape, device=queries.device)
    for call in step.calls:
        keys, values = _gathered(kv, call.blocks[layer], len(call.queries) if isinstance(call, _Decode) else 1)
        if isinstance(call, _Prefill):
            for piece in call.pieces:
                _attend_piece(queries, keys, values, piece, out)
        else:
            _attend_decode(queries, keys, values, call, out)
    return out


def _prefill(chunk: Chunk, first: int, kv: torch.Tensor, group: int, tails: Sequence[int]) -> _Prefill:
    length = max(PIECE_ROWS // _power_of_two(group), ROWS)
    pieces = []
    position = chunk.start
    while position < chunk.end:
        stop = min(chunk.end, (position // length + 1) * length)
        count = stop - position
        last = torch.full((_up(count, ROWS), 1), position)
        last[:count, 0] += torch.arange(count)
        mask = _mask(last.repeat_interleave(group, dim=0), _width(stop, tails))
        pieces.append(_Piece(first + position - chunk.start, count, mask))
        position = stop
    return _Prefill(_blocks([chunk], _width(chunk.end, tails), kv), tuple(pieces))


def _decode(batch: Sequence[tuple[int, Chunk]], kv: torch.Tensor, tails: Sequence[int]) -> _Decode:
    chunks = [chunk for _, chunk in batch]
    most = _width(max(chunk.end for chunk in chunks), tails)
    last = torch.tensor([chunk.start for chunk in chunks]).view(-1, 1, 1, 1)
    return _Decode(_blocks(chunks, most, kv), torch.tensor([first for first, _ in batch]), _mask(last, most))


def _batches(single: list[tuple[int, Chunk]], kv: torch.Tensor, tails: Sequence[int]) -> list[list[tuple[int, Chunk]]]:
    """Cut one-token chunks into calls: all at once while that stays in the caches, else by length in small groups."""
    if not single:
        return []
    most = _width(max(chunk.end for _, chunk in single), tails)
    if len(single) * most * 2 * kv.shape[4] * kv.shape[5] * 4 <= SCRATCH_BYTES:
        return [single]
    ordered = sorted(single, key=lambda item: item[1].end)
    return [ordered[i : i + GROUP] for i in range(0, len(ordered), GROUP)]


def _width(tokens: int, tails: Sequence[int]) -> int:
    """``tokens`` padded: whole strides and one of the tails."""
    whole, rest = divmod(tokens, STRIDE)
    return whole * STRIDE + (next(tail for tail in tails if tail >= rest) if rest else 0)


def _mask(last: torch.Tensor, width: int) -> torch.Tensor:
    """0 for positions up to ``last``, minus infinity after: what a boolean mask becomes inside the kernel."""
    return torch.zeros(*last.shape[:-1], width).masked_fill_(torch.arange(width) > last, float("-inf"))


def _by_layer(rows: torch.Tensor, layers: int, step: int) -> torch.Tensor:
    """Row numbers of layer 0 for all layers, ``[layers, rows]``, where ``step`` rows lie between one layer and the next."""
    return rows + torch.arange(0, layers * step, step, device=rows.device).unsqueeze(1)


def _blocks(chunks: Sequence[Chunk], width: int, kv: torch.Tensor) -> torch.Tensor:
    """Block rows to gather by layer, ``width`` tokens a chunk; short tables are filled up with their own first block."""
    layers, block_tokens = kv.shape[1], kv.shape[3]
    blocks = -(-width // block_tokens)
    table = torch.empty(len(chunks), blocks, dtype=torch.int64)
    for line, chunk in zip(table, chunks, strict=True):
        used = -(-chunk.end // block_tokens)
        line[:used] = torch.tensor(chunk.slots[:used])
        line[used:] = chunk.slots[0]
    keys = table * (layers * 2)
    return _by_layer(torch.stack((keys, keys + 1)).flatten(), layers, 2)


def _gathered(kv: torch.Tensor, blocks: torch.Tensor, sequences: int) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V in float32, each ``[sequences, kv_heads, tokens, head_dim]``."""
    block_tokens, kv_heads, head_dim = kv.shape[3:]
    flat = kv.view(-1, block_tokens * kv_heads * head_dim)
    both = flat.index_select(0, blocks).float().view(2, sequences, -1, kv_heads, head_dim).transpose(2, 3)
    return both[0], both[1]


def _attend_piece(
    queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, piece: _Piece, out: torch.Tensor
) -> None:
    heads, head_dim = queries.shape[1:]
    kv_heads = keys.shape[1]
    group = heads // kv_heads
    rows, width = piece.mask.shape
    own = queries[piece.first : piece.first + piece.count].view(piece.count, kv_heads, group, head_dim).transpose(0, 1)
    own = F.pad(own, (0, 0, 0, 0, 0, rows // group - piece.count)).reshape(1, kv_heads, rows, head_dim)
    result = F.scaled_dot_product_attention(own, keys[:, :, :width], values[:, :, :width], attn_mask=piece.mask)
    result = result.view(kv_heads, -1, group, head_dim)[:, : piece.count]
    out[piece.first : piece.first + piece.count].view(piece.count, kv_heads, group, head_dim).copy_(
        result.transpose(0, 1)
    )


def _attend_decode(
    queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, call: _Decode, out: torch.Tensor
) -> None:
    heads, head_dim = queries.shape[1:]
    count, kv_heads = keys.shape[:2]
    group = heads // kv_heads
    width = call.mask.shape[-1]
    padded = queries.new_zeros(count, kv_heads, _up(group, ROWS), head_dim)
    padded[:, :, :group] = queries.index_select(0, call.queries).view(count, kv_heads, group, head_dim)
    mask = call.mask.expand(-1, 1, padded.shape[2], -1)
    result = F.scaled_dot_product_attention(padded, keys[:, :, :width], values[:, :, :width], attn_mask=mask)
    out.index_copy_(0, call.queries, result[:, :, :group].reshape(count, heads, head_dim))


def _up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


def _power_of_two(number: int) -> int:
    """The least power of two that is not below ``number``."""
    return 1 << (number - 1).bit_length()
