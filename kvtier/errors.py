"""Every exception that leaves kvtier, as one tree.

KvtierError
|-- ConfigError            a setting, URL or model is wrong: exit code 2, the message says what to change
|   |-- CapacityError      more was asked than disk, memory or cgroup allow
|   `-- ModelError         a checkpoint is missing or is of a kind that is not supported
|-- RequestError           one request's fault: HTTP 400
|-- MediumError            a medium failed; inside the store this is a miss, never an exception for the engine
|   |-- MediumUnavailable  it does not answer (degraded; it may come back)
|   |-- MediumRefused      it answers and refuses (wrong password, plain text to a TLS port)
|   `-- MediumFull         it has no disk, memory or budget left
|-- NotEncodable           a block that a lossy codec cannot keep: it is not saved
`-- CorruptFrame           bytes that are not what their header, their key or their sum says
"""

import errno


def one_line(text: object) -> str:
    """What somebody else has said, for an error's message: on one line, not too long, nothing that moves a cursor."""
    return "".join(each for each in " ".join(str(text).split()) if each.isprintable())[:200]


class KvtierError(Exception):
    """The root of everything that kvtier raises."""


class ConfigError(KvtierError):
    """A setting, a URL or a model is wrong; the message says what to change."""


class CapacityError(ConfigError):
    """More was asked than the machine allows; the message names asked, available and where."""


class ModelError(ConfigError):
    """A checkpoint is missing or is of a kind that is not supported."""


class RequestError(KvtierError):
    """A request cannot be served as it was made (HTTP 400)."""


class MediumError(KvtierError):
    """A medium failed. The store turns this into misses and a metric."""


class MediumUnavailable(MediumError):
    """The medium does not answer; its tier is degraded until it does."""


class MediumRefused(MediumError):
    """The medium answers and refuses: credentials, TLS, rights."""


class MediumFull(MediumError):
    """The medium has no room left for what was to be written."""


DISK_FULL = frozenset({errno.ENOSPC, errno.EDQUOT})
"""Numbers of an ``OSError`` that is a `MediumFull`."""


class NotEncodable(KvtierError):
    """A block has values that the store's lossy codec cannot keep (not finite, or beyond all measure)."""


class CorruptFrame(KvtierError):
    """Bytes are not what their header, their key or their sum says."""
