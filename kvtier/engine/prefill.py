"""What prefill takes, as far as steps tell it."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from kvtier.engine.scheduler import Work

MOST_DECODING = 1 / 8
"""Share of decoding rows up to which a step is taken for prefill: each of them costs about as much as a prompt token."""


class PrefillTimes:
    """Turns the steps of an engine into what they say of the time that prefill takes.

    Steps in which sequences decode say little of it and are left out, unless prompt tokens outnumber those by far. Time in
    which a step waited for loads is none of prefill's. Where the device runs behind the host (``behind``), a step has ended
    when its logits are fetched: steps up to that are told as one, and those that loads hold up on the device are left out.
    """

    def __init__(self, report: Callable[[int, float], None], *, behind: bool) -> None:
        """``report`` is given the tokens and seconds of a step."""
        self._report = report
        self._behind = behind
        self._began: float | None = None
        self._seconds = 0.0
        self._steps = self._prompt = self._decoding = 0
        self._fetched = self._spoilt = False

    def computed(self, work: Sequence[Work], began: float, ended: float, waited: float, *, loads: bool) -> None:
        """A step ran from ``began`` to ``ended`` (of ``time.perf_counter``), and ``waited`` so long for its ``loads``."""
        decoding = sum(_decodes(each) for each in work)
        self._began = began if self._began is None else self._began
        self._seconds = ended - self._began - waited
        self._steps += 1
        self._prompt += sum(each.count for each in work) - decoding
        self._decoding += decoding
        self._fetched = not self._behind or any(each.samples for each in work)
        self._spoilt |= loads and self._behind

    def noted(self) -> None:
        """The results of that step have been noted."""
        if not self._fetched or self._began is None:
            return
        seconds = time.perf_counter() - self._began if self._behind else self._seconds
        if not self._spoilt and self._prompt and self._decoding <= MOST_DECODING * self._prompt and seconds > 0:
            self._report((self._prompt + self._decoding) // self._steps, seconds / self._steps)
        self._began, self._spoilt = None, False
        self._steps = self._prompt = self._decoding = 0


def _decodes(work: Work) -> bool:
    return work.count == 1 and work.start >= len(work.sequence.group.request.prompt)
