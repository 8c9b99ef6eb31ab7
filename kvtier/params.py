"""Strings, environment variables and TOML values into the typed fields of a frozen dataclass."""

from __future__ import annotations

import difflib
import enum
import math
import types
from collections.abc import Iterable, Mapping
from dataclasses import MISSING, Field, fields
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from kvtier.errors import ConfigError
from kvtier.quantity import Bytes, Seconds, parse_bytes, parse_seconds
from kvtier.url import TierUrl, is_secret

T = TypeVar("T")
_TRUE = {"true", "yes", "on", "1"}
_FALSE = {"false", "no", "off", "0"}
_RULES = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "a text",
    Bytes: "a size such as 8GiB",
    Seconds: "a duration such as 500ms",
    TierUrl: "a tier URL",
}


def closest(name: str, valid: Iterable[str]) -> str | None:
    """The one of ``valid`` that was probably meant; None where none is close."""
    names = {each.casefold(): each for each in sorted(valid)}
    close = difflib.get_close_matches(name.casefold(), names, n=1, cutoff=0.6)
    return names[close[0]] if close else None


def nearest(name: str, valid: Iterable[str]) -> str:
    """``; did you mean 'x'?`` with the closest of ``valid``, or the whole list where none is close."""
    names = sorted(valid)
    meant = closest(name, names)
    if meant is not None:
        return f"; did you mean {meant!r}?"
    return f"; valid: {', '.join(names)}" if names else "; none is valid here"


def type_hints(cls: type) -> Mapping[str, Any]:
    """The resolved annotations of a dataclass."""
    return get_type_hints(cls)


def _number(raw: object, kind: type[int | float]) -> int | float:
    if isinstance(raw, bool) or not isinstance(raw, (str, int, kind)):
        raise TypeError
    number = kind(raw)
    if not (math.isfinite(number) if isinstance(number, float) else abs(number) < 1 << 63):
        raise ValueError
    return number


def _boolean(raw: object) -> bool:
    if isinstance(raw, bool):
        return raw
    word = raw.lower() if isinstance(raw, str) else ""
    if word not in _TRUE | _FALSE:
        raise ValueError
    return word in _TRUE


def _quantity(raw: object, hint: object) -> Bytes | Seconds:
    if isinstance(raw, str):
        return parse_bytes(raw) if hint is Bytes else parse_seconds(raw)
    number = _number(raw, int if hint is Bytes else float)
    if number < 0:
        raise ValueError
    return Bytes(int(number)) if hint is Bytes else Seconds(number)


def _choice(raw: object, choices: Mapping[str, Any]) -> Any:  # noqa: ANN401 - the value of whichever choice was named
    if not isinstance(raw, str) or raw not in choices:
        raise ValueError
    return choices[raw]


def _rule(hint: Any) -> str:  # noqa: ANN401 - an annotation
    choices = _choices(hint)
    if choices is not None:
        return f"one of {', '.join(choices)}"
    if get_origin(hint) is tuple:
        return f"a list whose items are each {_rule(get_args(hint)[0])}"
    return _RULES.get(hint, f"a {hint}")


def _choices(hint: Any) -> dict[str, Any] | None:  # noqa: ANN401 - an annotation
    if get_origin(hint) is Literal:
        return {str(choice): choice for choice in get_args(hint)}
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        return {str(member.value): member for member in hint}
    return None


def _optional(hint: Any) -> Any | None:  # noqa: ANN401 - an annotation
    if get_origin(hint) in (Union, types.UnionType):
        inner = [part for part in get_args(hint) if part is not type(None)]
        if len(inner) == 1 and len(get_args(hint)) == 2:
            return inner[0]
    return None


def _converted(hint: Any, raw: object) -> Any:  # noqa: ANN401 - an annotation, and a value of that type
    choices = _choices(hint)
    if choices is not None:
        return _choice(raw, choices)
    if hint in (Bytes, Seconds):
        return _quantity(raw, hint)
    if hint is bool:
        return _boolean(raw)
    if hint is int or hint is float:
        return _number(raw, hint)
    if hint is TierUrl and isinstance(raw, (str, TierUrl)):
        return TierUrl.parse(raw) if isinstance(raw, str) else raw
    if hint is str and isinstance(raw, str):
        return raw
    if get_origin(hint) is tuple and isinstance(raw, (list, tuple, str)):
        items = raw.split() if isinstance(raw, str) else raw
        return tuple(_converted(get_args(hint)[0], item) for item in items)
    raise TypeError


def convert(hint: Any, raw: object, where: str, name: str) -> Any:  # noqa: ANN401 - an annotation, and a value of that type
    """``raw`` as a value of the annotated type; raises ``ConfigError`` that names ``where``, ``name`` and what is wanted.

    Knows int, float, bool, str, ``Bytes``, ``Seconds``, ``TierUrl``, enums by value, literals, ``tuple[X, ...]`` (a list, or
    words between white space) and Optional, for which ``none`` stands for None unless the type is a text.
    """
    inner = _optional(hint)
    if inner is not None:
        if raw is None or (inner is not str and isinstance(raw, str) and raw.lower() == "none"):
            return None
        hint = inner
    try:
        return _converted(hint, raw)
    except ConfigError as wrong:
        raise ConfigError(f"{where}: {name}: {wrong}") from None
    except (ValueError, TypeError, OverflowError) as wrong:
        detail = str(wrong) if hint in (Bytes, Seconds) and str(wrong) and isinstance(raw, str) else ""
        shown = "the given value" if is_secret(name) else repr(raw)
        raise ConfigError(f"{where}: {name}: {detail or f'{shown} is not {_rule(hint)}'}") from None


def build_params(cls: type[T], raw: Mapping[str, object], where: str) -> T:
    """Fill the dataclass ``cls`` from text (or TOML values) by its annotations.

    ``where`` is what an error begins with (a masked URL, a file). Raises ``ConfigError`` for an unknown name (with the
    nearest valid one), a value of the wrong type, a missing field, and a ``ValueError`` of ``__post_init__``.
    """
    declared: tuple[Field[Any], ...] = fields(cls)  # type: ignore[arg-type]  # a bare T does not say that it is a dataclass
    names = [each.name for each in declared if each.init]
    for name in raw:
        if name not in names:
            raise ConfigError(f"{where}: unknown parameter {name!r}{nearest(name, names)}")
    for each in declared:
        if each.init and each.name not in raw and each.default is MISSING and each.default_factory is MISSING:
            raise ConfigError(f"{where}: {each.name} is missing ({_rule(type_hints(cls)[each.name])})")
    hints = type_hints(cls)
    values = {name: convert(hints[name], value, where, name) for name, value in raw.items()}
    try:
        return cls(**values)
    except ValueError as wrong:
        raise ConfigError(f"{where}: {wrong}") from None
