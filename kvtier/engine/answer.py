"""What the OpenAI API answers: whole, or chunk by chunk."""

from __future__ import annotations

import time
import uuid
from abc import ABC, abstractmethod

from kvtier.engine.request import Output, RequestStats


class Answer(ABC):
    """Gathers the outputs of one body's prompts, and says what each adds to a stream.

    Choices are numbered prompt by prompt, ``n`` of each.
    """

    prefix: str
    """How its ids begin."""
    whole_object: str
    chunk_object: str

    def __init__(self, model: str, prompts: int, n: int, usage_in_stream: bool) -> None:
        self.id = f"{self.prefix}-{uuid.uuid4().hex}"
        self.created = int(time.time())
        self.model = model
        self._n = n
        self._usage_in_stream = usage_in_stream
        self._texts: list[list[str]] = [[] for _ in range(prompts * n)]
        self._finish: list[str | None] = [None] * (prompts * n)
        self._stats: dict[int, RequestStats] = {}

    @abstractmethod
    def whole_choice(self, index: int, text: str, finish: str | None) -> dict[str, object]:
        """One choice of a whole answer."""

    @abstractmethod
    def chunk_choice(self, index: int, text: str, finish: str | None) -> dict[str, object]:
        """One choice of a chunk."""

    def opening(self) -> list[dict[str, object]]:
        """Chunks before the first token."""
        return []

    def add(self, prompt: int, output: Output) -> list[dict[str, object]]:
        """Note an output; the chunks that it makes."""
        index = prompt * self._n + output.index
        finish = None if output.finish is None else output.finish.value
        self._texts[index].append(output.text)
        self._finish[index] = finish
        self._stats[prompt] = output.stats
        if not output.text and finish is None:
            return []
        return [self._chunk([self.chunk_choice(index, output.text, finish)])]

    def closing(self) -> list[dict[str, object]]:
        """Chunks after the last token."""
        return [{**self._chunk([]), "usage": self.usage()}] if self._usage_in_stream else []

    def whole(self) -> dict[str, object]:
        """The answer to a request that does not stream."""
        choices = [
            self.whole_choice(index, "".join(parts), self._finish[index]) for index, parts in enumerate(self._texts)
        ]
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

    def _chunk(self, choices: list[dict[str, object]]) -> dict[str, object]:
        chunk = {**self._head(self.chunk_object), "choices": choices}
        return {**chunk, "usage": None} if self._usage_in_stream else chunk

    def _head(self, kind: str) -> dict[str, object]:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}


class TextAnswer(Answer):
    """``/v1/completions``."""

    prefix = "cmpl"
    whole_object = chunk_object = "text_completion"

    def whole_choice(self, index: int, text: str, finish: str | None) -> dict[str, object]:
        return {"index": index, "text": text, "logprobs": None, "finish_reason": finish}

    chunk_choice = whole_choice


class ChatAnswer(Answer):
    """``/v1/chat/completions``."""

    prefix = "chatcmpl"
    whole_object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def whole_choice(self, index: int, text: str, finish: str | None) -> dict[str, object]:
        message = {"role": "assistant", "content": text}
        return {"index": index, "message": message, "logprobs": None, "finish_reason": finish}

    def chunk_choice(self, index: int, text: str, finish: str | None) -> dict[str, object]:
        return self._delta(index, {"content": text} if text else {}, finish)

    def opening(self) -> list[dict[str, object]]:
        return [
            self._chunk([self._delta(index, {"role": "assistant", "content": ""}, None)])
            for index in range(len(self._texts))
        ]

    def _delta(self, index: int, delta: dict[str, str], finish: str | None) -> dict[str, object]:
        return {"index": index, "delta": delta, "logprobs": None, "finish_reason": finish}
