"""What the tests of clearing share: a prompt's blocks under the present epoch, and tiers of each kind."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from kvtier.abc.medium import KeyMedium, MediumContext
from kvtier.key import Identity, Origin, Scope, Span, chain_keys, root_key
from kvtier.params import build_params
from kvtier.storage_backends.memory import MemoryMedium
from kvtier.storage_backends.redis import RedisMedium
from kvtier.testing.valkey import ValkeyServer
from kvtier.url import TierUrl

from .builders import IDENTITY, Bench


def on(server: ValkeyServer) -> RedisMedium:
    location = TierUrl.parse(server.url)
    params = build_params(RedisMedium.Params, location.params, "test")
    return RedisMedium.open(location, params, MediumContext(1000))


def asked(bench: Bench, number: int, scope: Scope = Scope(), identity: Identity = IDENTITY, blocks: int = 3) -> Span:  # noqa: B008 - frozen
    """A prompt's blocks as an engine asks for them now: under its scope's present epoch."""
    scope = replace(scope, epoch=bench.store.epoch(scope.tenant_id, scope.adapter))
    root = root_key(identity, scope)
    tokens = [number, *range(1, 16 * blocks)]
    before = bench.store.former_epoch(scope.tenant_id, scope.adapter)
    former = () if before is None else chain_keys(root_key(identity, replace(scope, epoch=before)), tokens, 16)
    return Span(Origin.of(identity.digest(), scope), root, 0, tuple(chain_keys(root, tokens, 16)), tuple(former))


def upkeep(bench: Bench, rounds: int = 4) -> None:
    for _ in range(rounds):
        bench.clock.advance(2.0)
        bench.store.keep()
        bench.turn()


def media(kind: str, tmp_path: Path, server: ValkeyServer) -> dict[str, object]:
    shared: KeyMedium = on(server) if kind == "redis" else MemoryMedium()
    return {"nvme": tmp_path} if kind == "nvme" else {"shared": shared}
