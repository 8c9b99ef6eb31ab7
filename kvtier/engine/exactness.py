"""The start-up self-test: on this machine, does a prefix hit give the bits of a cold run?

Bit-equality rests on how the installed torch and oneDNN sum on this CPU, so it is measured and not assumed. A cold one-shot
prefill of a seeded prompt is compared with chunked prefills, with hits at several block boundaries, and with a hit in the
company of other sequences: all K and V that they write, and the logits of the last tokens. The first few layers stand for
all, which have the same shapes.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Literal

import torch

from kvtier.engine import attention
from kvtier.engine.attention import Chunk
from kvtier.engine.model import LlamaModel, StepBatch

_TAILS = range(64, attention.STRIDE, 64)
_CONTEXT = 545
"""Prompt length: past the kernel's piece of 512 tokens, and one token past a boundary of common block sizes."""
_CHUNKS = (96, 256)
_COMPANY = (1, 97, 250, 300)
_LAYERS = 4
_SEED = 20240613


def settle(model: LlamaModel, kv_dtype: str, block_tokens: int) -> bool:
    """Give ``model`` the shortest attention padding that is exact on this machine; False where none is.

    Takes about as long as ten layers' prefill of 545 tokens, twice that where only whole strides are exact. On a GPU there is
    no padding to choose.
    """
    if model.placement.device.type != "cpu":
        return self_test(model, kv_dtype, block_tokens)
    short = exact_tails(model)
    for tails in dict.fromkeys((short, (attention.STRIDE,))):
        model.attention_tails = tails
        if self_test(model, kv_dtype, block_tokens):
            return True
    model.attention_tails = short
    return False


def exact_tails(model: LlamaModel) -> tuple[int, ...]:
    """Lengths of a last stride with which attention gives the bits that it gives with a whole one, `STRIDE` included.

    Tried on random numbers with the model's heads: contexts that end in the first and in the second stride, read by single
    tokens and by chunks.
    """
    config = model.config
    generator = torch.Generator().manual_seed(_SEED)
    kv = torch.empty(2 * attention.STRIDE // 64, 1, 2, 64, config.kv_heads, config.head_dim).normal_(
        generator=generator
    )
    queries = torch.empty(64, config.heads, config.head_dim).normal_(generator=generator)
    table = range(len(kv))

    def agrees(tail: int, end: int, count: int) -> bool:
        chunk = Chunk(range(count), end - count, table)
        short, whole = (
            attention.plan([chunk], kv, config.heads, tails)
            for tails in ((tail, attention.STRIDE), (attention.STRIDE,))
        )
        own = queries[:count]
        return torch.equal(attention.attend(own, kv, 0, short), attention.attend(own, kv, 0, whole))

    with torch.inference_mode():
        exact = [
            tail
            for tail in _TAILS
            if all(agrees(tail, end, n) for end in (tail, attention.STRIDE + tail) for n in (1, 13, len(queries)))
        ]
    return (*exact, attention.STRIDE)


def self_test(model: LlamaModel, kv_dtype: str, block_tokens: int) -> bool:
    """Whether chunked runs and prefix hits are bit-equal to a cold one-shot prefill of the same prompt."""
    scene = _Scene(model, kv_dtype, block_tokens)
    last = (scene.length - 1) // block_tokens * block_tokens
    middle = last // 2 // block_tokens * block_tokens
    return (
        scene.agrees(start=0, chunk=_CHUNKS[0])
        and scene.agrees(start=middle, chunk=_CHUNKS[1])
        and scene.agrees(start=last, chunk=scene.length)
        and scene.agrees(start=last, chunk=scene.length, company=[p for p in _COMPANY if p < last])
    )


class _Scene:
    """One prompt, its cold run, and a second tensor to run it in again."""

    def __init__(self, model: LlamaModel, kv_dtype: str, block_tokens: int) -> None:
        chance = random.Random(_SEED)  # noqa: S311 - reproducible on purpose
        self.length = min(_CONTEXT, model.config.max_positions)
        self._model = model.first_layers(_LAYERS)
        self._tokens = [chance.randrange(model.config.vocab) for _ in range(self.length)]
        self._block_tokens = block_tokens
        self._table = range(-(-self.length // block_tokens))
        self._cold = self._model.allocate_kv(len(self._table), block_tokens, kv_dtype)
        self._again = torch.zeros_like(self._cold)
        self._logits = self._model.forward(StepBatch((self._chunk(0, self.length, "all"),)), self._cold)

    def agrees(self, start: int, chunk: int, company: Sequence[int] = ()) -> bool:
        """Run again from ``start`` with the cold run's blocks before it, in chunks, and compare.

        At each position of ``company`` another sequence with the same beginning decodes one token in the same step. Its K and
        V land where the cold run's are, and must be the same.
        """
        self._again.zero_()
        kept = start // self._block_tokens
        self._again[:kept] = self._cold[:kept]
        for begin in range(start, self.length, chunk):
            chunks = [*(self._chunk(p, p + 1) for p in company), self._chunk(begin, min(begin + chunk, self.length))]
            logits = self._model.forward(StepBatch(tuple(chunks)), self._again)
            expected = torch.cat([self._logits[each.end - 1 : each.end] for each in chunks])
            if not torch.equal(logits, expected):
                return False
        return torch.equal(self._again, self._cold)

    def _chunk(self, begin: int, end: int, logits: Literal["last", "all"] = "last") -> Chunk:
        return Chunk(self._tokens[begin:end], begin, self._table, logits)
