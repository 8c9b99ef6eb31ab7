"""Finds storage backends and connectors by entry point, and imports one only when it is asked for.

A third party adds ``s3://`` by shipping a package whose metadata has, in group ``kvtier.storage_backends``, the line
``s3 = "its_package:S3Medium"``: a class that fulfils ``MediumFactory``.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points
from typing import TYPE_CHECKING, Any

from kvtier.config import TierOptions, tier_options
from kvtier.errors import ConfigError
from kvtier.params import closest
from kvtier.url import TierUrl

if TYPE_CHECKING:
    from kvtier.abc.audit import Auditor
    from kvtier.abc.medium import Medium, MediumContext, MediumFactory

BACKENDS = "kvtier.storage_backends"
CONNECTORS = "kvtier.connectors"


def installed(group: str) -> list[str]:
    """Names that some installed package declares in ``group``, sorted."""
    return sorted({entry.name for entry in entry_points(group=group)})


def _from_package(entry: EntryPoint) -> str:
    return entry.value if entry.dist is None else f"{entry.value} of {entry.dist.name} {entry.dist.version}"


def _loaded(group: str, name: str, what: str) -> Any:  # noqa: ANN401 - whatever the plug-in is; its contract is checked by its caller
    found = [entry for entry in entry_points(group=group) if entry.name == name]
    if not found:
        there = installed(group)
        meant = closest(name, there)
        if meant is not None:
            raise ConfigError(f"unknown {what} {name!r}; did you mean {meant!r}?")
        known = f"installed: {', '.join(there)}" if there else "none is installed"
        raise ConfigError(
            f"unknown {what} {name!r}; {known}. Each comes from an installed package (entry point group {group!r}): "
            f"pip install the package that provides {name!r}, or kvtier itself with `pip install -e .` in a checkout"
        )
    if len({entry.value for entry in found}) > 1:
        raise ConfigError(
            f"{what} {name!r} is provided twice: {' and '.join(sorted(map(_from_package, found)))}; uninstall one"
        )
    try:
        return found[0].load()
    except Exception as failed:
        raise ConfigError(
            f"{what} {name!r} ({_from_package(found[0])}) cannot be loaded: {type(failed).__name__}: {failed}"
        ) from failed


@dataclass(frozen=True, slots=True)
class TierPlan:
    """A tier whose URL has been understood in full and of which nothing is open yet."""

    url: TierUrl
    options: TierOptions
    factory: MediumFactory
    params: Any
    """An instance of the factory's own ``Params``."""

    def open(self, context: MediumContext) -> Medium:
        """Open the medium. May block; raises ``ConfigError`` or ``MediumError``."""
        return self.factory.open(self.url, self.params, context)

    def auditor(self) -> Auditor | None:
        """What looks through the medium at rest; None where nothing outlives the process. Raises as ``open`` does."""
        return self.factory.auditor(self.url, self.params)


def plan_tier(url: TierUrl) -> TierPlan:
    """Find the class behind a URL's scheme and check all of its parameters; raises ``ConfigError``."""
    factory: MediumFactory = _loaded(BACKENDS, url.scheme, "tier scheme")
    options, params = tier_options(url, factory.Params)
    return TierPlan(url, options, factory, params)


def connector_class(name: str) -> Any:  # noqa: ANN401 - connectors are built by each engine in its own way
    """The connector of that name. Raises ``ConfigError`` where none is installed or it cannot be imported."""
    return _loaded(CONNECTORS, name, "connector")
