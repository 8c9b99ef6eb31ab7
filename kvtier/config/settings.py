"""The settings: each one a field, with its type, its default and the help of its flag."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import TypeVar

from kvtier.machine import available_memory
from kvtier.quantity import Seconds, format_bytes
from kvtier.url import TierUrl

T = TypeVar("T")
HBM_BLOCKS = 1024
"""Blocks of HBM where nobody says how many."""


class LoadFormat(enum.Enum):
    """Where the weights come from."""

    AUTO = "auto"
    DUMMY = "dummy"


class KvDtype(enum.Enum):
    """What HBM slots hold."""

    AUTO = "auto"
    BF16 = "bf16"
    FP16 = "fp16"
    FP32 = "fp32"


class StoreCodec(enum.Enum):
    """How every tier below HBM keeps blocks."""

    RAW = "raw"
    FP8 = "fp8"
    INT8 = "int8"


class AttentionKernels(enum.Enum):
    """What computes attention."""

    AUTO = "auto"
    TORCH = "torch"
    TRITON = "triton"
    FLASHINFER = "flashinfer"


class GateMode(enum.Enum):
    """Whether blocks are loaded only where that is faster than computing them."""

    ON = "on"
    OFF = "off"


class Preemption(enum.Enum):
    """What becomes of the blocks of a sequence that has to give up its slots."""

    CHEAPER = "cheaper"
    RECOMPUTE = "recompute"
    DEMOTE = "demote"


class LogLevel(enum.Enum):
    """The least severe message that is logged."""

    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


def _default_tiers() -> tuple[TierUrl, ...]:
    quarter = available_memory().nbytes // 4 >> 20 << 20
    return (TierUrl("dram", params={"capacity": format_bytes(max(quarter, 1 << 20))}),)


def _setting(default: T, help_text: str, *, at_least: int | None = None, at_most: int | None = None) -> T:
    """A field with the help of its flag. Its type is the default's, as ``dataclasses.field`` has it."""
    made: T = field(default=default, metadata={"help": help_text, "at_least": at_least, "at_most": at_most})
    return made


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """The bundled engine."""

    model: str = _setting(
        "SmolLM2-135M-Instruct",
        "model: a local folder or GGUF file, a hub id, the bundled SmolLM2, or paced://llama-3-8b?gpu=h100&slow=1, which "
        "computes nothing and takes the time of that GPU",
    )
    model_name: str | None = _setting(
        None, "name of the model in keys and in the API, where the folder's is not wanted"
    )
    revision: str | None = _setting(None, "revision of the weights; without one they are fingerprinted")
    load_format: LoadFormat = _setting(LoadFormat.AUTO, "where weights come from; dummy: random, from the config alone")
    device: str = _setting("auto", "where the model runs: cpu, cuda or cuda:N; auto: a GPU where there is one")
    attention: AttentionKernels = _setting(
        AttentionKernels.AUTO, "attention kernels; auto: Triton's on a GPU, torch's on a CPU"
    )
    kv_dtype: KvDtype = _setting(
        KvDtype.AUTO, "what HBM slots hold; auto: the checkpoint's own 16-bit dtype, else bf16"
    )
    block_tokens: int = _setting(16, "tokens per block", at_least=1)
    hbm_blocks: int | None = _setting(
        None,
        f"blocks that HBM (on a CPU: the engine's own memory) holds; none: {HBM_BLOCKS}, of a paced model less",
        at_least=2,
    )
    hbm_policy: str = _setting(
        "lru", "eviction policy of HBM: lru, fifo, lfu, slru, arc, s3fifo, sieve, wtinylfu, gdsf, ttl or adaptive"
    )
    max_model_len: int | None = _setting(
        None, "longest sequence in tokens; none: what the model was made for", at_least=1
    )
    max_num_seqs: int = _setting(16, "sequences that run at once", at_least=1)
    max_num_batched_tokens: int = _setting(512, "tokens per step; longer prompts are computed in chunks", at_least=1)
    prefix_cache: bool = _setting(default=True, help_text="reuse blocks of earlier requests that are still in HBM")
    longest_prefix_first: bool = _setting(
        default=False,
        help_text="start waiting requests in order of the prefix that they share with what is in HBM or being computed",
    )
    preemption: Preemption = _setting(
        Preemption.CHEAPER,
        "where HBM runs out, the last to arrive gives way: its blocks are demoted to the tiers below or computed again; "
        "cheaper: as the gate judges",
    )
    recompute_sample: float = _setting(
        0.0,
        "share of loads, 0 to 1, of which one block is computed again and compared; what differs is dropped",
        at_least=0,
        at_most=1,
    )
    threads: int = _setting(0, "compute threads; 0: one per core", at_least=0)
    seed: int = _setting(0, "seed of sampling and of dummy weights", at_least=0)


@dataclass(frozen=True, slots=True)
class StoreSettings:
    """What all tiers share."""

    deadline: Seconds = _setting(Seconds(2.0), "longest wait of a request for blocks on their way from a lower tier")
    gate: GateMode = _setting(
        GateMode.ON, "load blocks only where that is faster than computing them, as measured; off: load every hit"
    )
    transfer_threads: int = _setting(4, "threads that move blocks between tiers", at_least=1)
    codec: StoreCodec = _setting(
        StoreCodec.RAW, "how blocks are kept below HBM; fp8 and int8 halve them and are lossy: hits are then not exact"
    )
    drain: Seconds = _setting(Seconds(20.0), "longest wait at shutdown for blocks that a lower tier still lacks")


@dataclass(frozen=True, slots=True)
class ServerSettings:
    """The HTTP server."""

    host: str = _setting("127.0.0.1", "address to listen on")
    port: int = _setting(8000, "port to listen on; 0: any free one", at_least=0, at_most=65535)
    uds: str | None = _setting(None, "Unix socket to listen on instead of host and port")
    record: str | None = _setting(
        None, "new file for a trace of the requests: times, lengths and block keys, never text, for kvtier replay"
    )


@dataclass(frozen=True, slots=True)
class Settings:
    """All settings; the nested ones are the tables of the TOML file."""

    tiers: tuple[TierUrl, ...] = field(
        default_factory=_default_tiers,
        metadata={
            "help": "a tier below HBM, as a URL; repeat it, fastest first (default: dram:// of a quarter of free memory)",
            "flag": "--tier",
        },
    )
    log_level: LogLevel = _setting(LogLevel.INFO, "least severe message that is logged")
    engine: EngineSettings = field(default_factory=EngineSettings)
    store: StoreSettings = field(default_factory=StoreSettings)
    server: ServerSettings = field(default_factory=ServerSettings)
