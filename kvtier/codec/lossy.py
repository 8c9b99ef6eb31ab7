"""Lossy codecs of the whole store: one byte per element of K and V, and what it has to be multiplied by.

``fp8``   e4m3 (4 bits of exponent, 3 of mantissa, up to 448, rounded to nearest even; Micikevicius et al., "FP8 formats for
          deep learning", 2022), under one power of two per layer, K/V and KV head: the least that keeps the largest
          magnitude of the block within 448. Finer scales gained nothing: a float's error is relative at any scale.
``int8``  -127 to 127, under one scale per layer, K/V, token and KV head: the largest magnitude of the vector / 127, rounded
          up to a bfloat16. One scale per head was four times as far (in KL divergence) from what the model says without.

Payload: all scales (``fp8``: int8 exponents, ``int8``: bfloat16), in layout order, then the elements in layout order.
"""

from __future__ import annotations

import math
import threading
from abc import abstractmethod
from collections.abc import Iterator
from typing import Any, TypeAlias

import numpy as np

from kvtier.abc.codec import Codec
from kvtier.errors import ConfigError, CorruptFrame, NotEncodable
from kvtier.layout import CacheGroup, GroupKind, Layout

Floats: TypeAlias = "np.ndarray[Any, np.dtype[np.float32]]"
Array: TypeAlias = "np.ndarray[Any, np.dtype[Any]]"

STRETCH = 1 << 18
"""Elements that are turned at a time: few enough for a core's L2 cache, and enough to hide what a call of numpy costs."""
PLAIN_FORMATS = (None, "rope-pairs")
"""Engine formats whose blocks are in the layout's order, heads whole (the order of dimensions inside a head does not matter)."""
_MOST_EXPONENT = 24
"""Of a scale of ``fp8``. Beyond it (magnitudes of 7.5e9) something is wrong with the block."""
_LEAST_EXPONENT = -100
_LARGEST = np.float32(448 * 2.0**_MOST_EXPONENT)
_E4M3_TO_FP32 = 120
"""e4m3's bits, moved up by 20, are those of the same float32 times 2**-120, subnormals included."""
_SIGN_AND_CODE = np.uint32(0x87F00000)


class LossyCodec(Codec):
    """A codec that knows the layout of what it encodes: ``[layer, K/V, token, kv_head, head_dim]``, one cache group."""

    lossy = True
    fixed_ratio = True
    parameters: str
    """What else decides which bytes come back, for the identity; changes whenever they do."""
    scale_dtype: type[np.generic]

    def __init__(self, layout: Layout, engine_format: str | None = None) -> None:
        """``layout`` is a shard's. Raises ``ConfigError`` where the codec does not know how its blocks are laid out."""
        self._group = _known(self.name, layout, engine_format)
        group = self._group
        self._shape = (layout.block_tokens, group.kv_heads, group.head_dim)
        self._rows = group.layers * group.tensors
        self._row = math.prod(self._shape)
        self.block_bytes = layout.block_bytes
        self._scales_shape = (self._rows, *self._scale_shape(*self._shape[:2]))
        self._scales_bytes = math.prod(self._scales_shape) * np.dtype(self.scale_dtype).itemsize
        self._local = threading.local()

    @classmethod
    def label(cls) -> str:
        """Name and parameters, as they stand in ``Identity.codec``."""
        return f"{cls.name}({cls.parameters})"

    def encoded_bytes(self, raw_bytes: int) -> int:
        """Of a block; of the start of one, what is left over for it. No other size is encoded."""
        return self._scales_bytes + raw_bytes * self._rows * self._row // self.block_bytes

    def encode(self, raw: memoryview, into: memoryview) -> int:
        """Raises ``NotEncodable`` for a block with values that are not finite or larger than 7.5e9, and one of another size."""
        if len(raw) != self.block_bytes:
            raise NotEncodable(f"{self.name}: {len(raw)} bytes are not a block of {self.block_bytes}")
        scales, codes = self._parts(into)
        values = np.frombuffer(raw, _NUMPY[self._group.dtype]).reshape(self._rows, -1)
        for rows, wide, spare in self._stretches():
            _widen(values[rows], wide, self._group.dtype)
            shaped = wide.reshape(-1, *self._shape)
            with np.errstate(all="ignore"):
                largest = self._largest(shaped, spare)
                if not (largest <= _LARGEST).all():
                    raise NotEncodable(f"{self.name}: a value is not finite or beyond {_LARGEST:.2g}")
                scales[rows] = self._encode(shaped, largest, spare, codes[rows])
        return self._scales_bytes + self._rows * self._row

    def decode(self, payload: memoryview, into: memoryview) -> None:
        if len(into) != self.block_bytes or len(payload) != self.encoded_bytes(self.block_bytes):
            raise CorruptFrame(f"{self.name} payload of {len(payload)} bytes for a block of {len(into)}")
        scales, codes = self._parts(payload)
        values = np.frombuffer(into, _NUMPY[self._group.dtype]).reshape(self._rows, -1)
        with np.errstate(all="ignore"):
            for rows, wide, _ in self._stretches():
                self._decode(codes[rows], scales[rows], wide.reshape(-1, *self._shape))
                _narrow(wide, values[rows], self._group.dtype)

    @abstractmethod
    def _scale_shape(self, tokens: int, heads: int) -> tuple[int, ...]:
        """Scales of one layer's K or V."""

    @abstractmethod
    def _largest(self, values: Floats, spare: Array) -> Floats:
        """Largest magnitudes, in the shape of the scales; ``spare`` (float32's size, of the values' shape) may be written."""

    @abstractmethod
    def _encode(self, values: Floats, largest: Floats, spare: Array, codes: Array) -> Array:
        """Write the elements' codes and return the scales. ``values`` may be written."""

    @abstractmethod
    def _decode(self, codes: Array, scales: Array, values: Floats) -> None:
        """Write ``values``."""

    def _parts(self, payload: memoryview) -> tuple[Array, Array]:
        scales = np.frombuffer(payload, self.scale_dtype, math.prod(self._scales_shape)).reshape(self._scales_shape)
        codes = np.frombuffer(payload, np.uint8, self._rows * self._row, self._scales_bytes)
        return scales, codes.reshape(self._rows, -1)

    def _stretches(self) -> Iterator[tuple[slice, Floats, Array]]:
        """Rows (one layer's K or V each) that are turned together, and two buffers for them."""
        step = max(1, STRETCH // self._row)
        wide: Floats | None = getattr(self._local, "wide", None)
        if wide is None:
            wide = self._local.wide = np.empty((min(step, self._rows), self._row), np.float32)
            self._local.spare = np.empty_like(wide)
        for start in range(0, self._rows, step):
            count = min(step, self._rows - start)
            yield slice(start, start + count), wide[:count], self._local.spare[:count]


class Fp8Codec(LossyCodec):
    name = "fp8"
    number = 3
    parameters = "e4m3, 2**n per layer, K/V and head"
    scale_dtype = np.int8

    def _scale_shape(self, tokens: int, heads: int) -> tuple[int, ...]:
        return (heads,)

    def _largest(self, values: Floats, spare: Array) -> Floats:
        magnitudes = spare.reshape(values.shape)
        np.abs(values, out=magnitudes)
        largest: Floats = magnitudes.max(axis=1).max(axis=-1)
        return largest

    def _encode(self, values: Floats, largest: Floats, spare: Array, codes: Array) -> Array:
        exponents: Array = np.ceil(np.log2(largest / np.float32(448)))
        exponents = np.maximum(exponents, _LEAST_EXPONENT).astype(np.int32)
        values *= np.ldexp(np.float32(1), -_E4M3_TO_FP32 - exponents)[:, None, :, None]
        bits = values.reshape(codes.shape).view(np.uint32)
        odd = spare.view(np.uint32)
        np.right_shift(bits, 20, out=odd)
        odd &= np.uint32(1)
        odd += np.uint32(0x7FFFF)
        bits += odd
        bits >>= np.uint32(16)
        upper = spare.view(np.uint16)[:, : codes.shape[1]]  # 16-bit passes cost a fifth of 32-bit ones
        np.copyto(upper, bits, casting="unsafe")
        np.right_shift(upper, 4, out=codes, casting="unsafe")
        codes &= np.uint8(0x7F)
        upper >>= np.uint16(8)
        upper &= np.uint16(0x80)
        np.bitwise_or(codes, upper, out=codes, casting="unsafe")
        return exponents

    def _decode(self, codes: Array, scales: Array, values: Floats) -> None:
        bits = values.reshape(codes.shape).view(np.int32)
        np.copyto(bits, codes.view(np.int8))  # the sign is carried up to where float32 has it
        bits <<= 20
        unsigned = bits.view(np.uint32)
        unsigned &= _SIGN_AND_CODE
        values *= np.ldexp(np.float32(1), np.int32(_E4M3_TO_FP32) + np.minimum(scales, 7))[:, None, :, None]
        beyond = np.maximum(scales, 7) - np.int8(7)
        if beyond.any():  # their factor would not be a float32
            values *= np.ldexp(np.float32(1), beyond.astype(np.int32))[:, None, :, None]


class Int8Codec(LossyCodec):
    name = "int8"
    number = 4
    parameters = "bf16 scale per layer, K/V, token and head"
    scale_dtype = np.uint16

    def _scale_shape(self, tokens: int, heads: int) -> tuple[int, ...]:
        return (tokens, heads)

    def _largest(self, values: Floats, spare: Array) -> Floats:
        magnitudes = spare.reshape(values.shape)
        np.abs(values, out=magnitudes)
        largest: Floats = magnitudes.max(axis=-1)
        return largest

    def _encode(self, values: Floats, largest: Floats, spare: Array, codes: Array) -> Array:
        scales: Array = (largest / np.float32(127)).view(np.uint32)
        scales += np.uint32(0xFFFF)
        scales &= np.uint32(0xFFFF0000)
        exact = scales.view(np.float32)
        exact[exact < 2.0**_LEAST_EXPONENT] = 0
        inverse = np.where(exact > 0, np.float32(1) / exact, np.float32(0))
        values *= inverse[..., None]
        np.rint(values, out=values)
        np.copyto(codes.view(np.int8), values.reshape(codes.shape), casting="unsafe")
        scales >>= np.uint32(16)
        return scales

    def _decode(self, codes: Array, scales: Array, values: Floats) -> None:
        np.copyto(values.reshape(codes.shape), codes.view(np.int8))
        exact = (scales.astype(np.uint32) << np.uint32(16)).view(np.float32)
        values *= exact[..., None]


_NUMPY: dict[str, type[np.generic]] = {"bf16": np.uint16, "fp16": np.float16, "fp32": np.float32}
"""What numpy takes elements of each KV dtype for; bfloat16 it does not know."""


def _known(name: str, layout: Layout, engine_format: str | None) -> CacheGroup:
    def wrong(what: str) -> ConfigError:
        return ConfigError(f"codec: {name} does not know {what}; leave the store's codec raw for this model")

    if len(layout.groups) != 1:
        raise wrong(f"blocks of {len(layout.groups)} cache groups")
    group = layout.groups[0]
    if group.kind is GroupKind.MLA:
        raise wrong("the latents of MLA")
    if group.dtype not in _NUMPY:
        raise wrong(f"a KV cache of {group.dtype}")
    if engine_format not in PLAIN_FORMATS:
        raise wrong(f"the engine's own format {engine_format!r}")
    return group


def _widen(values: Array, wide: Floats, dtype: str) -> None:
    if dtype == "bf16":
        bits = wide.view(np.uint32)
        np.copyto(bits, values)
        bits <<= np.uint32(16)
    else:
        np.copyto(wide, values)


def _narrow(wide: Floats, values: Array, dtype: str) -> None:
    """Round to nearest; what the rounding of a scale has carried beyond fp16's range is its largest number."""
    if dtype == "bf16":
        bits = wide.view(np.uint32)
        bits += np.uint32(0x8000)
        np.copyto(values, wide.view(np.uint16)[:, 1::2])
        return
    if dtype == "fp16":
        np.clip(wide, np.float32(-65504), np.float32(65504), out=wide)
    np.copyto(values, wide, casting="same_kind")
