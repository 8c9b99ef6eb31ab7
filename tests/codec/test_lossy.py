"""Lossy codecs against torch's own e4m3 and against their stated error, in every dtype that HBM may hold."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from kvtier.codec.catalogue import codec_named, codec_names, keeping, lossy_codec
from kvtier.codec.lossy import LossyCodec
from kvtier.config import StoreCodec
from kvtier.errors import ConfigError, CorruptFrame, NotEncodable
from kvtier.key import Identity
from kvtier.layout import CacheGroup, GroupKind, Layout
from kvtier.testing.threads import together

TORCH = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
LOSSY = [codec.value for codec in StoreCodec if codec is not StoreCodec.RAW]
LAYERS, TOKENS, HEADS, DIM = 3, 4, 2, 32


def layout(dtype: str, layers: int = LAYERS) -> Layout:
    return Layout((CacheGroup(GroupKind.GQA, layers, HEADS, DIM, dtype),), TOKENS)


def made(name: str, dtype: str = "bf16", layers: int = LAYERS) -> LossyCodec:
    codec = lossy_codec(name, layout(dtype, layers))
    assert codec is not None
    return codec


def block(dtype: str, seed: int, spread: float = 3.0, layers: int = LAYERS) -> torch.Tensor:
    """Values whose heads and elements differ by magnitudes, with zeros, and one head that is zero throughout."""
    generator = torch.Generator().manual_seed(seed)
    shape = (layers, 2, TOKENS, HEADS, DIM)
    values = torch.randn(shape, generator=generator) * torch.exp(spread * torch.randn(shape, generator=generator))
    values *= torch.exp(torch.randn(layers, 2, 1, HEADS, 1, generator=generator))
    values[0, 0, :, 0] = 0
    values[1, 1, 0, 0, :5] = 0
    return values.clamp(-6e4, 6e4).to(TORCH[dtype])


def as_bytes(values: torch.Tensor) -> memoryview:
    return memoryview(bytearray(values.contiguous().view(torch.uint8).numpy().tobytes()))


def encoded(codec: LossyCodec, values: torch.Tensor) -> memoryview:
    into = memoryview(bytearray(b"\xa5" * codec.encoded_bytes(codec.block_bytes)))
    assert codec.encode(as_bytes(values), into) == len(into)
    return into


def trip(codec: LossyCodec, values: torch.Tensor) -> torch.Tensor:
    into = bytearray(b"\xa5" * codec.block_bytes)
    codec.decode(encoded(codec, values), memoryview(into))
    return torch.frombuffer(into, dtype=values.dtype).view(values.shape)


@pytest.mark.parametrize("dtype", TORCH)
@pytest.mark.parametrize("spread", [0.3, 3.0])
def test_fp8_is_what_torch_makes_of_the_scaled_values(dtype: str, spread: float, seed: int) -> None:
    values = block(dtype, seed, spread).float()
    largest = values.abs().amax(dim=(2, 4), keepdim=True)
    scale = torch.exp2(torch.ceil(torch.log2(largest / 448)).clamp(min=-100))
    expected = ((values / scale).to(torch.float8_e4m3fn).float() * scale).clamp(-65504, 65504)
    assert torch.equal(trip(made("fp8", dtype), values.to(TORCH[dtype])), expected.to(TORCH[dtype]))


def test_fp8_knows_every_code() -> None:
    codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    values = torch.nan_to_num(codes, nan=448.0).repeat(LAYERS * 2 * TOKENS * HEADS * DIM // 256)
    values = values.view(LAYERS, 2, TOKENS, HEADS, DIM).to(torch.bfloat16)
    values[:, :, 0, :, 0] = 448  # so that each scale is one
    assert torch.equal(trip(made("fp8"), values), values)


@pytest.mark.parametrize("dtype", TORCH)
def test_a_second_trip_through_fp8_changes_nothing(dtype: str, seed: int) -> None:
    once = trip(made("fp8", dtype), block(dtype, seed))
    assert torch.equal(trip(made("fp8", dtype), once), once)


@pytest.mark.parametrize("dtype", TORCH)
def test_int8_errs_by_half_a_step_of_its_vector(dtype: str, seed: int) -> None:
    values = block(dtype, seed, 1.0)
    back = trip(made("int8", dtype), values).float()
    step = values.float().abs().amax(dim=-1, keepdim=True) / 127 * (1 + 2.0**-7)
    rounding = {"bf16": 2.0**-8, "fp16": 2.0**-11, "fp32": 2.0**-24}[dtype] * back.abs()
    assert ((values.float() - back).abs() <= step / 2 * (1 + 2.0**-10) + rounding).all()
    assert (back[values == 0] == 0).all()


@pytest.mark.parametrize("name", LOSSY)
def test_blocks_are_half_and_a_little(name: str) -> None:
    for dtype, ratio in (("bf16", 2), ("fp16", 2), ("fp32", 4)):
        codec = made(name, dtype)
        elements = codec.block_bytes * ratio // 2 // (2 if dtype != "fp32" else 4)
        assert codec.fixed_ratio
        assert 0 <= codec.encoded_bytes(codec.block_bytes) - codec.block_bytes // ratio <= elements // DIM * 2


@pytest.mark.parametrize("name", LOSSY)
def test_large_blocks_are_turned_in_stretches(name: str, seed: int) -> None:
    """More elements than are turned at a time, and not a multiple of that."""
    layers = (1 << 18) // (TOKENS * HEADS * DIM) + 7
    values = block("bf16", seed, 1.0, layers)
    back = trip(made(name, layers=layers), values)
    for part in (slice(0, LAYERS), slice(layers - LAYERS, layers)):
        assert torch.equal(back[part], trip(made(name), values[part]))


@pytest.mark.parametrize("name", LOSSY)
@pytest.mark.parametrize("odd", [float("nan"), float("inf"), float("-inf"), 1e20])
def test_what_cannot_be_kept_is_refused(name: str, odd: float, seed: int) -> None:
    values = block("bf16", seed)
    values[2, 1, 3, 1, 31] = odd
    with pytest.raises(NotEncodable, match="not finite or beyond"):
        encoded(made(name), values)


@pytest.mark.parametrize("name", LOSSY)
def test_the_largest_of_fp16_stays_finite(name: str) -> None:
    values = torch.full((LAYERS, 2, TOKENS, HEADS, DIM), 65504.0, dtype=torch.float16)
    assert torch.isfinite(trip(made(name, "fp16"), values)).all()


@pytest.mark.parametrize("name", LOSSY)
def test_other_sizes_are_refused(name: str, seed: int) -> None:
    codec = made(name)
    payload = encoded(codec, block("bf16", seed))
    room = memoryview(bytearray(codec.block_bytes))
    with pytest.raises(NotEncodable):
        codec.encode(room[:-2], memoryview(bytearray(len(payload))))
    for wrong, into in ((payload[:-1], room), (memoryview(bytes(payload) + b"\0"), room), (payload, room[:-2])):
        with pytest.raises(CorruptFrame):
            codec.decode(wrong, into)


@pytest.mark.parametrize("name", LOSSY)
def test_any_bytes_of_the_right_length_decode(name: str, seed: int) -> None:
    """Sums guard what is decoded; what slips through is wrong numbers, never a crash or a warning."""
    codec = made(name)
    rng = np.random.default_rng(seed)
    for _ in range(50):
        junk = memoryview(rng.bytes(codec.encoded_bytes(codec.block_bytes)))
        codec.decode(junk, memoryview(bytearray(codec.block_bytes)))


@pytest.mark.parametrize("name", LOSSY)
def test_threads_do_not_mix_their_blocks_up(name: str, seed: int) -> None:
    codec, wrong = made(name), []

    def play(number: int) -> None:
        values = block("bf16", seed + number)
        if any(bytes(encoded(codec, values)) != bytes(encoded(made(name), values)) for _ in range(20)):
            wrong.append(number)

    together(play)
    assert not wrong


LATENT = Layout((CacheGroup(GroupKind.MLA, 2, 1, 576, "bf16"),), 16)


@pytest.mark.parametrize(
    ("shape", "engine_format", "what"),
    [
        (LATENT, None, "the latents of MLA"),
        (replace(layout("bf16"), groups=layout("bf16").groups * 2), None, "2 cache groups"),
        (layout("fp8_e4m3"), None, "a KV cache of fp8_e4m3"),
        (layout("bf16"), "cpu-amx", "the engine's own format 'cpu-amx'"),
    ],
)
def test_layouts_that_no_codec_knows_stop_the_start(shape: Layout, engine_format: str | None, what: str) -> None:
    for name in LOSSY:
        with pytest.raises(ConfigError, match=f"{name} does not know .*{what}.*; leave the store's codec raw"):
            lossy_codec(name, shape, engine_format)
    assert lossy_codec("raw", shape, engine_format) is None


def test_each_codec_is_an_identity_of_its_own() -> None:
    plain = Identity("m", "w", "bf16", layout("bf16"))
    kept = {name.value: keeping(plain, name.value) for name in StoreCodec}
    assert kept["raw"] == plain
    assert len({identity.digest() for identity in kept.values()}) == len(StoreCodec)
    assert kept["fp8"].codec == "fp8(e4m3, 2**n per layer, K/V and head)", "a change of it orphans what is stored"
    assert kept["int8"].codec == "int8(bf16 scale per layer, K/V, token and head)"


def test_numbers_in_frames_tell_all_codecs_apart() -> None:
    numbers = [codec_named(name).number for name in codec_names()] + [made(name).number for name in LOSSY]
    assert len(set(numbers)) == len(numbers)


@pytest.mark.parametrize("name", LOSSY)
def test_a_tier_cannot_have_one(name: str) -> None:
    with pytest.raises(ConfigError, match=rf"belongs to the whole store.*--codec {name}"):
        codec_named(name)
