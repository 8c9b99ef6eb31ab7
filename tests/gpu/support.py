"""Builders for tests on a GPU: HBM on a device over page-locked DRAM, a store without lower tiers, an engine of dummy weights."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import torch

from kvtier.connectors.bundled import BundledConnector
from kvtier.cost import OpenGate
from kvtier.engine.architecture import ModelConfig, random_tensors
from kvtier.engine.device import place
from kvtier.engine.engine import Engine, EngineConfig
from kvtier.engine.model import LlamaModel
from kvtier.engine.request import Request
from kvtier.engine.sampler import SamplingParams
from kvtier.engine.scheduler import Limits
from kvtier.key import Identity, Origin, Scope, Shard, Span, chain_keys, root_key
from kvtier.metrics import Metrics
from kvtier.policy.lru import LruPolicy
from kvtier.pool import BlockPool
from kvtier.storage_backends.dram import DramMedium
from kvtier.storage_backends.hbm import HbmMedium
from kvtier.store.arena import Arena
from kvtier.store.geometry import Geometry
from kvtier.store.parts import Parts
from kvtier.store.store import TieredStore
from kvtier.transfer.workers import Workers

BLOCK = 16
CONFIG = ModelConfig(
    name="dummy",
    layers=12,
    hidden=1024,
    heads=16,
    kv_heads=8,
    head_dim=128,
    intermediate=2816,
    vocab=32_000,
    rms_eps=1e-5,
    rope_theta=10_000.0,
    max_positions=4096,
    tie_embeddings=True,
    dtype="bf16",
)
"""A quarter of a billion parameters: made in seconds, with blocks of 768 KiB."""
IDENTITY = Identity(CONFIG.name, "dummy", "bf16", CONFIG.layout(BLOCK, "bf16"))


def span(first: int, blocks: int) -> Span:
    """A chain of its own for each ``first``."""
    scope = Scope()
    root = root_key(IDENTITY, scope)
    tokens = [first, *range(1, BLOCK * blocks)]
    return Span(Origin.of(IDENTITY.digest(), scope), root, 0, tuple(chain_keys(root, tokens, BLOCK)))


def make_dram(slots: int, slot_bytes: int) -> DramMedium:
    """An arena that is page-locked to its end."""
    dram = DramMedium(slots, slot_bytes, pin=True)
    assert dram.wait_prefaulted(100)
    return dram


def make_store(dram: DramMedium) -> TieredStore:
    """A store over DRAM alone, with the threads that ``open_store`` gives it."""
    layout = IDENTITY.layout
    geometry = Geometry(Shard(), layout.fingerprint(), dram.slot_bytes, BLOCK)
    arena = Arena(dram, LruPolicy(dram.slots))
    parts = Parts(geometry, arena, Metrics().tier("dram"), (), Workers("dram", 2), OpenGate(), threading.Lock())
    return TieredStore(parts, copier=ThreadPoolExecutor(1))


def make_hbm(slots: int, layers: int = 32, device: str = "cuda") -> HbmMedium:
    """Blocks of 64 KiB a layer: 2 MiB with 32 layers."""
    return HbmMedium.allocate(slots, (layers, 2, BLOCK, 8, 128), torch.bfloat16, device)


def make_model(device: torch.device) -> LlamaModel:
    # a tenth of the usual deviation: with more layers the logits of dummy weights would be infinite in 16 bits
    tensors = {name: tensor * 0.2 if tensor.dim() > 1 else tensor for name, tensor in random_tensors(CONFIG, 5).items()}
    return LlamaModel(CONFIG, tensors, place(device, "auto", CONFIG.dtype, torch.bfloat16))


def make_engine(model: LlamaModel, hbm: HbmMedium, store: TieredStore | None) -> Engine:
    """``hbm`` as `make_hbm` makes it with the model's layers."""
    connector = None if store is None else BundledConnector(store, BLOCK, hbm.slots, 512)
    limits = Limits(512, 16)
    pool = BlockPool(hbm.slots, LruPolicy(hbm.slots))
    config = EngineConfig(limits, max_length=CONFIG.max_positions)
    return Engine(model, None, hbm, hbm.tensor, pool, IDENTITY, config, connector)


def greedy(name: str, prompt: Sequence[int], tokens: int) -> Request:
    sampling = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
    return Request(name, tuple(prompt), sampling, capture_logits=True)
