"""Rechecks: one block of a load computed again, and compared with what came.

Sums prove that bytes are those that were saved; they cannot prove that the right ones were. A recheck can: the block's tokens
run through the model over the sequence's own earlier blocks, into a spare slot, and K and V are compared before anything that
rests on the load is shown, sampled or saved.
"""

from __future__ import annotations

import logging
import random
from dataclasses import dataclass

import torch

from kvtier.engine.attention import Chunk
from kvtier.engine.model import Model, StepBatch
from kvtier.engine.sequence import Sequence
from kvtier.engine.tally import Tally
from kvtier.pool import Slot

_log = logging.getLogger(__name__)

_ROUNDING = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11, torch.float32: 2.0**-24}
"""Largest relative error of a number rounded to a KV dtype."""
_STORED = 16
_COMPUTED = 2.0**-12


def tolerance(dtype: torch.dtype) -> float:
    """How far two honest copies of a block may lie apart, as a share of the largest number of the same layer, head and kind.

    Where the engine is exact they are bit-equal, decoded blocks included. Elsewhere a block that was made in another batch,
    by decoding, or over other copies of the blocks before it, summed in another order. That makes float32 differences, which
    rounding to the KV dtype turns into differences of whole steps. SmolLM2's 30 layers with every sum deliberately in another
    order come to 4.4 roundings in bf16, 3.1 in fp16, and 2e-5 (324 roundings: the sums' own) in fp32. So `_STORED` roundings
    are allowed, and `_COMPUTED` for the sums: 6.3e-2, 8.1e-3 and 2.4e-4. The measure is the largest number and not each
    element's own, because an error in a sum is as large in its small elements as in its large ones.
    """
    return _STORED * _ROUNDING[dtype] + _COMPUTED


@dataclass(frozen=True, slots=True)
class Recheck:
    """What a step is to compute again: block ``index`` of a sequence."""

    sequence: Sequence
    index: int


class Rechecker:
    """Draws loads, and judges the block that it chose of each. Belongs to the thread that runs steps."""

    def __init__(self, share: float, seed: int, model: Model, kv: torch.Tensor, spare: Slot, tally: Tally) -> None:
        """``share`` of loads, 0 to 1; ``spare`` is a slot of ``kv`` that nobody else writes or reads."""
        self.spare = spare
        self._share = share
        self._random = random.Random(f"recheck {seed}")  # noqa: S311 - draws samples, guards nothing
        self._model, self._kv, self._tally = model, kv, tally

    def draws(self, sequence: Sequence) -> bool:
        """Whether the load that ``sequence`` is about to begin is one of the share: drawn once, and kept until it begins."""
        if sequence.drawn is None:
            sequence.drawn = self._random.random() < self._share
        return sequence.drawn

    def choose(self, sequence: Sequence, start: int, stop: int) -> Recheck:
        """Any of the blocks ``[start, stop)`` that are being loaded."""
        return Recheck(sequence, self._random.randrange(start, stop))

    def judge(self, recheck: Recheck, failed: frozenset[int]) -> int | None:
        """Compute the block again: None where it agrees, else the first block of the sequence that is not to be trusted.

        Layer 0 follows from the block's own tokens alone: where that differs, the block itself is wrong. Where only later
        layers do, it may be the block, or one before it that it was recomputed over: then nothing up to it is trusted, or
        the wrong one would stay and spoil what is computed over it. Nothing is judged where a load failed anyway.
        """
        sequence, index = recheck.sequence, recheck.index
        if not failed.isdisjoint(sequence.slots[: index + 1]):
            return None
        apart = self._apart(sequence, index)
        allowed = tolerance(self._kv.dtype)
        wrong = ~(apart <= allowed)  # a NaN is wrong too
        self._tally.rechecked(differed=bool(wrong.any()))
        if not wrong.any():
            return None
        first = index if wrong[0] else 0
        _log.warning(
            "request %s: block %d of its prompt came from the cache and differs by %.2g when recomputed (rounding: %.2g); "
            "dropped from block %d on, and computed",
            sequence.id,
            index,
            float(apart.max()),
            allowed,
            first,
        )
        return first

    def _apart(self, sequence: Sequence, index: int) -> torch.Tensor:
        """By layer: the largest distance of what was loaded from what was computed, as in `tolerance`."""
        size = self._kv.shape[3]
        tokens = sequence.tokens[index * size : (index + 1) * size]
        table = [*sequence.slots[:index], self.spare]
        self._model.forward(StepBatch((Chunk(tokens, index * size, table, "none"),)), self._kv)
        computed, loaded = self._kv[self.spare].float(), self._kv[sequence.slots[index]].float()
        # Infinities on both sides are equal, and their difference is none.
        distance = torch.where(computed == loaded, 0.0, (computed - loaded).abs()).amax(dim=(2, 4))
        scale = computed.abs().amax(dim=(2, 4))
        return torch.where(distance == 0, 0.0, distance / scale).amax(dim=(1, 2))
