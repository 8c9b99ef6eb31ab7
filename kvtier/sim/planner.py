"""The field's arithmetic: bytes, seconds and shares from the shape of a model, a GPU and a link. Pure functions, no I/O.

Everything is a first-order estimate: products at a stated share of the peak, memory and links at their rated speed, nothing
overlapped. Sizes are bytes, times seconds, speeds bytes or operations per second.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from kvtier.layout import CacheGroup, Layout

UTILISATION = 0.5
"""Share of a GPU's peak that prefill reaches where nobody says otherwise: 0.4 to 0.6 is what large models see in practice."""

PUBLISHED_SLAB_SHARES = {"reserve the longest": 0.204, "reserve a power of two": 0.268, "reserve as if foretold": 0.382}
"""Share of KV memory that held tokens under three slab allocators (Kwon et al., "Efficient Memory Management for Large
Language Model Serving with PagedAttention", SOSP 2023, figure 2: Orca Max, Pow2 and Oracle on ShareGPT)."""
PUBLISHED_PAGED_SHARE = 0.963
"""The same for paged blocks of 16 tokens, from the same figure."""


@dataclass(frozen=True, slots=True)
class ModelShape:
    """What the arithmetic needs of a model."""

    name: str
    groups: tuple[CacheGroup, ...]
    """What it keeps per token."""
    parameters: int
    """All weights."""
    active: int
    """Weights that one token is multiplied with; all of them but in a mixture of experts."""
    heads: int
    """Query heads of one layer."""
    qk_dim: int
    """Elements of a query head, as prefill multiplies it with a key."""
    v_dim: int
    """Elements of a value head."""
    max_positions: int
    vocab: int
    experts: int = 0
    """Routed experts of a layer; 0 for a dense model."""
    experts_per_token: int = 0
    weight_bytes_each: float = 2.0
    """Bytes of one weight: 2 for bf16, 1 for fp8."""
    source: str = ""

    def layout(self, block_tokens: int) -> Layout:
        return Layout(self.groups, block_tokens)

    @property
    def layers(self) -> int:
        return sum(group.layers for group in self.groups)

    @property
    def weight_bytes(self) -> float:
        return self.parameters * self.weight_bytes_each


@dataclass(frozen=True, slots=True)
class Gpu:
    """One accelerator, or several that act as one (`times`)."""

    name: str
    flops: float
    """Peak dense bf16 operations per second, without sparsity."""
    memory: float
    """HBM in bytes."""
    memory_bandwidth: float
    pcie: float
    """To the host, in one direction."""
    nvlink: float | None
    """To other GPUs, in one direction; None where there is none."""
    hourly: float
    """Assumed price in USD."""
    source: str = ""
    count: int = 1

    def times(self, count: int) -> Gpu:
        """``count`` of them that share every layer (tensor parallelism), without the cost of talking to each other."""
        return replace(
            self,
            count=self.count * count,
            flops=self.flops * count,
            memory=self.memory * count,
            memory_bandwidth=self.memory_bandwidth * count,
            pcie=self.pcie * count,
            nvlink=None if self.nvlink is None else self.nvlink * count,
            hourly=self.hourly * count,
        )


@dataclass(frozen=True, slots=True)
class Link:
    """A way for blocks: a bus, a network, a tier."""

    name: str
    bandwidth: float
    latency: float = 0.0
    """Seconds before the first byte."""
    source: str = ""


@dataclass(frozen=True, slots=True)
class Piece:
    """One sequence's part of a step: ``tokens`` new ones behind ``past`` that have their KV."""

    past: int
    tokens: int


def kv_bytes(shape: ModelShape, tokens: int) -> int:
    """Bytes of K and V of ``tokens`` tokens: 2 x layers x KV heads x head dimension x bytes each per token, MLA's latent once.

    A sliding window keeps no more than its width. Source: Shazeer, "Fast Transformer Decoding" (2019) for what heads share;
    DeepSeek-AI, "DeepSeek-V2" (2024) for the latent.
    """
    return sum(group.bytes_per_token * min(tokens, group.window or tokens) for group in shape.groups)


def blocks_in(nbytes: float, shape: ModelShape, block_tokens: int) -> int:
    """Whole blocks that ``nbytes`` hold."""
    return int(max(nbytes, 0) // shape.layout(block_tokens).block_bytes)


def weight_flops(shape: ModelShape, tokens: int) -> float:
    """2 x active parameters x tokens: a multiplication and an addition per weight (Kaplan et al., "Scaling Laws", 2020)."""
    return 2.0 * shape.active * tokens


def attention_flops(shape: ModelShape, piece: Piece) -> float:
    """2 x heads x (query + value elements) for every pair of a new token and one at or before it, in every layer.

    Source: Chowdhery et al., "PaLM" (2022), appendix B, halved for the causal mask; a window bounds the pairs of its layers.
    """
    total = 0.0
    for group in shape.groups:
        total += group.layers * _pairs(piece, group.window) * 2.0 * shape.heads * (shape.qk_dim + shape.v_dim)
    return total


def _pairs(piece: Piece, window: int | None) -> float:
    """Tokens seen, summed over the new tokens; each sees itself, all before it, and no more than a window."""
    past, new = piece.past, piece.tokens
    whole = new * past + new * (new + 1) / 2
    if window is None or past + new <= window:
        return whole
    growing = min(max(window - past, 0), new)
    return growing * past + growing * (growing + 1) / 2 + (new - growing) * window


def prefill_seconds(
    shape: ModelShape, gpu: Gpu, tokens: int, *, past: int = 0, utilisation: float = UTILISATION, attention: bool = True
) -> float:
    """Time to compute ``tokens`` behind ``past``: operations / (peak x utilisation), or the time to read the weights if longer.

    ``attention=False`` leaves the part out that grows with the square of the context, as rules of thumb do.
    Source: Pope et al., "Efficiently Scaling Transformer Inference" (2022).
    """
    piece = Piece(past, tokens)
    flops = weight_flops(shape, tokens) + (attention_flops(shape, piece) if attention else 0.0)
    return max(flops / (gpu.flops * utilisation), step_bytes(shape, [piece]) / gpu.memory_bandwidth)


def step_seconds(shape: ModelShape, gpu: Gpu, pieces: Sequence[Piece], *, utilisation: float = UTILISATION) -> float:
    """Time of one step of continuous batching over ``pieces``: compute or memory, whichever takes longer (a roofline).

    Source: Williams, Waterman and Patterson, "Roofline" (2009), applied as in Pope et al. (2022).
    """
    if not pieces:
        return 0.0
    flops = weight_flops(shape, sum(piece.tokens for piece in pieces))
    flops += sum(attention_flops(shape, piece) for piece in pieces)
    return max(flops / (gpu.flops * utilisation), step_bytes(shape, pieces) / gpu.memory_bandwidth)


def step_bytes(shape: ModelShape, pieces: Sequence[Piece]) -> float:
    """Bytes that a step reads from HBM: the weights it touches once, and every sequence's KV once."""
    tokens = sum(piece.tokens for piece in pieces)
    kv = sum(kv_bytes(shape, piece.past + piece.tokens) for piece in pieces)
    return weights_touched(shape, tokens) * shape.weight_bytes_each + kv


def weights_touched(shape: ModelShape, tokens: int) -> float:
    """Weights that a step of ``tokens`` reads: all, or in a mixture of experts the expected share of those routed to.

    With ``k`` of ``E`` experts chosen evenly, a step of ``n`` tokens touches 1 - (1 - k/E)^n of them.
    """
    if shape.experts <= shape.experts_per_token:  # dense, or each token goes to all of them
        return float(shape.parameters)
    routed = (shape.parameters - shape.active) / (shape.experts - shape.experts_per_token) * shape.experts
    touched = 1.0 - (1.0 - shape.experts_per_token / shape.experts) ** tokens
    return shape.parameters - routed + routed * touched


def decode_seconds(shape: ModelShape, gpu: Gpu, context: int, batch: int, *, utilisation: float = UTILISATION) -> float:
    """Time of one step in which ``batch`` sequences of ``context`` tokens get one token each."""
    return step_seconds(shape, gpu, [Piece(max(context - 1, 0), 1)] * batch, utilisation=utilisation)


def transfer_seconds(nbytes: float, link: Link) -> float:
    """``latency + bytes / bandwidth``."""
    return link.latency + nbytes / link.bandwidth


def swap_seconds(nbytes: float, link: Link) -> float:
    """There and back again, as preemption by swapping moves blocks (Kwon et al., SOSP 2023, section 4.5)."""
    return 2 * transfer_seconds(nbytes, link)


def break_even_bandwidth(
    shape: ModelShape, gpu: Gpu, context: int, *, utilisation: float = UTILISATION, attention: bool = True
) -> float:
    """Speed at which loading ``context`` tokens takes as long as computing them: bytes per token x prefill tokens per second."""
    seconds = prefill_seconds(shape, gpu, context, utilisation=utilisation, attention=attention)
    return kv_bytes(shape, context) / seconds


def break_even_tokens(shape: ModelShape, gpu: Gpu, link: Link, *, utilisation: float = UTILISATION) -> int | None:
    """Shortest prefix that loads over ``link`` in less time than its products take; None where no prompt is long enough.

    Latency and attention's square make it a length: what is saved grows faster than what is moved. The time to read the weights
    is not saved, because what follows the prefix has to be computed anyway.
    """

    def gained(tokens: int) -> bool:
        flops = weight_flops(shape, tokens) + attention_flops(shape, Piece(0, tokens))
        return transfer_seconds(kv_bytes(shape, tokens), link) < flops / (gpu.flops * utilisation)

    low, high = 0, shape.max_positions  # not worth it, worth it
    if not gained(high):
        return None
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if gained(middle) else (middle, high)
    return high


def paged_useful_share(tokens: float, block_tokens: int) -> float:
    """Share of a sequence's blocks that hold tokens: its last block is half empty on average (Kwon et al., SOSP 2023)."""
    return tokens / (tokens + (block_tokens - 1) / 2)


def slab_useful_share(prompt: float, output: float, reserved: float, *, spread: float = 0.0) -> float:
    """Share of ``reserved`` tokens' room that holds tokens, over the life of a sequence that grows by ``output``.

    ``spread`` is the standard deviation of ``output``: long outputs live longer, so what is held at a random moment is
    prompt + (output^2 + spread^2) / (2 x output).
    """
    held = prompt + (output + spread * spread / output) / 2 if output else prompt
    return min(held / reserved, 1.0)


@dataclass(frozen=True, slots=True)
class Disaggregation:
    """Prefill and decode on GPUs of their own, beside both on one."""

    prefill_seconds: float
    """Of one request."""
    ship_seconds: float
    """Its KV from the one to the other."""
    step_seconds: float
    """One decode step of the whole batch."""
    stall_seconds: float
    """What other requests' prefills add to one request's decode where both run on one GPU."""
    prefill_share: float
    """Prefill GPUs per decode GPU that keep each other busy."""
    bandwidth: float
    """What the link must carry for one decode GPU."""
    cost: float
    """Assumed USD of one request."""

    @property
    def pays(self) -> bool:
        """A request waits less for its KV to be shipped than for other requests' prefills."""
        return self.ship_seconds < self.stall_seconds


def disaggregate(
    shape: ModelShape,
    prefill: Gpu,
    decode: Gpu,
    link: Link,
    *,
    context: int,
    output: int,
    batch: int,
    utilisation: float = UTILISATION,
) -> Disaggregation:
    """What it takes to serve requests of ``context`` and ``output`` tokens with ``batch`` of them decoding at once.

    In steady state a request sees one prefill of every other one that runs beside it. Source: Zhong et al., "DistServe"
    (OSDI 2024), for the interference; Patel et al., "Splitwise" (ISCA 2024), for unlike GPUs.
    """
    prefilling = prefill_seconds(shape, prefill, context, utilisation=utilisation)
    shared = prefill_seconds(shape, decode, context, utilisation=utilisation)
    step = decode_seconds(shape, decode, context + output // 2, batch, utilisation=utilisation)
    life = output * step
    return Disaggregation(
        prefill_seconds=prefilling,
        ship_seconds=transfer_seconds(kv_bytes(shape, context), link),
        step_seconds=step,
        stall_seconds=(batch - 1) * shared,
        prefill_share=prefilling * batch / life,
        bandwidth=kv_bytes(shape, context) * batch / life,
        cost=(prefilling * prefill.hourly + life / batch * decode.hourly) / 3600,
    )


def colocated_cost(
    shape: ModelShape, gpu: Gpu, *, context: int, output: int, batch: int, utilisation: float = UTILISATION
) -> float:
    """Assumed USD of one request where one GPU does both."""
    step = decode_seconds(shape, gpu, context + output // 2, batch, utilisation=utilisation)
    seconds = prefill_seconds(shape, gpu, context, utilisation=utilisation) + output * step / batch
    return seconds * gpu.hourly / 3600
