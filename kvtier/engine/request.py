"""What is asked of the engine, what it gives back, and what it knows of the time in between."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from kvtier.abc.store import NO_HINTS, Hints
from kvtier.engine.sampler import Logprob, SamplingParams
from kvtier.errors import RequestError


class FinishReason(enum.Enum):
    """Why a sequence ended."""

    STOP = "stop"
    """An end-of-sequence token, a stop token or a stop string."""
    LENGTH = "length"
    """``max_tokens``, the model's length, or no slot is left that it could ever get."""
    ABORT = "abort"
    """Whoever asked has gone."""
    ERROR = "error"
    """The engine could not go on; the log says why."""


@dataclass(frozen=True, slots=True)
class Request:
    """One prompt and how it is to be continued."""

    id: str
    """Unique among the engine's unfinished requests, and what none of their continuations is known by."""
    prompt: tuple[int, ...]
    """Token ids, at least one."""
    sampling: SamplingParams = field(default_factory=SamplingParams)
    salt: str | None = None
    """Cache salt: requests share blocks only where their salts are equal. None is not the empty string."""
    tenant: bytes | None = None
    """The tenant's secret, which separates its blocks from all others."""
    hints: Hints = NO_HINTS
    """What is asked of the tiers below HBM for this request's blocks."""
    capture_logits: bool = False
    """Keep the logits that the first token was chosen from, for exactness checks."""

    def known_by(self, index: int) -> str:
        """What the connector knows continuation ``index`` by."""
        return self.id if index == 0 else f"{self.id}/{index}"

    @property
    def names(self) -> frozenset[str]:
        """What its continuations are known by. Connectors keep their books by name, so no two open requests may share one."""
        return frozenset(map(self.known_by, range(self.sampling.n)))

    def check(self, *, vocab: int, max_length: int, sequences: int, spells: bool) -> None:
        """Raise `RequestError` for what an engine can never serve.

        Its token ids are below ``vocab``, its sequences of at most ``max_length`` tokens, ``sequences`` of them at a time;
        ``spells``: it has a tokenizer.
        """
        prompt, sampling = self.prompt, self.sampling
        if not prompt:
            raise RequestError("the prompt is empty: it needs at least one token")
        if min(prompt) < 0 or max(prompt) >= vocab:
            raise RequestError(f"token ids must be from 0 to {vocab - 1}")
        if len(prompt) >= max_length:
            raise RequestError(
                f"the prompt has {len(prompt)} tokens; this engine holds {max_length} per sequence "
                f"(max_model_len, hbm_blocks), and at least one must be left to generate"
            )
        if sampling.max_tokens is not None and len(prompt) + sampling.max_tokens > max_length:
            raise RequestError(
                f"{len(prompt)} prompt tokens and max_tokens of {sampling.max_tokens} are more than the "
                f"{max_length} that this engine holds per sequence"
            )
        if sampling.n > sequences:
            raise RequestError(f"n must be at most {sequences} here, got {sampling.n}")
        if sampling.stop and not spells:
            raise RequestError("stop strings need a tokenizer, which this model lacks; use stop_token_ids")


@dataclass(slots=True)
class RequestStats:
    """Where a request's prompt tokens came from, and when things happened (seconds of the engine's clock).

    ``hbm_tokens + external_tokens + computed_tokens == prompt_tokens`` once the first token is there. Written on the
    engine's thread; whoever reads it while the request runs sees a snapshot that may be a step old.
    """

    prompt_tokens: int
    submitted: float
    hbm_tokens: int = 0
    """Prompt tokens found in HBM."""
    external_tokens: int = 0
    """Prompt tokens that the connector loaded and that arrived."""
    computed_tokens: int = 0
    """Prompt tokens that this request computed."""
    completion_tokens: int = 0
    """Generated tokens, all continuations together."""
    preemptions: int = 0
    demoted_tokens: int = 0
    """Tokens in blocks that were left to the tiers below at a preemption, because that was taken to be cheaper."""
    recomputed_tokens: int = 0
    """Tokens computed again after a preemption."""
    failed_tokens: int = 0
    """Tokens whose load failed and which were computed instead."""
    scheduled: float | None = None
    """When its first step began."""
    first_token: float | None = None
    finished: float | None = None
    first_logits: torch.Tensor | None = None
    """Logits behind the first token, float32 ``[vocab]``, where the request asked for them."""

    @property
    def cached_tokens(self) -> int:
        return self.hbm_tokens + self.external_tokens

    @property
    def ttft(self) -> float | None:
        """Seconds from submission to the first token."""
        return None if self.first_token is None else self.first_token - self.submitted


@dataclass(frozen=True, slots=True)
class Output:
    """What one step added to one continuation of a request."""

    request_id: str
    index: int
    """Which of the ``n`` continuations."""
    tokens: tuple[int, ...]
    text: str
    """Text that may be shown: never part of a stop string; what might become one is held back until it is decided."""
    stats: RequestStats
    """Shared by all outputs of the request."""
    finish: FinishReason | None = None
    last: bool = False
    """No continuation of this request gives anything after this output."""
    logprob: tuple[Logprob, list[Logprob]] | None = None
    """The token's log probability and the best alternatives, where the request asked for them."""


@dataclass(frozen=True, slots=True)
class Completion:
    """All that one continuation gave."""

    request_id: str
    index: int
    tokens: tuple[int, ...]
    text: str
    finish: FinishReason
    stats: RequestStats

    @classmethod
    def of(cls, outputs: Sequence[Output]) -> Completion:
        """Put together what the steps gave; the last of ``outputs`` is the continuation's last."""
        last = outputs[-1]
        assert last.finish is not None, "a continuation without an end"
        tokens = tuple(token for output in outputs for token in output.tokens)
        text = "".join(output.text for output in outputs)
        return cls(last.request_id, last.index, tokens, text, last.finish, last.stats)
