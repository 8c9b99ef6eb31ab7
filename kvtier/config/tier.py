"""What a tier's URL may say of the tier, beside what its medium takes."""

from __future__ import annotations

import enum
from dataclasses import dataclass, fields
from typing import TypeVar

from kvtier.errors import ConfigError
from kvtier.params import build_params, convert, nearest, type_hints
from kvtier.quantity import Bytes
from kvtier.url import TierUrl

T = TypeVar("T")


class WriteMode(enum.Enum):
    """When a tier is offered a block."""

    THROUGH = "through"
    SELECTIVE = "selective"
    BACK = "back"


class AdmissionRule(enum.Enum):
    """Which blocks a tier below DRAM takes of those that it is offered."""

    ALL = "all"
    SECOND = "second"
    ADAPTIVE = "adaptive"


class Verify(enum.Enum):
    """How many reads from this process's own memory have their content proven; all other reads always have."""

    SAMPLE = "sample"
    ALWAYS = "always"


@dataclass(frozen=True, slots=True)
class TierOptions:
    """Parameters of a tier's URL that belong to the tier, not to its medium."""

    write: WriteMode
    """When the tier is offered a block."""
    codec: str = "raw"
    """Name of the codec that payloads are written with."""
    verify: Verify = Verify.ALWAYS
    """Only a tier in this process's own memory may sample."""
    policy: str = "lru"
    """Name of the eviction policy."""
    admission: AdmissionRule = AdmissionRule.ALL
    """Which blocks the tier takes of those that it is offered."""
    write_budget: Bytes | None = None
    """Bytes per day that may be written to it; None: no limit."""
    encrypt: str | None = None
    """Path of the key file under which frames are sealed; None: they are not."""


_TIER_DEFAULTS = {
    "hbm": TierOptions(WriteMode.THROUGH, verify=Verify.SAMPLE),
    "dram": TierOptions(WriteMode.THROUGH, verify=Verify.SAMPLE),
    "memory": TierOptions(WriteMode.THROUGH),
    "nvme": TierOptions(WriteMode.BACK),
}
_OTHER_TIER = TierOptions(WriteMode.SELECTIVE)


def tier_options(url: TierUrl, medium_params: type[T]) -> tuple[TierOptions, T]:
    """Split a URL's parameters into the tier's options and the medium's own ``Params``.

    Defaults of the options: dram ``through``, nvme ``back``, anything else ``selective``. Raises ``ConfigError`` where a
    name is in neither, with the nearest of both.
    """
    defaults = _TIER_DEFAULTS.get(url.scheme, _OTHER_TIER)
    option_names = {each.name for each in fields(TierOptions)}
    medium_names = {each.name for each in fields(medium_params) if each.init}  # type: ignore[arg-type]  # a dataclass
    assert not option_names & medium_names, f"{medium_params.__qualname__} shadows {option_names & medium_names}"
    for name in url.params:
        if name not in option_names | medium_names:
            raise ConfigError(f"{url}: unknown parameter {name!r}{nearest(name, option_names | medium_names)}")
    given = {each.name: getattr(defaults, each.name) for each in fields(TierOptions)}
    hints = type_hints(TierOptions)
    given |= {name: convert(hints[name], url.params[name], str(url), name) for name in option_names & set(url.params)}
    options = TierOptions(**given)
    if options.verify is Verify.SAMPLE and defaults.verify is not Verify.SAMPLE:
        raise ConfigError(f"{url}: verify: only dram may sample; what comes from elsewhere is always verified")
    if options.admission is AdmissionRule.ADAPTIVE and options.write_budget is None:
        raise ConfigError(
            f"{url}: admission: adaptive spends a write_budget; give one, as in write_budget=500GB (per day)"
        )
    own = {name: value for name, value in url.params.items() if name in medium_names}
    return options, build_params(medium_params, own, str(url))
