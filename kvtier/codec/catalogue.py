"""Codecs by name."""

from __future__ import annotations

from kvtier.abc.codec import Codec
from kvtier.codec.raw import RawCodec
from kvtier.codec.shuffle_lz4 import ShuffleLz4Codec
from kvtier.codec.zstd import ZstdCodec
from kvtier.errors import ConfigError

_CODECS: tuple[Codec, ...] = (RawCodec(), ShuffleLz4Codec(), ZstdCodec())


def codec_names() -> list[str]:
    return [codec.name for codec in _CODECS]


def codec_named(name: str) -> Codec:
    """Raises ``ConfigError`` that lists the known names. In a URL the plus sign may be a blank."""
    for codec in _CODECS:
        if codec.name == name.replace(" ", "+"):
            return codec
    raise ConfigError(f"unknown codec {name!r}; known: {', '.join(codec_names())}")
