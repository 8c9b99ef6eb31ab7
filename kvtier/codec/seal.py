"""Sealing frames: AES-256-GCM over a frame's payload and content sum, with the rest of its header as associated data.

A tier's key file holds a secret. Each tenant has a key of its own: HKDF-SHA256 (RFC 5869) of the secret and the tenant id. A
nonce is 96 random bits, drawn for each seal and kept in the header; NIST SP 800-38D asks for a new secret after 2**32
seals per tenant. The frame grows by nothing: the sealed content sum stands where the plain one would, the tag where the
stored sum would, the nonce in what was zero. What stays readable is what recovery and clearing need: key, parent, depth,
digests, tenant and adapter id, shard, layout, times, lengths. Another key, another header or one flipped bit do not open.
"""

from __future__ import annotations

import os
import stat
import threading
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import xxhash

from kvtier.codec.frame import NONCE_BYTES, PIECE_BYTES, associated_data
from kvtier.errors import ConfigError, CorruptFrame

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.ciphers import AEADDecryptionContext, AEADEncryptionContext

LEAST_SECRET_BYTES = 32
_MOST_SECRET_BYTES = 64 << 10
_MOST_TENANTS = 1024
"""Derived keys that are kept."""
_SLACK = 15
"""Bytes that the library wants behind what it writes, though GCM writes none there."""
_TAIL_BYTES = 4096
"""The end of a payload, which goes through a buffer that has the slack."""


class Sealer:
    """Seals and opens the frames of one tier. Thread-safe."""

    def __init__(self, secret: bytes) -> None:
        """Raises ``ConfigError`` where the library is not installed."""
        try:
            import cryptography  # noqa: F401, PLC0415 - an extra, and loaded only where a tier asks for it
        except ImportError:
            raise ConfigError("encrypt needs a library; run: pip install 'kvtier[encrypt]'") from None
        assert len(secret) >= LEAST_SECRET_BYTES
        self._secret = secret
        self._keys: dict[bytes, bytes] = {}
        self._lock = threading.Lock()

    @classmethod
    def from_file(cls, path: str) -> Sealer:
        """The sealer of a key file: at least 32 bytes that nobody but its owner may read. Raises ``ConfigError``."""
        how = f"make one with: head -c 32 /dev/urandom > {path or 'FILE'}; chmod 600 {path or 'FILE'}"
        try:
            with Path(path).open("rb") as file:
                found = os.fstat(file.fileno())
                if not stat.S_ISREG(found.st_mode):
                    raise ConfigError(f"encrypt: {path!r} is no file; {how}")
                if stat.S_IMODE(found.st_mode) & 0o077:
                    raise ConfigError(
                        f"encrypt: the key file {path} has mode {stat.S_IMODE(found.st_mode):04o}, so others may read it; "
                        f"run: chmod 600 {path} (and {how.replace('make one', 'make a new one')} if somebody has)"
                    )
                secret = file.read(_MOST_SECRET_BYTES + 1)
        except (OSError, ValueError) as failed:
            why = failed.strerror if isinstance(failed, OSError) else failed
            # A key that is there may be in use: nobody is told to make another.
            there = isinstance(failed, OSError) and not isinstance(failed, FileNotFoundError)
            then = "whoever runs this has to own it" if there else how
            raise ConfigError(f"encrypt: cannot read the key file {path!r}: {why}; {then}") from None
        if not LEAST_SECRET_BYTES <= len(secret) <= _MOST_SECRET_BYTES:
            size = f"{len(secret)} bytes" if len(secret) <= _MOST_SECRET_BYTES else "more"
            raise ConfigError(f"encrypt: the key file {path} holds {size}; it takes 32 bytes to 64 KiB; {how}")
        return cls(secret)

    def __repr__(self) -> str:
        return "Sealer(<secret>)"

    def seal(
        self, tenant: bytes, nonce: bytes, page: memoryview, content: bytes, plain: memoryview, into: memoryview
    ) -> tuple[bytes, bytes]:
        """Encrypt ``plain`` into ``into`` (at least as long; may be the same memory) for the header in ``page``.

        Returns the sealed content sum and the tag. ``nonce`` is never used again.
        """
        from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes  # noqa: PLC0415 - as above

        context = Cipher(algorithms.AES256(self._key(tenant)), modes.GCM(nonce)).encryptor()
        context.authenticate_additional_data(associated_data(page))
        sealed = context.update(content)
        _moved(context, plain, into, None)
        context.finalize()
        return sealed, context.tag

    def open(
        self, tenant: bytes, nonce: bytes, page: memoryview, content: bytes, tag: bytes, payload: memoryview
    ) -> tuple[bytes, bytes]:
        """Decrypt ``payload`` where it is. Returns the content sum that was sealed, and that of what has come out.

        Raises ``CorruptFrame`` where anything is not as it was sealed; ``payload`` then holds garbage.
        """
        from cryptography.exceptions import InvalidTag  # noqa: PLC0415 - as above
        from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes  # noqa: PLC0415 - as above

        context = Cipher(algorithms.AES256(self._key(tenant)), modes.GCM(nonce, tag)).decryptor()
        context.authenticate_additional_data(associated_data(page))
        opened = context.update(content)
        digester = xxhash.xxh3_128()
        _moved(context, payload, payload, digester)
        try:
            context.finalize()
        except InvalidTag:
            raise CorruptFrame("the seal does not open: another key, another frame's, or damaged") from None
        return opened, digester.digest()

    def _key(self, tenant: bytes) -> bytes:
        with self._lock:
            key = self._keys.get(tenant)
        if key is not None:
            return key
        from cryptography.hazmat.primitives.hashes import SHA256  # noqa: PLC0415 - as above
        from cryptography.hazmat.primitives.kdf.hkdf import HKDF  # noqa: PLC0415 - as above

        key = HKDF(SHA256(), 32, salt=None, info=b"kvtier frame seal 1" + tenant).derive(self._secret)
        with self._lock:
            if len(self._keys) >= _MOST_TENANTS:
                self._keys.clear()
            self._keys[tenant] = key
        return key


def new_nonce() -> bytes:
    return os.urandom(NONCE_BYTES)


def _moved(
    context: AEADEncryptionContext | AEADDecryptionContext,
    source: memoryview,
    into: memoryview,
    digester: xxhash.xxh3_128 | None,
) -> None:
    """Run ``source`` through the cipher into ``into``, piece by piece, and the result through ``digester`` while it is hot."""
    size = len(source)
    bulk = max(0, size - _TAIL_BYTES)
    for start in range(0, bulk, PIECE_BYTES):
        end = min(start + PIECE_BYTES, bulk)
        context.update_into(source[start:end], into[start : end + _SLACK])
        if digester is not None:
            digester.update(into[start:end])
    tail = context.update(source[bulk:])
    np.copyto(np.frombuffer(into, np.uint8)[bulk:size], np.frombuffer(tail, np.uint8))
    if digester is not None:
        digester.update(tail)
