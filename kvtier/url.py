"""A tier as a URL: ``dram://?capacity=8GiB``, ``nvme:///var/cache/kvtier?capacity=200GiB``, ``redis://host:6379/0?ttl=24h``."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from urllib.parse import quote, unquote

from kvtier.errors import ConfigError

MASK = "***"
_SCHEME = re.compile(r"([a-z][a-z0-9+.-]*)://(.*)", re.ASCII | re.DOTALL)
_BARE = re.compile(r"[\w./+-]*", re.ASCII)
_PERCENT = re.compile(r"%(?![0-9A-Fa-f]{2})", re.ASCII)
_HOST = re.compile(r"[A-Za-z0-9._-]*|\[[0-9A-Fa-f:.]+\]", re.ASCII)
_SECRET = re.compile(r"(^|_)(key|password|secret|token)$")
_SHAPE = "scheme://[user:password@][host[:port]][/path][?name=value&...], with %-encoding for reserved characters"


def is_secret(name: str) -> bool:
    """Whether a parameter of this name is masked wherever it is shown."""
    return _SECRET.search(name) is not None


def _decoded(part: str, what: str, scheme: str) -> str:
    if _PERCENT.search(part):
        raise ConfigError(f"{scheme}://...: bad %-encoding in the {what}; a literal % is written %25")
    try:
        return unquote(part, errors="strict")
    except UnicodeDecodeError:
        raise ConfigError(f"{scheme}://...: the {what} is not UTF-8 once decoded") from None


def _port(text: str, scheme: str) -> int:
    if not (text.isascii() and text.isdigit() and 0 < int(text[:6]) < 1 << 16):
        raise ConfigError(
            f"{scheme}://...: the port after the host is not a number from 1 to 65535 (a password belongs before an @, "
            f"with reserved characters %-encoded)"
        )
    return int(text)


def _params(query: str, scheme: str) -> dict[str, str]:
    params: dict[str, str] = {}
    for pair in filter(None, query.split("&")):
        raw_name, equals, raw_value = pair.partition("=")
        name = _decoded(raw_name, "parameters", scheme)
        if not equals or not name:
            raise ConfigError(f"{scheme}://...: each parameter after the ? is written name=value")
        if name in params:
            raise ConfigError(f"{scheme}://...: parameter {name!r} is given twice")
        params[name] = _decoded(raw_value, f"parameter {name!r}", scheme)
    return params


@dataclass(frozen=True, slots=True, repr=False)
class TierUrl:
    """The parts of a tier's URL, decoded. ``str`` and ``repr`` mask what is secret; ``reveal`` does not."""

    scheme: str
    username: str | None = None
    password: str | None = None
    host: str | None = None
    """Name or address, IPv6 without its brackets."""
    port: int | None = None
    path: str = ""
    """With its leading slash, or empty."""
    params: Mapping[str, str] = field(default_factory=dict, hash=False)

    @classmethod
    def parse(cls, text: str) -> TierUrl:
        """Raises ``ConfigError`` where ``text`` is malformed; the message never repeats what may be a password."""
        found = _SCHEME.fullmatch(text.strip())
        if found is None:
            shown = f"{text!r} is" if _BARE.fullmatch(text) else "this is"
            raise ConfigError(f"{shown} not a tier URL; one looks like {_SHAPE}")
        scheme, rest = found[1], found[2]
        before, _, query = rest.partition("?")
        authority, slash, path = before.partition("/")
        if "#" in rest or "@" in query or (authority and "@" in path) or any(c.isspace() for c in rest):
            raise ConfigError(f"{scheme}://...: reserved characters must be %-encoded; a tier URL looks like {_SHAPE}")
        user, at, place = authority.rpartition("@")
        if "@" in user:
            raise ConfigError(f"{scheme}://...: an @ inside a user name or password is written %40")
        name, colon, secret = user.partition(":")
        host, port = place, ""
        if not place.startswith("[") or "]:" in place:
            host, _, port = place.rpartition(":") if ":" in place else (place, "", "")
        if not _HOST.fullmatch(host):
            raise ConfigError(f"{scheme}://...: the host is not a name or an address")
        number = _port(port, scheme) if ":" in place.rpartition("]")[2] else None
        if not host and (at or number is not None):
            raise ConfigError(f"{scheme}://...: a user, password or port needs a host")
        return cls(
            scheme=scheme,
            username=_decoded(name, "user name", scheme) or None,
            password=_decoded(secret, "password", scheme) if colon else None,
            host=host.strip("[]") or None,
            port=number,
            path=_decoded(slash + path, "path", scheme),
            params=_params(query, scheme),
        )

    def with_params(self, **params: str) -> TierUrl:
        """The same URL with these parameters set."""
        return replace(self, params={**self.params, **params})

    def _text(self, *, masked: bool) -> str:
        user = quote(self.username or "", safe="")
        if self.password is not None:
            user += ":" + (MASK if masked else quote(self.password, safe=""))
        host = self.host or ""
        host = f"[{host}]" if ":" in host else host
        port = "" if self.port is None else f":{self.port}"
        params = "&".join(
            f"{quote(name, safe='')}={MASK if masked and is_secret(name) else quote(value, safe='/:')}"
            for name, value in self.params.items()
        )
        authority = f"{user}@{host}{port}" if user else f"{host}{port}"
        return f"{self.scheme}://{authority}{quote(self.path)}{'?' if params else ''}{params}"

    def reveal(self) -> str:
        """The URL with its secrets, such that ``parse`` gives an equal one. Never for a log or a message."""
        return self._text(masked=False)

    def __str__(self) -> str:
        return self._text(masked=True)

    def __repr__(self) -> str:
        return f"TierUrl({self._text(masked=True)!r})"
