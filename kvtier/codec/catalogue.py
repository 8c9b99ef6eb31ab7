"""Codecs by name and by the number that stands in frame headers."""

from __future__ import annotations

from kvtier.abc.codec import Codec
from kvtier.codec.raw import RawCodec
from kvtier.codec.shuffle_lz4 import ShuffleLz4Codec
from kvtier.errors import ConfigError

_CODECS: tuple[Codec, ...] = (RawCodec(), ShuffleLz4Codec())


def codec_names() -> list[str]:
    return [codec.name for codec in _CODECS]


def codec_named(name: str) -> Codec:
    """Raises ``ConfigError`` that lists the known names. In a URL the plus sign may be a blank."""
    return _found([codec for codec in _CODECS if codec.name == name.replace(" ", "+")], repr(name))


def codec_numbered(number: int) -> Codec:
    """Raises ``ConfigError`` that lists the known names."""
    return _found([codec for codec in _CODECS if codec.number == number], f"number {number}")


def _found(codecs: list[Codec], asked: str) -> Codec:
    if not codecs:
        raise ConfigError(f"unknown codec {asked}; known: {', '.join(codec_names())}")
    return codecs[0]
