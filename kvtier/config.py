"""Every setting: its type, its default, and where its effective value came from.

A setting is one field of a frozen dataclass below. Its flag (``--hbm-blocks``), its environment variable
(``KVTIER_HBM_BLOCKS``), its key in the TOML file (``hbm_blocks`` in table ``[engine]``) and its line in ``kvtier config``
all follow from that field. A flag goes before the environment, the environment before the file, the file before the
default. This is the only module that reads the environment.
"""

from __future__ import annotations

import argparse
import enum
import os
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Any, TypeVar, cast

from kvtier.errors import ConfigError
from kvtier.machine import available_memory
from kvtier.params import build_params, convert, nearest, type_hints
from kvtier.quantity import Bytes, Seconds, format_bytes
from kvtier.url import TierUrl

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

__all__ = [
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

T = TypeVar("T")
PREFIX = "KVTIER_"
HBM_BLOCKS = 1024
"""Blocks of HBM where nobody says how many."""
_NOT_SETTINGS = {"API_KEY", "CA_FILE", "CONFIG", "REDIS_URL", "REQUIRE_ALL"}
"""Variables that are ours and are not settings: the file, and what demo, tests and benchmarks read."""
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


class LoadFormat(enum.Enum):
    """Where the weights come from."""

    AUTO = "auto"
    DUMMY = "dummy"


class KvDtype(enum.Enum):
    """What HBM slots hold."""

    AUTO = "auto"
    BF16 = "bf16"
    FP16 = "fp16"
    FP32 = "fp32"


class StoreCodec(enum.Enum):
    """How every tier below HBM keeps blocks."""

    RAW = "raw"
    FP8 = "fp8"
    INT8 = "int8"


class AttentionKernels(enum.Enum):
    """What computes attention."""

    AUTO = "auto"
    TORCH = "torch"
    TRITON = "triton"
    FLASHINFER = "flashinfer"


class GateMode(enum.Enum):
    """Whether blocks are loaded only where that is faster than computing them."""

    ON = "on"
    OFF = "off"


class Preemption(enum.Enum):
    """What becomes of the blocks of a sequence that has to give up its slots."""

    CHEAPER = "cheaper"
    RECOMPUTE = "recompute"
    DEMOTE = "demote"


class LogLevel(enum.Enum):
    """The least severe message that is logged."""

    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


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


def _default_tiers() -> tuple[TierUrl, ...]:
    quarter = available_memory().nbytes // 4 >> 20 << 20
    return (TierUrl("dram", params={"capacity": format_bytes(max(quarter, 1 << 20))}),)


def _setting(default: T, help_text: str, *, at_least: int | None = None, at_most: int | None = None) -> T:
    """A field with the help of its flag. Its type is the default's, as ``dataclasses.field`` has it."""
    made: T = field(default=default, metadata={"help": help_text, "at_least": at_least, "at_most": at_most})
    return made


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """The bundled engine."""

    model: str = _setting(
        "SmolLM2-135M-Instruct",
        "model: a local folder or GGUF file, a hub id, the bundled SmolLM2, or paced://llama-3-8b?gpu=h100&slow=1, which "
        "computes nothing and takes the time of that GPU",
    )
    model_name: str | None = _setting(
        None, "name of the model in keys and in the API, where the folder's is not wanted"
    )
    revision: str | None = _setting(None, "revision of the weights; without one they are fingerprinted")
    load_format: LoadFormat = _setting(LoadFormat.AUTO, "where weights come from; dummy: random, from the config alone")
    device: str = _setting("auto", "where the model runs: cpu, cuda or cuda:N; auto: a GPU where there is one")
    attention: AttentionKernels = _setting(
        AttentionKernels.AUTO, "attention kernels; auto: Triton's on a GPU, torch's on a CPU"
    )
    kv_dtype: KvDtype = _setting(
        KvDtype.AUTO, "what HBM slots hold; auto: the checkpoint's own 16-bit dtype, else bf16"
    )
    block_tokens: int = _setting(16, "tokens per block", at_least=1)
    hbm_blocks: int | None = _setting(
        None,
        f"blocks that HBM (on a CPU: the engine's own memory) holds; none: {HBM_BLOCKS}, of a paced model less",
        at_least=2,
    )
    hbm_policy: str = _setting(
        "lru", "eviction policy of HBM: lru, fifo, lfu, slru, arc, s3fifo, sieve, wtinylfu, gdsf, ttl or adaptive"
    )
    max_model_len: int | None = _setting(
        None, "longest sequence in tokens; none: what the model was made for", at_least=1
    )
    max_num_seqs: int = _setting(16, "sequences that run at once", at_least=1)
    max_num_batched_tokens: int = _setting(512, "tokens per step; longer prompts are computed in chunks", at_least=1)
    prefix_cache: bool = _setting(default=True, help_text="reuse blocks of earlier requests that are still in HBM")
    longest_prefix_first: bool = _setting(
        default=False,
        help_text="start waiting requests in order of the prefix that they share with what is in HBM or being computed",
    )
    preemption: Preemption = _setting(
        Preemption.CHEAPER,
        "where HBM runs out, the last to arrive gives way: its blocks are demoted to the tiers below or computed again; "
        "cheaper: as the gate judges",
    )
    recompute_sample: float = _setting(
        0.0,
        "share of loads, 0 to 1, of which one block is computed again and compared; what differs is dropped",
        at_least=0,
        at_most=1,
    )
    threads: int = _setting(0, "compute threads; 0: one per core", at_least=0)
    seed: int = _setting(0, "seed of sampling and of dummy weights", at_least=0)


@dataclass(frozen=True, slots=True)
class StoreSettings:
    """What all tiers share."""

    deadline: Seconds = _setting(Seconds(2.0), "longest wait of a request for blocks on their way from a lower tier")
    gate: GateMode = _setting(
        GateMode.ON, "load blocks only where that is faster than computing them, as measured; off: load every hit"
    )
    transfer_threads: int = _setting(4, "threads that move blocks between tiers", at_least=1)
    codec: StoreCodec = _setting(
        StoreCodec.RAW, "how blocks are kept below HBM; fp8 and int8 halve them and are lossy: hits are then not exact"
    )
    drain: Seconds = _setting(Seconds(20.0), "longest wait at shutdown for blocks that a lower tier still lacks")


@dataclass(frozen=True, slots=True)
class ServerSettings:
    """The HTTP server."""

    host: str = _setting("127.0.0.1", "address to listen on")
    port: int = _setting(8000, "port to listen on; 0: any free one", at_least=0, at_most=65535)
    uds: str | None = _setting(None, "Unix socket to listen on instead of host and port")
    record: str | None = _setting(
        None, "new file for a trace of the requests: times, lengths and block keys, never text, for kvtier replay"
    )


@dataclass(frozen=True, slots=True)
class Settings:
    """All settings; the nested ones are the tables of the TOML file."""

    tiers: tuple[TierUrl, ...] = field(
        default_factory=_default_tiers,
        metadata={
            "help": "a tier below HBM, as a URL; repeat it, fastest first (default: dram:// of a quarter of free memory)",
            "flag": "--tier",
        },
    )
    log_level: LogLevel = _setting(LogLevel.INFO, "least severe message that is logged")
    engine: EngineSettings = field(default_factory=EngineSettings)
    store: StoreSettings = field(default_factory=StoreSettings)
    server: ServerSettings = field(default_factory=ServerSettings)


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
        group.add_argument(setting.flag, metavar=setting.name.rpartition("_")[2].upper(), help=text, **known)


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
        if name == variable or name in _NOT_SETTINGS:
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


def redis_url(environ: Mapping[str, str] | None = None) -> TierUrl | None:
    """The Redis that demo and benchmarks are to use (``KVTIER_REDIS_URL``); None: they start their own."""
    text = (os.environ if environ is None else environ).get(PREFIX + "REDIS_URL")
    return TierUrl.parse(text) if text else None


def environment_secret(variable: str, environ: Mapping[str, str] | None = None) -> bytes:
    """A secret that stands in a variable which a flag names. Raises ``ConfigError`` where it is not set."""
    text = (os.environ if environ is None else environ).get(variable)
    if text is None:
        raise ConfigError(f"environment: {variable} is not set")
    return text.encode()


@dataclass(frozen=True, slots=True)
class ApiAccess:
    """What lets a client in at a server: never a flag, never shown."""

    key: str | None = field(default=None, repr=False)
    """Sent as a bearer token."""
    ca_file: str | None = None
    """Certificates that the server's is trusted by; None: the system's."""


def api_access(environ: Mapping[str, str] | None = None) -> ApiAccess:
    """``KVTIER_API_KEY`` and ``KVTIER_CA_FILE``, each where it is set."""
    environ = os.environ if environ is None else environ
    return ApiAccess(environ.get(PREFIX + "API_KEY") or None, environ.get(PREFIX + "CA_FILE") or None)


def requires_all(environ: Mapping[str, str] | None = None) -> bool:
    """Whether a test that lacks something installable fails instead of being skipped (``KVTIER_REQUIRE_ALL=1``)."""
    return (os.environ if environ is None else environ).get(PREFIX + "REQUIRE_ALL") == "1"
