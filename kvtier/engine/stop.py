"""Stop strings in a stream of text: nothing of one is ever let out."""

from __future__ import annotations

from collections.abc import Sequence


class StopMatcher:
    """Lets text through until a stop string appears, holding back whatever may still become one."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""

    def push(self, text: str) -> tuple[str, bool]:
        """Text that is safe to show now, and whether a stop string is complete (then nothing may follow)."""
        if not self._stops:
            return text, False
        self._held += text
        found = [start for start in (self._held.find(stop) for stop in self._stops) if start >= 0]
        if found:
            shown, self._held = self._held[: min(found)], ""
            return shown, True
        keep = max(self._overlap(stop) for stop in self._stops)
        cut = len(self._held) - keep
        shown, self._held = self._held[:cut], self._held[cut:]
        return shown, False

    def finish(self) -> str:
        """What was held back and did not become a stop string."""
        shown, self._held = self._held, ""
        return shown

    def _overlap(self, stop: str) -> int:
        """Length of the longest end of the held text that ``stop`` begins with."""
        for length in range(min(len(stop) - 1, len(self._held)), 0, -1):
            if self._held.endswith(stop[:length]):
                return length
        return 0
