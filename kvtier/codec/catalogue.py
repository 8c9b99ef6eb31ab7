"""Codecs by name: those of a tier, which give back what they took, and those of the whole store, which do not."""

from __future__ import annotations

from dataclasses import replace

from kvtier.abc.codec import Codec
from kvtier.codec.lossy import Fp8Codec, Int8Codec, LossyCodec
from kvtier.codec.raw import RawCodec
from kvtier.codec.shuffle_lz4 import ShuffleLz4Codec
from kvtier.codec.zstd import ZstdCodec
from kvtier.errors import ConfigError
from kvtier.key import Identity
from kvtier.layout import Layout

_CODECS: tuple[Codec, ...] = (RawCodec(), ShuffleLz4Codec(), ZstdCodec())
_LOSSY: dict[str, type[LossyCodec]] = {codec.name: codec for codec in (Fp8Codec, Int8Codec)}


def codec_names() -> list[str]:
    """Of the codecs that a tier may have."""
    return [codec.name for codec in _CODECS]


def codec_named(name: str) -> Codec:
    """A tier's codec. Raises ``ConfigError`` that lists the known names. In a URL the plus sign may be a blank."""
    for codec in _CODECS:
        if codec.name == name.replace(" ", "+"):
            return codec
    if name in _LOSSY:
        raise ConfigError(
            f"codec {name!r} is lossy, so it belongs to the whole store and not to one tier: leave it out of the URL "
            f"and set --codec {name} (KVTIER_CODEC, or codec in [store])"
        )
    raise ConfigError(f"unknown codec {name!r}; known: {', '.join(codec_names())}")


def lossy_codec(name: str, layout: Layout, engine_format: str | None = None) -> LossyCodec | None:
    """The codec of a whole store for a shard's ``layout``; None for ``raw``. Raises ``ConfigError`` where it cannot be."""
    return None if name == RawCodec.name else _LOSSY[name](layout, engine_format)


def keeping(identity: Identity, name: str) -> Identity:
    """``identity`` for a store with that codec: what was kept by another never matches."""
    return replace(identity, codec=None if name == RawCodec.name else _LOSSY[name].label())
