"""kvtier keeps the attention state of an LLM server in four tiers and gives it back by prefix hash."""

from importlib.metadata import version as _version

from kvtier.abc.store import Match, Store
from kvtier.errors import (
    CapacityError,
    ConfigError,
    CorruptFrame,
    KvtierError,
    MediumError,
    MediumFull,
    MediumRefused,
    MediumUnavailable,
    ModelError,
    RequestError,
)
from kvtier.key import Adapter, BlockKey, Extra, Identity, Scope, Shard, Span
from kvtier.layout import CacheGroup, GroupKind, Layout
from kvtier.url import TierUrl

__version__ = _version("kvtier")

__all__ = [
    "Adapter",
    "BlockKey",
    "CacheGroup",
    "CapacityError",
    "ConfigError",
    "CorruptFrame",
    "Extra",
    "GroupKind",
    "Identity",
    "KvtierError",
    "Layout",
    "Match",
    "MediumError",
    "MediumFull",
    "MediumRefused",
    "MediumUnavailable",
    "ModelError",
    "RequestError",
    "Scope",
    "Shard",
    "Span",
    "Store",
    "TierUrl",
    "__version__",
]
