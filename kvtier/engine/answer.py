"""What the OpenAI API answers: whole, or chunk by chunk."""

from __future__ import annotations

import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TypeAlias

from kvtier.engine.request import Output, RequestStats
from kvtier.engine.sampler import Logprob, SamplingParams
from kvtier.engine.tokenizer import Detokenizer, Tokenizer

NEVER = -9999.0
"""Log probability of a token that cannot come."""
Choice: TypeAlias = "dict[str, object]"
Scored: TypeAlias = "tuple[Logprob, list[Logprob]]"
"""A generated token and the best alternatives at its step."""


class Answer(ABC):
    """Gathers the outputs of one body's prompts, and says what each adds to a stream.

    Choices are numbered prompt by prompt, ``n`` of each. Log probabilities are told of every generated token, also of one
    that ended its choice and is not in the text.
    """

    prefix: str
    """How its ids begin."""
    whole_object: str
    chunk_object: str

    def __init__(
        self, model: str, prompts: int, sampling: SamplingParams, tokenizer: Tokenizer | None, usage_in_stream: bool
    ) -> None:
        n = sampling.n
        self._tokenizer = tokenizer
        self._scored = sampling.logprobs is not None
        self.id = f"{self.prefix}-{uuid.uuid4().hex}"
        self.created = int(time.time())
        self.model = model
        self._n = n
        self._usage_in_stream = usage_in_stream
        self._texts: list[list[str]] = [[] for _ in range(prompts * n)]
        self._told: list[list[Choice]] = [[] for _ in range(prompts * n)]
        self._finish: list[str | None] = [None] * (prompts * n)
        self._stats: dict[int, RequestStats] = {}

    @abstractmethod
    def whole_choice(self, index: int, text: str, finish: str | None, scores: Choice | None) -> Choice:
        """One choice of a whole answer."""

    @abstractmethod
    def chunk_choice(self, index: int, text: str, finish: str | None, scores: Choice | None) -> Choice:
        """One choice of a chunk."""

    @abstractmethod
    def score(self, index: int, scored: Scored) -> Choice:
        """What is told of the next token of a choice."""

    @abstractmethod
    def scores(self, told: Sequence[Choice]) -> Choice:
        """The ``logprobs`` of a choice or of a chunk, of what was told of its tokens."""

    def opening(self) -> list[Choice]:
        """Chunks before the first token."""
        return []

    def add(self, prompt: int, output: Output) -> list[Choice]:
        """Note an output; the chunks that it makes."""
        index = prompt * self._n + output.index
        finish = None if output.finish is None else output.finish.value
        self._texts[index].append(output.text)
        self._finish[index] = finish
        self._stats[prompt] = output.stats
        told = [] if output.logprob is None else [self.score(index, output.logprob)]
        self._told[index] += told
        if not output.text and finish is None and not told:
            return []
        scores = self.scores(told) if self._scored else None
        return [self._chunk([self.chunk_choice(index, output.text, finish, scores)])]

    def closing(self) -> list[Choice]:
        """Chunks after the last token."""
        return [{**self._chunk([]), "usage": self.usage()}] if self._usage_in_stream else []

    def whole(self) -> Choice:
        """The answer to a request that does not stream."""
        choices = []
        for index, parts in enumerate(self._texts):
            scores = self.scores(self._told[index]) if self._scored else None
            choices.append(self.whole_choice(index, "".join(parts), self._finish[index], scores))
        return {**self._head(self.whole_object), "choices": choices, "usage": self.usage()}

    def usage(self) -> dict[str, object]:
        stats = self._stats.values()
        prompt, completion = sum(s.prompt_tokens for s in stats), sum(s.completion_tokens for s in stats)
        hbm, external = sum(s.hbm_tokens for s in stats), sum(s.external_tokens for s in stats)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {"cached_tokens": hbm + external, "hbm_tokens": hbm, "external_tokens": external},
        }

    def _text_of(self, token: int) -> str:
        return f"token_id:{token}" if self._tokenizer is None else self._tokenizer.token_text(token)

    def _chunk(self, choices: list[dict[str, object]]) -> dict[str, object]:
        chunk = {**self._head(self.chunk_object), "choices": choices}
        return {**chunk, "usage": None} if self._usage_in_stream else chunk

    def _head(self, kind: str) -> dict[str, object]:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}


class TextAnswer(Answer):
    """``/v1/completions``."""

    prefix = "cmpl"
    whole_object = chunk_object = "text_completion"

    def __init__(
        self, model: str, prompts: int, sampling: SamplingParams, tokenizer: Tokenizer | None, usage_in_stream: bool
    ) -> None:
        super().__init__(model, prompts, sampling, tokenizer, usage_in_stream)
        self._readers: dict[int, Detokenizer] = {}
        self._lengths = [0] * len(self._texts)

    def whole_choice(self, index: int, text: str, finish: str | None, scores: Choice | None) -> Choice:
        return {"index": index, "text": text, "logprobs": scores, "finish_reason": finish}

    chunk_choice = whole_choice

    def score(self, index: int, scored: Scored) -> Choice:
        chosen, best = scored
        offset = self._lengths[index]
        if self._tokenizer is not None:
            reader = self._readers.setdefault(index, self._tokenizer.detokenizer())
            self._lengths[index] += len(reader.push(chosen.token))
        top: dict[str, float] = {}
        for each in (chosen, *best):
            top.setdefault(self._text_of(each.token), _finite(each.value))
        return {"token": self._text_of(chosen.token), "value": _finite(chosen.value), "top": top, "offset": offset}

    def scores(self, told: Sequence[Choice]) -> Choice:
        names = {"tokens": "token", "token_logprobs": "value", "top_logprobs": "top", "text_offset": "offset"}
        return {listed: [each[name] for each in told] for listed, name in names.items()}


class ChatAnswer(Answer):
    """``/v1/chat/completions``."""

    prefix = "chatcmpl"
    whole_object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def whole_choice(self, index: int, text: str, finish: str | None, scores: Choice | None) -> Choice:
        message = {"role": "assistant", "content": text}
        return {"index": index, "message": message, "logprobs": scores, "finish_reason": finish}

    def chunk_choice(self, index: int, text: str, finish: str | None, scores: Choice | None) -> Choice:
        return self._delta(index, {"content": text} if text else {}, finish, scores)

    def score(self, index: int, scored: Scored) -> Choice:
        del index
        chosen, best = scored
        return {**self._entry(chosen), "top_logprobs": [self._entry(each) for each in best]}

    def scores(self, told: Sequence[Choice]) -> Choice:
        return {"content": list(told), "refusal": None}

    def opening(self) -> list[Choice]:
        return [
            self._chunk([self._delta(index, {"role": "assistant", "content": ""}, None, None)])
            for index in range(len(self._texts))
        ]

    def _entry(self, each: Logprob) -> Choice:
        raw = None if self._tokenizer is None else self._tokenizer.token_bytes(each.token, skip_special=False)
        return {
            "token": self._text_of(each.token),
            "logprob": _finite(each.value),
            "bytes": None if raw is None else list(raw),
        }

    def _delta(self, index: int, delta: dict[str, str], finish: str | None, scores: Choice | None) -> Choice:
        return {"index": index, "delta": delta, "logprobs": scores, "finish_reason": finish}


def _finite(value: float) -> float:
    """JSON has no infinity; what cannot come gets a number that says as much."""
    return max(value, NEVER)
