"""How the pieces become an engine: settings in, a model over HBM slots over the configured tiers out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from kvtier.abc.connector import KVConnector
from kvtier.config import EngineSettings
from kvtier.engine.checkpoint import Checkpoint, effective_kv_dtype, open_checkpoint
from kvtier.engine.engine import Engine, EngineConfig
from kvtier.engine.model import TORCH_DTYPES, LlamaModel
from kvtier.engine.scheduler import Limits
from kvtier.engine.tokenizer import Tokenizer
from kvtier.errors import ConfigError
from kvtier.key import Identity
from kvtier.metrics import Metrics
from kvtier.policy.lru import LruPolicy
from kvtier.pool import BlockPool
from kvtier.storage_backends.hbm import HbmMedium


@dataclass(frozen=True, slots=True)
class Hbm:
    """The engine's blocks: the medium that holds their bytes, and the pool that numbers them."""

    medium: HbmMedium
    pool: BlockPool


Connect = Callable[[Identity, Hbm], KVConnector | None]
"""Makes the connector to the tiers below, once identity and HBM are known; None: nothing below HBM."""


def open_engine(
    settings: EngineSettings,
    connect: Connect | None = None,
    metrics: Metrics | None = None,
    checkpoint: Checkpoint | None = None,
) -> Engine:
    """Load the model and put an engine on it. Raises ``ConfigError`` saying what to change.

    ``checkpoint`` is given where it has been opened already; else ``settings.model`` names it.
    """
    if settings.threads:
        torch.set_num_threads(settings.threads)
    if settings.device not in ("auto", "cpu"):
        raise ConfigError(f"device {settings.device!r} is not supported by this engine; use cpu")
    if checkpoint is None:
        checkpoint = open_checkpoint(
            settings.model,
            "dummy" if settings.load_format.value == "dummy" else "auto",
            name=settings.model_name,
            seed=settings.seed,
        )
    hbm = allocate_hbm(checkpoint, settings)
    identity = checkpoint.identity(settings.block_tokens, settings.kv_dtype.value)
    return Engine(
        LlamaModel(checkpoint.config, checkpoint.tensors()),
        tokenizer_of(checkpoint),
        hbm.medium,
        hbm.medium.tensor,
        hbm.pool,
        identity,
        EngineConfig(
            Limits(settings.max_num_batched_tokens, settings.max_num_seqs, settings.longest_prefix_first),
            max_length=settings.max_model_len or checkpoint.config.max_positions,
            prefix_cache=settings.prefix_cache,
            seed=settings.seed,
        ),
        connect(identity, hbm) if connect is not None else None,
        metrics.engine if metrics is not None else None,
    )


def allocate_hbm(checkpoint: Checkpoint, settings: EngineSettings) -> Hbm:
    config = checkpoint.config
    dtype = TORCH_DTYPES[effective_kv_dtype(config, settings.kv_dtype.value)]
    shape = (config.layers, 2, settings.block_tokens, config.kv_heads, config.head_dim)
    medium = HbmMedium.allocate(settings.hbm_blocks, shape, dtype, "cpu")
    return Hbm(medium, BlockPool(settings.hbm_blocks, LruPolicy(settings.hbm_blocks)))


def tokenizer_of(checkpoint: Checkpoint) -> Tokenizer | None:
    return checkpoint.tokenizer() if checkpoint.tokenizer_source is not None else None
