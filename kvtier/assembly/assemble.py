"""How the pieces become an engine: settings in, a model over HBM slots over the configured tiers out."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from dataclasses import dataclass, replace

from kvtier.errors import ConfigError

try:
    import torch
except ImportError as error:
    raise ConfigError("the engine needs torch and more; run: pip install 'kvtier[engine]'") from error

from kvtier import policy
from kvtier.abc.connector import KVConnector
from kvtier.abc.medium import Medium
from kvtier.assembly.paced import is_paced, open_paced
from kvtier.codec.catalogue import keeping
from kvtier.config import HBM_BLOCKS, EngineSettings, Settings, StoreCodec
from kvtier.engine.checkpoint import Checkpoint, effective_kv_dtype, open_checkpoint
from kvtier.engine.device import place
from kvtier.engine.engine import Engine, EngineConfig
from kvtier.engine.exactness import settle
from kvtier.engine.model import TORCH_DTYPES, LlamaModel, Model
from kvtier.engine.paced import byte_tokenizer
from kvtier.engine.scheduler import Admission, Limits
from kvtier.engine.tokenizer import Tokenizer
from kvtier.key import Identity
from kvtier.metrics import Metrics
from kvtier.pool import BlockPool
from kvtier.registry import connector_class, plan_tier
from kvtier.storage_backends import cuda_copy
from kvtier.storage_backends.hbm import HbmMedium
from kvtier.store.open import check_tiers, open_store
from kvtier.store.store import TieredStore

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Hbm:
    """The engine's blocks: the medium that holds their bytes, and the pool that numbers them."""

    medium: HbmMedium
    pool: BlockPool


Connect = Callable[[Identity, Hbm], "KVConnector | None"]
"""Makes the connector to the tiers below, once identity and HBM are known; None: nothing below HBM."""


@dataclass(slots=True)
class Assembly:
    """An engine, the store below it, and what both report to. Close it when nothing runs any more."""

    engine: Engine
    store: TieredStore | None
    """None where no tier is configured."""
    metrics: Metrics
    drain_seconds: float

    def tiers(self) -> dict[str, str]:
        """Health by tier."""
        return {"hbm": "ok", **(self.store.health() if self.store is not None else {})}

    def notes(self) -> list[str]:
        """What is worth knowing although nothing is wrong: what the store found, and how a paced model keeps its time."""
        pace = self.engine.pace
        found = list(self.store.notes()) if self.store is not None else []
        return found if pace is None else [*found, pace.sentence()]

    def audit(self) -> list[str]:
        """Faults of what the store holds in memory, in words. From any thread."""
        return self.store.check_integrity() if self.store is not None else []

    def render_metrics(self) -> bytes:
        """The Prometheus text, with gauges as of now."""
        if self.store is not None:
            self.store.stats()
        choice = self.engine.pool.choice()
        if choice is not None:
            self.metrics.policy.chose("hbm", **choice._asdict())
        return self.metrics.render()

    def close(self) -> bool:
        """End open requests, let saves end, write down what a tier lacks, audit, close; whether all was done in time.

        No other thread runs the engine's steps any more.
        """
        self.engine.abort_all()
        try:
            done = self.engine.settle(self.drain_seconds)
        except Exception:
            log.exception("the engine failed; draining what it had saved")
            done = False
        if self.store is not None:
            done = self.store.drain(self.drain_seconds) and done
            self._audit(self.store)
            self.store.close()
        return done

    def _audit(self, store: TieredStore) -> None:
        wrong = self.engine.check_integrity() + store.check_integrity()
        for each in wrong:
            log.error("integrity: %s", each)
        if not wrong:
            log.debug("integrity: every block is accounted for")


def assemble(
    settings: Settings,
    *,
    require_all: bool = False,
    around: Callable[[str, Medium], Medium] | None = None,
    admission: Admission | None = None,
) -> Assembly:
    """Engine, store and connector as ``settings`` have them. Raises ``ConfigError`` saying what to change.

    ``require_all``: a tier that does not answer is an error, not a degraded tier. ``around``: as in `open_store`.
    ``admission``: as in `Limits`.
    """
    if settings.tiers:  # before the model is loaded, which takes longest
        check_tiers([plan_tier(url) for url in settings.tiers])
    metrics = Metrics()
    opened: list[TieredStore] = []

    def connect(identity: Identity, hbm: Hbm) -> KVConnector | None:
        if not settings.tiers:
            return None
        opened.append(
            open_store(settings.tiers, identity, settings.store, metrics, require_all=require_all, around=around)
        )
        block_tokens = identity.layout.block_tokens
        bundled = connector_class("bundled")
        connector: KVConnector = bundled(
            opened[0], block_tokens, hbm.pool.capacity, settings.engine.max_num_batched_tokens
        )
        return connector

    try:
        engine = open_engine(settings.engine, connect, metrics, codec=settings.store.codec, admission=admission)
    except BaseException:
        for store in opened:
            store.close()
        raise
    return Assembly(engine, opened[0] if opened else None, metrics, settings.store.drain)


def open_engine(
    settings: EngineSettings,
    connect: Connect | None = None,
    metrics: Metrics | None = None,
    checkpoint: Checkpoint | None = None,
    *,
    codec: StoreCodec = StoreCodec.RAW,
    admission: Admission | None = None,
) -> Engine:
    """Load the model and put an engine on it. Raises ``ConfigError`` saying what to change.

    ``checkpoint`` is given where it has been opened already; else ``settings.model`` names it. ``codec`` is the store's.
    ``admission``: as in `Limits`.
    """
    if settings.threads:
        torch.set_num_threads(settings.threads)
    policy.check(settings.hbm_policy, "hbm_policy")
    if is_paced(settings.model):
        return _open_paced(settings, connect, metrics, codec, admission)
    device = chosen_device(settings.device)
    if settings.recompute_sample and codec is not StoreCodec.RAW:
        raise ConfigError(
            f"recompute_sample compares what was loaded with what is computed, and codec {codec.value} changes what is "
            "loaded; leave one of the two out"
        )
    if checkpoint is None:
        checkpoint = open_checkpoint(
            settings.model,
            "dummy" if settings.load_format.value == "dummy" else "auto",
            name=settings.model_name,
            revision=settings.revision,
            seed=settings.seed,
        )
    hbm = allocate_hbm(checkpoint, settings, device)
    identity = keeping(checkpoint.identity(settings.block_tokens, settings.kv_dtype.value), codec.value)
    placement = place(device, settings.attention.value, checkpoint.config.dtype, hbm.medium.tensor.dtype)
    if placement.dtype is not torch.float32:  # what is computed in 16 bits is not interchangeable with what is not
        identity = replace(identity, engine_format=f"{identity.engine_format} {placement.dtype}")
    model = LlamaModel(checkpoint.config, checkpoint.tensors(), placement)
    exact = settle(model, identity.kv_dtype, settings.block_tokens)
    if not exact:
        log.warning("on this machine a prefix hit may differ from a cold run in the last bits of its logits")
    if codec is not StoreCodec.RAW:
        log.warning(
            "blocks below HBM are kept by a lossy codec (%s): what they give is near to a cold run", codec.value
        )
    exact = exact and codec is StoreCodec.RAW
    return _engine(settings, model, tokenizer_of(checkpoint), hbm, identity, connect, metrics, admission, exact=exact)


def _open_paced(
    settings: EngineSettings,
    connect: Connect | None,
    metrics: Metrics | None,
    codec: StoreCodec,
    admission: Admission | None,
) -> Engine:
    paced = open_paced(settings, codec)
    dtype = TORCH_DTYPES[paced.identity.kv_dtype]
    hbm = _hbm(HbmMedium.allocate(paced.hbm_blocks, paced.slot_shape, dtype), settings)
    return _engine(
        settings, paced.model, byte_tokenizer(), hbm, paced.identity, connect, metrics, admission, exact=True
    )


def _engine(
    settings: EngineSettings,
    model: Model,
    tokenizer: Tokenizer | None,
    hbm: Hbm,
    identity: Identity,
    connect: Connect | None,
    metrics: Metrics | None,
    admission: Admission | None,
    *,
    exact: bool,
) -> Engine:
    return Engine(
        model,
        tokenizer,
        hbm.medium,
        hbm.medium.tensor,
        hbm.pool,
        identity,
        EngineConfig(
            Limits(
                settings.max_num_batched_tokens,
                settings.max_num_seqs,
                settings.longest_prefix_first,
                settings.preemption,
                admission,
            ),
            max_length=settings.max_model_len or model.config.max_positions,
            prefix_cache=settings.prefix_cache,
            seed=settings.seed,
            recompute_sample=settings.recompute_sample,
            exact=exact,
        ),
        connect(identity, hbm) if connect is not None else None,
        metrics.engine if metrics is not None else None,
    )


def chosen_device(name: str) -> torch.device:
    """The device that a setting names. Raises ``ConfigError`` where it is none of ours, or cannot be used here."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() and cuda_copy.device_count() else "cpu"
    if name == "cpu":
        return torch.device("cpu")
    if not re.fullmatch(r"cuda(:\d+)?", name, re.ASCII):
        raise ConfigError(f"device {name!r} is not supported by this engine; use auto, cpu, cuda or cuda:N")
    index, seen = int(name.partition(":")[2] or 0), torch.cuda.device_count()
    if index >= seen:
        raise ConfigError(f"device {name!r}: torch {torch.__version__} sees {seen or 'no'} GPUs; use cpu")
    cuda_copy.import_cupy()
    return torch.device("cuda", index)


def allocate_hbm(checkpoint: Checkpoint, settings: EngineSettings, device: torch.device | None = None) -> Hbm:
    config = checkpoint.config
    dtype = TORCH_DTYPES[effective_kv_dtype(config, settings.kv_dtype.value)]
    shape = (config.layers, 2, settings.block_tokens, config.kv_heads, config.head_dim)
    blocks = settings.hbm_blocks or HBM_BLOCKS
    return _hbm(HbmMedium.allocate(blocks, shape, dtype, device or "cpu"), settings)


def _hbm(medium: HbmMedium, settings: EngineSettings) -> Hbm:
    return Hbm(medium, BlockPool(medium.slots, policy.make(settings.hbm_policy, medium.slots)))


def tokenizer_of(checkpoint: Checkpoint) -> Tokenizer | None:
    return checkpoint.tokenizer() if checkpoint.tokenizer_source is not None else None
