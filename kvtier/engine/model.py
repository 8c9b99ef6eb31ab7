"""The Llama forward pass over a paged KV tensor: in float32, but for the products of a GPU."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Protocol

import torch
import torch.nn.functional as F

from kvtier.engine import attention
from kvtier.engine.architecture import ModelConfig
from kvtier.engine.attention import Chunk
from kvtier.engine.device import Placement
from kvtier.engine.linear import LEAST_ROWS, Linear
from kvtier.engine.rope import RopeTable, paired, rotate
from kvtier.engine.tally import Pace
from kvtier.layout import Layout

TORCH_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
"""Torch's names for the dtypes that HBM slots may hold."""


def misfit(kv: torch.Tensor, layout: Layout) -> str | None:
    """In what an HBM tensor ``[slot, layer, ...]`` is not laid out as ``layout`` says; None where it is."""
    group = layout.groups[0]
    said = (group.layers, group.tensors, layout.block_tokens, group.kv_heads, group.head_dim)
    there = tuple(kv.shape[1:])
    if (there, kv.dtype, len(layout.groups)) == (said, TORCH_DTYPES.get(group.dtype), 1):
        return None
    return f"blocks are {there} of {kv.dtype}, not {said} of {group.dtype}"


LayerHook = Callable[[int], None]
"""Called with a layer's index."""


@dataclass(frozen=True, slots=True)
class StepBatch:
    """The new tokens of one step, sequence by sequence."""

    chunks: tuple[Chunk, ...]

    def __post_init__(self) -> None:
        for chunk in self.chunks:
            assert len(chunk.tokens), chunk
            assert chunk.start >= 0, chunk

    @property
    def tokens(self) -> int:
        """New tokens of all sequences together."""
        return sum(len(chunk.tokens) for chunk in self.chunks)

    def wanted_rows(self) -> list[int]:
        """Which of the new tokens want logits, in order."""
        rows: list[int] = []
        end = 0
        for chunk in self.chunks:
            begin, end = end, end + len(chunk.tokens)
            rows.extend({"none": range(0), "last": range(end - 1, end), "all": range(begin, end)}[chunk.logits])
        return rows

    def wanted_chunks(self) -> tuple[Chunk, ...]:
        """The chunks cut down to the tokens of `wanted_rows`."""
        return tuple(
            replace(chunk, tokens=chunk.tokens[-1:], start=chunk.end - 1) if chunk.logits == "last" else chunk
            for chunk in self.chunks
            if chunk.logits != "none"
        )


class Bounds(Protocol):
    """What an engine asks of a model's config."""

    @property
    def vocab(self) -> int: ...
    @property
    def max_positions(self) -> int: ...
    @property
    def eos_ids(self) -> tuple[int, ...]: ...


class Model(Protocol):
    """What runs an engine's steps."""

    @property
    def config(self) -> Bounds: ...
    @property
    def pace(self) -> Pace | None:
        """How it keeps its time; None where its steps take what they take."""
        ...

    def forward(
        self,
        batch: StepBatch,
        kv: torch.Tensor,
        before_layer: LayerHook | None = None,
        after_layer: LayerHook | None = None,
    ) -> torch.Tensor:
        """As `LlamaModel.forward`."""
        ...

    def wrong_loads(self, batch: StepBatch, kv: torch.Tensor, failed: frozenset[int]) -> frozenset[int]:
        """Slots that the step of ``batch`` has loaded with other bytes than the model makes, as far as it can tell.

        ``failed`` are those whose loads are known to have failed. A request that rests on a wrong slot is ended.
        """
        ...


@dataclass(frozen=True, slots=True)
class _Layer:
    """Projections; those that follow a norm carry its weight."""

    qkv: Linear
    output: Linear
    gate_up: Linear
    down: Linear
    turned_norms: torch.Tensor | None
    """Norm weights of the heads that rope turns, ``[heads + kv_heads, head_dim]``, queries first; None where there are none.
    They cannot be carried by a projection, because the norm comes after it."""


class LlamaModel:
    """A Llama-family model. `forward` belongs to one thread; everything else is constant after construction."""

    pace: Pace | None = None
    """Its steps take what they take."""

    def __init__(
        self,
        config: ModelConfig,
        tensors: Mapping[str, torch.Tensor],
        placement: Placement = Placement(),  # noqa: B008 - frozen
    ) -> None:
        """``tensors`` by Hugging Face name, as `Checkpoint.tensors` gives them; projections are packed, not kept."""
        self.config = config
        self.placement = placement
        tensors = placement.moved(tensors)
        linear = functools.partial(Linear, dtype=placement.dtype)
        self._embedding = tensors["model.embed_tokens.weight"].to(placement.dtype)
        self._layers = [_layer(tensors, f"model.layers.{index}.", config, linear) for index in range(config.layers)]
        head = tensors["model.embed_tokens.weight" if config.tie_embeddings else "lm_head.weight"].float()
        self._head = linear(head * tensors["model.norm.weight"].float())
        self._rope = RopeTable(config)
        self.attention_tails: tuple[int, ...] = (attention.STRIDE,)
        """Lengths that attention may pad a context's last stride to; `exactness.settle` finds those that are exact here."""

    def first_layers(self, count: int) -> LlamaModel:
        """A model of the first ``count`` layers that shares this one's weights: the same shapes at a fraction of the work."""
        part = copy.copy(self)
        part.config = replace(self.config, layers=min(count, self.config.layers))
        part._layers = self._layers[:count]
        return part

    def allocate_kv(self, slots: int, block_tokens: int, kv_dtype: str) -> torch.Tensor:
        """A zeroed HBM tensor ``[slot, layer, K/V, token, kv_head, head_dim]`` in ``kv_dtype`` (``bf16``, ``fp16``, ``fp32``)."""
        config = self.config
        shape = (slots, config.layers, 2, block_tokens, config.kv_heads, config.head_dim)
        return torch.zeros(shape, dtype=TORCH_DTYPES[kv_dtype], device=self.placement.device)

    @torch.inference_mode()
    def forward(
        self,
        batch: StepBatch,
        kv: torch.Tensor,
        before_layer: LayerHook | None = None,
        after_layer: LayerHook | None = None,
    ) -> torch.Tensor:
        """Run one step: write the new tokens' K and V into ``kv`` and return float32 logits ``[wanted rows, vocab]``.

        ``kv`` is ``[slot, layer, K/V, token, kv_head, head_dim]``, contiguous. Rows of logits come in the order of chunks and
        tokens. ``before_layer(i)`` runs before layer ``i`` reads or writes its slots, ``after_layer(i)`` when it has written
        them. Two chunks of one step must not share a slot that either of them writes.
        """
        config, device, backend = self.config, self.placement.device, self.placement.backend
        assert kv.is_contiguous()
        assert (*kv.shape[1:3], *kv.shape[4:]) == (config.layers, 2, config.kv_heads, config.head_dim), kv.shape
        if not batch.chunks:
            return torch.empty(0, config.vocab, device=device)
        step = backend.plan(batch.chunks, kv, config.heads, self.attention_tails)
        # Of the last layer only K and V of every token are of use, and what the wanted rows see.
        ending = batch.wanted_chunks()
        final = step if ending == batch.chunks else backend.plan(ending, kv, config.heads, self.attention_tails)
        tokens = [token for chunk in batch.chunks for token in chunk.tokens]
        positions = [position for chunk in batch.chunks for position in range(chunk.start, chunk.end)]
        # A small step is filled up here once, not by `Linear` at every call; the spare rows are written nowhere.
        spare = max(LEAST_ROWS - len(tokens), 0)
        hidden = F.embedding(torch.tensor(tokens + tokens[-1:] * spare, device=device), self._embedding).float()
        turns = self._rope.rows(torch.tensor(positions + positions[-1:] * spare)).to(device)
        # Made before the layers are queued: a copy to a device waits for what is queued before it.
        rows = batch.wanted_rows()
        wanted = torch.tensor(rows + rows[-1:] * max(LEAST_ROWS - len(rows), 0), dtype=torch.int64, device=device)
        turned = config.heads + config.kv_heads
        for index, layer in enumerate(self._layers):
            if before_layer is not None:
                before_layer(index)
            qkv = layer.qkv(self._normed(hidden)).view(len(hidden), -1, config.head_dim)
            heads = qkv[:, :turned]
            if layer.turned_norms is not None:
                heads = self._normed(heads).mul_(layer.turned_norms)
            rotated = rotate(heads, turns)
            backend.write(kv, index, rotated[:, config.heads :], qkv[:, turned:], step)
            if after_layer is not None:
                after_layer(index)
            queries = rotated[:, : config.heads]
            if index == config.layers - 1:
                if not rows:
                    return torch.empty(0, config.vocab, device=device)
                queries, hidden, step = queries.index_select(0, wanted), hidden.index_select(0, wanted), final
            hidden += layer.output(backend.attend(queries, kv, index, step).flatten(1))
            gate, up = layer.gate_up(self._normed(hidden)).chunk(2, dim=-1)
            hidden += layer.down(F.silu(gate).mul_(up))
        return self._head(self._normed(hidden))[: len(rows)]

    def wrong_loads(self, batch: StepBatch, kv: torch.Tensor, failed: frozenset[int]) -> frozenset[int]:
        """None: numbers do not tell whose they are."""
        return frozenset()

    def _normed(self, x: torch.Tensor) -> torch.Tensor:
        """Root-mean-square norm but for its weight. The squares are summed in one pass; ``F.rms_norm`` writes them down first."""
        squares: torch.Tensor = torch.linalg.vector_norm(x, dim=-1, keepdim=True).square_()
        return x * squares.div_(x.shape[-1]).add_(self.config.rms_eps).rsqrt_()


def _layer(
    tensors: Mapping[str, torch.Tensor], prefix: str, config: ModelConfig, linear: Callable[..., Linear]
) -> _Layer:
    def tensor(name: str) -> torch.Tensor:
        return tensors[prefix + name].float()

    def weight(name: str) -> torch.Tensor:
        return tensor(f"{name}.weight")

    def projected(kind: str) -> torch.Tensor:
        """Rows of queries, keys and values, in the order in which rope wants them."""
        queries, keys = (paired(tensor(f"self_attn.{name}_proj.{kind}"), config.head_dim) for name in "qk")
        return torch.cat((queries, keys, tensor(f"self_attn.v_proj.{kind}")))

    norms = None
    if config.qk_norm:
        queries, keys = (paired(weight(f"self_attn.{name}_norm"), config.head_dim) for name in "qk")
        norms = torch.cat((queries.expand(config.heads, -1), keys.expand(config.kv_heads, -1)))
    gate_up = torch.cat((weight("mlp.gate_proj"), weight("mlp.up_proj")))
    return _Layer(
        qkv=linear(projected("weight") * weight("input_layernorm"), projected("bias") if config.qkv_bias else None),
        output=linear(weight("self_attn.o_proj")),
        gate_up=linear(gate_up * weight("post_attention_layernorm")),
        down=linear(weight("mlp.down_proj")),
        turned_norms=norms,
    )
