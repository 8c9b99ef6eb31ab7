"""Every setting: its type, its default, and where its effective value came from.

A setting is one field of a frozen dataclass in `settings`. Its flag (``--hbm-blocks``), its environment variable
(``KVTIER_HBM_BLOCKS``), its key in the TOML file (``hbm_blocks`` in table ``[engine]``) and its line in ``kvtier config``
all follow from that field. A flag goes before the environment, the environment before the file, the file before the
default. Nothing outside this package reads a ``KVTIER_`` variable.
"""

from kvtier.config.environment import ApiAccess, api_access, environment_secret, redis_url, requires_all
from kvtier.config.settings import (
    HBM_BLOCKS,
    AttentionKernels,
    EngineSettings,
    GateMode,
    KvDtype,
    LoadFormat,
    LogLevel,
    Preemption,
    ServerSettings,
    Settings,
    StoreCodec,
    StoreSettings,
)
from kvtier.config.sources import Effective, add_arguments, resolve
from kvtier.config.tier import AdmissionRule, TierOptions, Verify, WriteMode, tier_options
from kvtier.url import TierUrl

__all__ = [
    "HBM_BLOCKS",
    "AdmissionRule",
    "ApiAccess",
    "AttentionKernels",
    "Effective",
    "EngineSettings",
    "GateMode",
    "KvDtype",
    "LoadFormat",
    "LogLevel",
    "Preemption",
    "ServerSettings",
    "Settings",
    "StoreCodec",
    "StoreSettings",
    "TierOptions",
    "TierUrl",
    "Verify",
    "WriteMode",
    "add_arguments",
    "api_access",
    "environment_secret",
    "redis_url",
    "requires_all",
    "resolve",
    "tier_options",
]
