"""``--model paced://llama-3-8b?gpu=h100&utilisation=0.5&slow=1``: from its URL to what an engine runs on.

The engine's model takes a function for the time of a step; this door makes it of the planner's formula.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

from kvtier.config import HBM_BLOCKS, EngineSettings, StoreCodec
from kvtier.engine.paced import BYTES, FORMAT, PacedConfig, PacedModel
from kvtier.errors import ConfigError
from kvtier.key import Identity
from kvtier.params import build_params
from kvtier.quantity import rounded_bytes
from kvtier.sim.models import gpu, model_shape
from kvtier.sim.planner import UTILISATION, Piece, kv_bytes, step_seconds
from kvtier.url import TierUrl

log = logging.getLogger(__name__)

SCHEME = "paced"
MOST_STEP_SECONDS = 3600.0
HBM_BYTES = 512 << 20
"""Memory for HBM slots where nobody says how many."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PacedParams:
    """What may stand behind the ``?`` of a paced model's URL."""

    gpu: str = "h100"
    gpus: int = 1
    """How many of them share every layer."""
    utilisation: float = UTILISATION
    """Share of their peak that prefill reaches."""
    slow: float = 1.0
    """Every step lasts so many times longer: chosen so that this machine can fill blocks in time."""

    def __post_init__(self) -> None:
        if self.gpus < 1:
            raise ValueError("gpus must be at least 1")
        if not 0 < self.utilisation <= 1:
            raise ValueError("utilisation is a share, above 0 and at most 1")
        if self.slow <= 0:
            raise ValueError("slow must be above 0")


@dataclass(frozen=True, slots=True)
class Paced:
    """A paced model and what the engine around it needs to know."""

    model: PacedModel
    identity: Identity
    slot_shape: tuple[int, ...]
    """``[layer, K/V, token, KV head, head dimension]`` of one slot."""
    hbm_blocks: int


def is_paced(model: str) -> bool:
    return model.startswith(f"{SCHEME}://")


def open_paced(settings: EngineSettings, codec: StoreCodec) -> Paced:
    """The model that ``settings.model`` names. Raises ``ConfigError`` for what is wrong in it, or does not go with it."""
    _refuse_others(settings, codec)
    url = TierUrl.parse(settings.model)
    if not (url.host or url.path) or url.port is not None or url.username or url.password:
        raise ConfigError(f"{url}: a paced model looks like paced://llama-3-8b?gpu=h100&utilisation=0.5&slow=1")
    params = build_params(PacedParams, url.params, str(url))
    kv_dtype = "bf16" if settings.kv_dtype.value == "auto" else settings.kv_dtype.value
    shape = model_shape((url.host or "") + url.path, kv_dtype)
    machine = gpu(params.gpu).times(params.gpus)
    if len(shape.groups) != 1 or shape.groups[0].window is not None:
        raise ConfigError(f"{url}: the engine's slots hold layers of one kind without a window; choose another model")

    def step_time(pieces: Sequence[tuple[int, int]]) -> float:
        planned = [Piece(past, tokens) for past, tokens in pieces]
        return params.slow * step_seconds(shape, machine, planned, utilisation=params.utilisation)

    tokens = settings.max_num_batched_tokens
    if step_time([(0, tokens)]) > MOST_STEP_SECONDS:
        raise ConfigError(f"{url}: a step of {tokens} tokens would last more than an hour; choose a smaller slow")
    log.info(
        "%s is paced: it computes nothing, and its steps last as long as on %d x %s at %.0f %% of the peak, times %g; "
        "a step of %d new tokens makes KV at %s/s",
        shape.name,
        params.gpus,
        params.gpu,
        100 * params.utilisation,
        params.slow,
        tokens,
        rounded_bytes(int(kv_bytes(shape, tokens) / step_time([(0, tokens)]))),
    )
    group, layout = shape.groups[0], shape.layout(settings.block_tokens)
    return Paced(
        PacedModel(PacedConfig(max(shape.vocab, BYTES), shape.max_positions), step_time),
        Identity(settings.model_name or f"paced-{shape.name}", SCHEME, kv_dtype, layout, engine_format=FORMAT),
        (group.layers, group.tensors, settings.block_tokens, group.kv_heads, group.head_dim),
        settings.hbm_blocks or min(max(HBM_BYTES // layout.block_bytes, 64), HBM_BLOCKS),
    )


def _refuse_others(settings: EngineSettings, codec: StoreCodec) -> None:
    refused = {
        f"device {settings.device!r}": settings.device not in ("auto", "cpu"),
        "recompute_sample": settings.recompute_sample > 0,
        f"codec {codec.value}": codec is not StoreCodec.RAW,
    }
    for what, given in refused.items():
        if given:
            raise ConfigError(
                f"{what} does not go with a paced model: it runs on the CPU, computes nothing, and compares every bit"
            )
