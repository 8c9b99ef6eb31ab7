"""Server-sent events as they arrive: bytes in, payloads out."""

from __future__ import annotations

MOST_EVENT_BYTES = 1 << 20
"""A longer event is no token of a language model."""


class EventStream:
    """Cuts one response into the ``data`` of its events (WHATWG HTML, section 9.2), whatever pieces it arrives in."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> list[bytes]:
        """Payloads of the events that ``data`` completes. Raises ``ValueError`` for an event beyond all measure."""
        text = self._rest + data
        if b"\r" in text:
            text = text.replace(b"\r\n", b"\n")
        *events, self._rest = text.split(b"\n\n")
        if len(self._rest) > MOST_EVENT_BYTES:
            raise ValueError(f"an event of more than {MOST_EVENT_BYTES:,} bytes")
        return [payload for event in events if (payload := _payload(event)) is not None]

    def end(self) -> list[bytes]:
        """The response is over: the payload of a last event that lacks its empty line."""
        return self.feed(b"\n\n")


def _payload(event: bytes) -> bytes | None:
    """Lines of ``data`` joined; None for a comment or an event without any."""
    if event.startswith(b"data: ") and b"\n" not in event:
        return event[6:]
    lines = [line[5:].removeprefix(b" ") for line in event.split(b"\n") if line.startswith(b"data:")]
    return b"\n".join(lines) if lines else None
