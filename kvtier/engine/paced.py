"""A model that computes nothing and takes its time: steps as long as a formula says, and KV whose every word can be checked.

It stands where `LlamaModel` stands, so that store, gate and back-pressure are driven at the rate of a GPU that is not there.
A block is filled when its last token is computed. Its 64-bit words are a fixed pattern, each xored with a number that the
block's key and the layer give: a block of another key, two layers exchanged, or one flipped bit are told from the right one.
"""

from __future__ import annotations

import hashlib
import struct
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from kvtier.engine.attention import Chunk
from kvtier.engine.model import LayerHook, StepBatch
from kvtier.engine.tally import Pace
from kvtier.engine.tokenizer import Tokenizer, TokenizerSource, Vocabulary

LATE = 1.1
"""A step that takes longer than its time by this factor is late."""
CHECK_WHOLE = 16
"""One of so many loaded blocks is compared word by word; of the others the first and the last word of every layer."""
FORMAT = "paced xor splitmix64"
"""How blocks are made, as identities name it: they are no other engine's."""

_SEED = 20240613
_LETTERS = b"etaoinshrdlucmfwypvbgkjq"
BYTES = 256
"""Columns of logits: what it generates are bytes, whatever its vocabulary."""
_TEMPLATE = (
    "{% if tools %}<tools>{{ tools | tojson }}\n{% endif %}"
    "{% for message in messages %}<{{ message.role }}>{{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)

Words = np.ndarray[tuple[int, ...], np.dtype[np.uint64]]
StepTime = Callable[[Sequence[tuple[int, int]]], float]
"""Seconds of a step, from each sequence's (tokens before, new tokens)."""


@dataclass(frozen=True, slots=True)
class PacedConfig:
    """What an engine asks of a model's config."""

    vocab: int
    max_positions: int
    eos_ids: tuple[int, ...] = ()


class PacedModel:
    """`forward` and `wrong_loads` belong to one thread."""

    def __init__(
        self,
        config: PacedConfig,
        step_time: StepTime,
        clock: Callable[[], float] = time.perf_counter,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.config = config
        self.pace = Pace()
        self._step_time, self._clock, self._sleep = step_time, clock, sleep

    def forward(
        self,
        batch: StepBatch,
        kv: torch.Tensor,
        before_layer: LayerHook | None = None,
        after_layer: LayerHook | None = None,
    ) -> torch.Tensor:
        """Fill the blocks that the step completes, wait for the rest of its time, and return logits ``[wanted rows, 256]``.

        The clock runs once the step's loads have arrived. ``kv`` is contiguous, in the CPU's memory; chunks bring their keys.
        """
        words = _words(kv)
        for layer in range(words.shape[1] if before_layer is not None else 0):
            before_layer(layer)  # type: ignore[misc]  # the range is empty where it is None
        began = self._clock()
        due = self._step_time([(chunk.start, len(chunk.tokens)) for chunk in batch.chunks])
        for chunk in batch.chunks:
            self._fill(chunk, words, kv.shape[3])
        for layer in range(words.shape[1] if after_layer is not None else 0):
            after_layer(layer)  # type: ignore[misc]  # as above
        logits = _logits(batch)
        left = due - (self._clock() - began)
        if left > 0:
            self._sleep(left)
        self.pace.steps += 1
        self.pace.late_steps += self._clock() - began > LATE * due
        return logits

    def wrong_loads(self, batch: StepBatch, kv: torch.Tensor, failed: frozenset[int]) -> frozenset[int]:
        """Slots that ``batch`` has loaded, and that are not known to have ``failed``, with other bytes than theirs."""
        words, size = _words(kv), kv.shape[3]
        wrong = set()
        for chunk in batch.chunks:
            stop = chunk.start // size
            for index in range(stop - chunk.loaded, stop):
                slot = chunk.slots[index]
                if slot not in failed and not self._holds(words[slot], chunk.keys[index]):
                    wrong.add(slot)
        self.pace.wrong_loads += len(wrong)
        return frozenset(wrong)

    def _fill(self, chunk: Chunk, words: Words, block_tokens: int) -> None:
        for index in range(chunk.start // block_tokens, chunk.end // block_tokens):
            block = words[chunk.slots[index]]
            np.bitwise_xor(_pattern(block.shape[1]), _stamps(chunk.keys[index], len(block)), out=block)
            self.pace.filled_blocks += 1

    def _holds(self, block: Words, key: bytes) -> bool:
        """Whether ``block`` ``[layer, word]`` is that of ``key``."""
        whole = self.pace.checked_blocks % CHECK_WHOLE == 0
        self.pace.checked_blocks += 1
        columns = slice(None) if whole else slice(None, None, max(block.shape[1] - 1, 1))
        expected = _pattern(block.shape[1])[columns] ^ _stamps(key, len(block))
        return np.array_equal(block[:, columns], expected)


def byte_tokenizer() -> Tokenizer:
    """One token per byte of UTF-8, and a plain chat template."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    alphabet = {byte: chr(byte) for byte in printable} | {byte: chr(256 + i) for i, byte in enumerate(others)}
    tokens = tuple(alphabet[byte] for byte in range(256))
    return Tokenizer(TokenizerSource(Vocabulary("gpt-2", tokens, (), frozenset()), _TEMPLATE))


def _words(kv: torch.Tensor) -> Words:
    """``kv`` as ``[slot, layer, word]``."""
    slots, layers = kv.shape[:2]
    rows: Words = kv.view(slots, layers, -1).view(torch.int64).numpy().view(np.uint64)
    return rows


_PATTERNS: dict[int, Words] = {}


def _pattern(words: int) -> Words:
    """The same ``words`` numbers in every process, all different."""
    if words not in _PATTERNS:
        _PATTERNS[words] = _mixed(np.arange(words, dtype=np.uint64) + np.uint64(_SEED))
    return _PATTERNS[words]


def _stamps(key: bytes, layers: int) -> Words:
    """A number per layer, ``[layer, 1]``."""
    seed = np.frombuffer(hashlib.blake2b(key, digest_size=8, person=b"kvtier-paced").digest(), dtype="<u8")
    return _mixed(seed + np.arange(layers, dtype=np.uint64))[:, None]


def _mixed(numbers: Words) -> Words:
    """splitmix64 of each (Steele, Lea and Flood, "Fast Splittable Pseudorandom Number Generators", OOPSLA 2014)."""
    state = numbers * np.uint64(0x9E3779B97F4A7C15)
    state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: Words = state ^ (state >> np.uint64(31))
    return mixed


def _logits(batch: StepBatch) -> torch.Tensor:
    """One letter far above all others, chosen by the position of a row's token and the token itself: by the text alone."""
    best = [
        _LETTERS[_draw(position, chunk.tokens[position - chunk.start]) % len(_LETTERS)]
        for chunk in batch.wanted_chunks()
        for position in range(chunk.start, chunk.end)
    ]
    logits = torch.zeros(len(best), BYTES)
    logits[torch.arange(len(best)), torch.tensor(best, dtype=torch.int64)] = 100.0
    return logits


def _draw(position: int, token: int) -> int:
    return int.from_bytes(hashlib.blake2b(struct.pack("<QQ", position, token), digest_size=4).digest(), "little")
