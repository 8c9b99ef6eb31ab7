"""Choosing the next token: greedy or seeded, each sequence for itself.

A sequence's choice depends on its own logits, its seed and its step alone. Randomness is a counter-based function of
(seed, step), so neither the batch around a sequence nor a preemption changes what it draws.
"""

from __future__ import annotations

import hashlib
import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kvtier.errors import RequestError

MAX_STOP_STRINGS = 16
MAX_STOP_TOKENS = 1024
"""Each is compared with every token, on the thread that all requests share."""
MAX_CHOICES = 128
MAX_LOGPROBS = 20
_SEED_LIMIT = 1 << 63


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How one request wants its tokens chosen, in the terms of the OpenAI API. Bad values raise `RequestError`."""

    temperature: float = 1.0
    """0 is greedy."""
    top_p: float = 1.0
    """Keep the smallest set of best tokens whose probabilities reach this."""
    top_k: int = 0
    """Keep this many best tokens; 0 keeps all."""
    seed: int | None = None
    """Same seed, same prompt: same tokens. None lets the engine draw one."""
    max_tokens: int | None = 16
    """Tokens to generate at most; None: as many as the context has room for."""
    min_tokens: int = 0
    """End-of-sequence and stop strings count only after this many tokens."""
    stop: tuple[str, ...] = ()
    """Texts that end the generation and are left out of it."""
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    n: int = 1
    """Independent continuations of one prompt."""
    logprobs: int | None = None
    """How many alternatives to report with each token; None reports no log probabilities at all."""

    def __post_init__(self) -> None:
        _require(
            math.isfinite(self.temperature) and 0.0 <= self.temperature <= 100.0,
            "temperature",
            "from 0 to 100",
            self.temperature,
        )
        _require(0.0 < self.top_p <= 1.0, "top_p", "above 0 and at most 1", self.top_p)
        _require(self.top_k >= 0, "top_k", "0 (all) or more", self.top_k)
        _require(self.seed is None or -_SEED_LIMIT <= self.seed < _SEED_LIMIT, "seed", "a 64-bit integer", self.seed)
        _require(self.max_tokens is None or self.max_tokens >= 1, "max_tokens", "1 or more", self.max_tokens)
        _require(self.min_tokens >= 0, "min_tokens", "0 or more", self.min_tokens)
        _require(
            self.max_tokens is None or self.min_tokens <= self.max_tokens,
            "min_tokens",
            "at most max_tokens",
            self.min_tokens,
        )
        _require(len(self.stop) <= MAX_STOP_STRINGS, "stop", f"at most {MAX_STOP_STRINGS} strings", len(self.stop))
        _require(all(self.stop), "stop", "non-empty strings", self.stop)
        stop_tokens = len(self.stop_token_ids)
        _require(stop_tokens <= MAX_STOP_TOKENS, "stop_token_ids", f"at most {MAX_STOP_TOKENS} ids", stop_tokens)
        _require(1 <= self.n <= MAX_CHOICES, "n", f"from 1 to {MAX_CHOICES}", self.n)
        _require(
            self.logprobs is None or 0 <= self.logprobs <= MAX_LOGPROBS,
            "logprobs",
            f"0 to {MAX_LOGPROBS}",
            self.logprobs,
        )

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0


def _require(holds: bool, name: str, wanted: str, value: object) -> None:
    if not holds:
        raise RequestError(f"{name} must be {wanted}, got {value!r}")


@dataclass(frozen=True, slots=True)
class Draw:
    """One sequence's turn: what its choice depends on besides its logits."""

    params: SamplingParams
    seed: int = 0
    """The request's own seed, or the one the engine gave it; continuation ``i`` of ``n`` uses `continuation_seed`."""
    step: int = 0
    """How many tokens the sequence has generated before this one."""


@dataclass(frozen=True, slots=True)
class Logprob:
    """A token and the natural logarithm of its probability before temperature and cuts."""

    token: int
    value: float


def continuation_seed(seed: int, index: int) -> int:
    """The seed of continuation ``index`` of a request; the first keeps the request's own."""
    if index == 0:
        return seed
    digest = hashlib.blake2b(struct.pack("<qQ", seed, index), digest_size=8, person=b"kvtier-seed").digest()
    return int.from_bytes(digest, "little") >> 1


def sample(logits: torch.Tensor, draws: Sequence[Draw]) -> list[int]:
    """The next token of every row of ``logits`` (float32 ``[len(draws), vocab]``), which stay as they are."""
    assert len(logits) == len(draws), (logits.shape, len(draws))
    if not draws:
        return []
    best: list[int] = logits.argmax(dim=-1).tolist()
    for row, draw in enumerate(draws):
        if not draw.params.greedy:
            best[row] = _drawn(logits[row], draw)
    return best


def logprobs(logits: torch.Tensor, tokens: Sequence[int], count: int) -> list[tuple[Logprob, list[Logprob]]]:
    """Per row of ``logits``: the chosen token's log probability, and the ``count`` best tokens in falling order."""
    result = []
    for row, token in zip(logits, tokens, strict=True):
        values = torch.log_softmax(row.double(), dim=-1)
        top = values.topk(min(count, len(values)))
        best = [Logprob(i, v) for i, v in zip(top.indices.tolist(), top.values.tolist(), strict=True)]
        result.append((Logprob(token, float(values[token])), best))
    return result


def _drawn(row: torch.Tensor, draw: Draw) -> int:
    """Inverse of the cumulative distribution over the kept tokens, best first, at the uniform number of (seed, step)."""
    params = draw.params
    kept = min(params.top_k, len(row)) if params.top_k else len(row)
    scores, tokens = row.double().sort(descending=True, stable=True)
    scores, tokens = scores[:kept], tokens[:kept]
    cumulative = torch.softmax((scores - scores[0]) / params.temperature, dim=-1).cumsum(dim=-1)
    count = int(torch.searchsorted(cumulative, params.top_p * float(cumulative[-1]))) + 1
    cumulative = cumulative[: min(count, kept)]
    mark = _uniform(draw.seed, draw.step) * float(cumulative[-1])
    index = min(int(torch.searchsorted(cumulative, mark, right=True)), len(cumulative) - 1)
    return int(tokens[index])


def _uniform(seed: int, step: int) -> float:
    """A number in [0, 1) that (seed, step) fix on every machine."""
    digest = hashlib.blake2b(struct.pack("<qQ", seed, step), digest_size=8, person=b"kvtier-draw").digest()
    return (int.from_bytes(digest, "little") >> 11) * 2.0**-53
