"""Where settings come from: flags, the environment, a TOML file and the defaults, in this order."""

from __future__ import annotations

import argparse
import enum
import os
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any, cast

from kvtier.config.environment import NOT_SETTINGS, PREFIX
from kvtier.config.settings import Settings
from kvtier.errors import ConfigError
from kvtier.params import convert, nearest, type_hints
from kvtier.quantity import Seconds

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

_NAMES_ELSEWHERE = {
    "tier": "tiers",
    "max_batch": "max_num_seqs",
    "chunk_tokens": "max_num_batched_tokens",
    "block_size": "block_tokens",
    "num_gpu_blocks": "hbm_blocks",
    "num_gpu_blocks_override": "hbm_blocks",
    "dtype": "kv_dtype",
    "kv_cache_dtype": "kv_dtype",
    "served_model_name": "model_name",
    "deadline_ms": "deadline",
}
"""What other engines call some of our settings: a wrong name from here is answered with the right one."""


@dataclass(frozen=True, slots=True)
class _Setting:
    """One declared setting, flattened."""

    name: str
    section: str
    """Name of its table; empty at the top."""
    hint: Any
    help: str
    at_least: int | None
    at_most: int | None
    flag: str

    @property
    def variable(self) -> str:
        return PREFIX + self.name.upper()

    @property
    def dotted(self) -> str:
        return f"{self.section}.{self.name}" if self.section else self.name

    def converted(self, raw: object, where: str) -> object:
        value = convert(self.hint, raw, where, self.name)
        if self.at_least is not None and value is not None and value < self.at_least:
            raise ConfigError(f"{where}: {self.name}: {value} is less than {self.at_least}")
        if self.at_most is not None and value is not None and value > self.at_most:
            raise ConfigError(f"{where}: {self.name}: {value} is more than {self.at_most}")
        return cast("object", value)


def _declared(cls: type = Settings, section: str = "") -> Iterator[_Setting]:
    for each in fields(cls):
        hint = type_hints(cls)[each.name]
        if is_dataclass(hint):
            yield from _declared(cast("type", hint), each.name)
            continue
        flag = each.metadata.get("flag") or "--" + each.name.replace("_", "-")
        bounds = each.metadata.get("at_least"), each.metadata.get("at_most")
        yield _Setting(each.name, section, hint, each.metadata["help"], *bounds, flag)


_SETTINGS = {setting.name: setting for setting in _declared()}
_SECTIONS = sorted({setting.section for setting in _SETTINGS.values()} - {""})


@dataclass(frozen=True, slots=True)
class Effective:
    """Settings as they hold, and where each came from."""

    settings: Settings
    sources: Mapping[str, str]
    """Dotted name -> ``default``, ``file PATH``, ``environment VARIABLE`` or ``flag --NAME``, in declared order."""

    def rows(self) -> list[tuple[str, object, str]]:
        """(dotted name, value, source) of every setting in declared order."""
        rows = []
        for setting in _SETTINGS.values():
            table = getattr(self.settings, setting.section) if setting.section else self.settings
            rows.append((setting.dotted, getattr(table, setting.name), self.sources[setting.dotted]))
        return rows


def add_arguments(parser: argparse.ArgumentParser, *sections: str) -> None:
    """Add ``--config``, the settings at the top and those of ``sections`` to ``parser``.

    Only flags that were given show up in the parsed namespace; ``resolve`` takes the whole of it.
    """
    shared = parser.add_argument_group("settings")
    shared.add_argument("--config", metavar="FILE", default=argparse.SUPPRESS, help="TOML file with settings")
    groups = {"": shared} | {name: parser.add_argument_group(f"{name} settings") for name in sections}
    for setting in _SETTINGS.values():
        if setting.section in groups:
            _add_argument(groups[setting.section], setting)


def _shown(value: object, hint: object) -> str:
    if hint is Seconds:
        return f"{value:g}s"
    if isinstance(value, enum.Enum):
        return str(value.value)
    if isinstance(value, bool) or value is None:
        return str(value).lower()
    return str(value)


def _add_argument(group: argparse._ArgumentGroup, setting: _Setting) -> None:
    default = Settings if not setting.section else type_hints(Settings)[setting.section]
    declared = {each.name: each for each in fields(default)}[setting.name]
    known: dict[str, Any] = {"dest": setting.name, "default": argparse.SUPPRESS}
    text = setting.help.replace("%", "%%")
    if setting.name == "tiers":
        group.add_argument(setting.flag, action="append", metavar="URL", help=text, **known)
        return
    text += f" (default: {_shown(declared.default, setting.hint)})"
    if setting.hint is bool:
        group.add_argument(setting.flag, action=argparse.BooleanOptionalAction, help=text, **known)
    elif isinstance(setting.hint, type) and issubclass(setting.hint, enum.Enum):
        names = "|".join(str(member.value) for member in setting.hint)
        group.add_argument(setting.flag, metavar=names, help=text, **known)
    else:
        metavar = "TIME" if setting.hint is Seconds else setting.name.rpartition("_")[2].upper()
        group.add_argument(setting.flag, metavar=metavar, help=text, **known)


def _unknown(name: str, where: str, spell: Mapping[str, str]) -> ConfigError:
    """The error for a setting that does not exist; ``spell`` maps each valid spelling to what is written there."""
    ours = _NAMES_ELSEWHERE.get(name.removeprefix(PREFIX).lower(), "")
    hint = f"; it is called {spell[ours]!r} here" if ours in spell else nearest(name, spell.values())
    return ConfigError(f"{where}: unknown setting {name!r}{hint}")


def _from_file(path: Path) -> Iterator[tuple[_Setting, object, str]]:
    where = str(path)
    try:
        loaded = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as failed:
        raise ConfigError(f"{where}: cannot read the settings: {failed.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as wrong:
        raise ConfigError(f"{where}: not TOML: {wrong}") from None
    for key, value in loaded.items():
        if key in _SECTIONS:
            if not isinstance(value, dict):
                raise ConfigError(f"{where}: {key} is a table: write [{key}]")
            for name, inner in value.items():
                yield _placed(name, key, where), inner, f"file {where}"
        else:
            yield _placed(key, "", where), value, f"file {where}"


def _placed(name: str, section: str, where: str) -> _Setting:
    setting = _SETTINGS.get(name)
    if setting is not None and setting.section == section:
        return setting
    here = f"{where}: [{section}]" if section else where
    if setting is not None:
        table = f"table [{setting.section}]" if setting.section else "the top of the file, before any table"
        raise ConfigError(f"{here}: setting {name!r} belongs in {table}")
    valid = {each.name: each.name for each in _SETTINGS.values() if each.section == section}
    raise _unknown(name, here, valid | ({} if section else {table: table for table in _SECTIONS}))


def _from_environment(environ: Mapping[str, str]) -> Iterator[tuple[_Setting, object, str]]:
    spell = {setting.name: setting.variable for setting in _SETTINGS.values()}
    for variable, raw in environ.items():
        name = variable.removeprefix(PREFIX)
        if name == variable or name in NOT_SETTINGS:
            continue
        setting = _SETTINGS.get(name.lower())
        if setting is None or setting.variable != variable:
            raise _unknown(variable, "environment", spell)
        yield setting, raw, f"environment {variable}"


def resolve(flags: Mapping[str, object] | None = None, environ: Mapping[str, str] | None = None) -> Effective:
    """The settings that hold, from parsed ``flags`` (``vars`` of a namespace; keys that are no setting are the command's
    own), ``environ`` (by default the process's), the TOML file that ``--config`` or ``KVTIER_CONFIG`` names, and defaults.

    Raises ``ConfigError`` for an unknown or ill-typed setting, naming where it stands and the nearest valid one.
    """
    flags = flags or {}
    environ = os.environ if environ is None else environ
    given: list[tuple[_Setting, object, str]] = []
    file = flags.get("config") or environ.get(PREFIX + "CONFIG")
    if file:
        given += _from_file(Path(str(file)))
    given += _from_environment(environ)
    given += [
        (_SETTINGS[name], raw, f"flag {_SETTINGS[name].flag}") for name, raw in flags.items() if name in _SETTINGS
    ]
    sources = dict.fromkeys((setting.dotted for setting in _SETTINGS.values()), "default")
    values: dict[str, dict[str, Any]] = {section: {} for section in ("", *_SECTIONS)}
    for setting, raw, source in given:
        values[setting.section][setting.name] = setting.converted(raw, source)
        sources[setting.dotted] = source
    hints = type_hints(Settings)
    sections = {section: hints[section](**values[section]) for section in _SECTIONS}
    return Effective(Settings(**values[""], **sections), sources)
