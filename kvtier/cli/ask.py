"""Asking a running server of this machine, over loopback or its Unix socket."""

from __future__ import annotations

import argparse
import http.client
import json
import socket
from contextlib import closing
from typing import Any
from urllib.parse import urlsplit

from kvtier.errors import ConfigError, one_line

ANSWER_SECONDS = 60.0
_MOST_BYTES = 32 << 20


class Refused(ConfigError):
    """The server answers, and says what is wrong with what it was asked."""


def add_server_arguments(parser: argparse.ArgumentParser, default: str | None = None) -> None:
    """``--base-url`` (``default`` where neither is given) or ``--uds``."""
    server = parser.add_mutually_exclusive_group()
    what = "ask a running server on this host instead" if default is None else f"the server (default: {default})"
    server.add_argument("--base-url", dest="server_url", metavar="URL", default=default, help=what)
    server.add_argument("--uds", dest="server_uds", metavar="PATH", help="the same, over the server's Unix socket")


def asked(
    args: argparse.Namespace, path: str, body: object, expected: str, what: str, seconds: float = ANSWER_SECONDS
) -> dict[str, Any]:
    """POST ``body`` to the server that ``--base-url`` or ``--uds`` names: its answer, a JSON object that has ``expected``.

    Raises ``ConfigError`` where it does not answer in so many seconds, or is no server that gives a ``what``; ``Refused``
    where it refuses.
    """
    where = args.server_uds or args.server_url
    try:
        with closing(_connection(args, seconds)) as connection:
            raw = json.dumps(body).encode()
            connection.request("POST", path, body=raw, headers={"content-type": "application/json"})
            answer = connection.getresponse()
            came = answer.read(_MOST_BYTES)
    except (OSError, http.client.HTTPException) as failed:
        raise ConfigError(
            f"{where}: no answer ({failed or type(failed).__name__}); is `kvtier serve` running there?"
        ) from failed
    try:
        found = json.loads(came)
        refusal = one_line(found["error"]["message"]) if answer.status != http.client.OK else ""
    except (ValueError, LookupError, TypeError, RecursionError):
        found, refusal = None, ""
    if refusal and answer.status == http.client.BAD_REQUEST:
        raise Refused(f"{where}: {refusal}")
    if answer.status != http.client.OK or not isinstance(found, dict) or expected not in found:
        raise ConfigError(
            f"{where}: answered {answer.status}{f' ({refusal})' if refusal else ''} and no {what}; "
            "only a kvtier server does, asked over loopback or its Unix socket"
        )
    return found


def fetched(args: argparse.Namespace, path: str, seconds: float = ANSWER_SECONDS) -> str | None:
    """GET a text of the server; None where it gives none."""
    try:
        with closing(_connection(args, seconds)) as connection:
            connection.request("GET", path)
            answer = connection.getresponse()
            came = answer.read(_MOST_BYTES)
    except (OSError, http.client.HTTPException, ConfigError):
        return None
    return came.decode(errors="replace") if answer.status == http.client.OK else None


def _connection(args: argparse.Namespace, seconds: float) -> http.client.HTTPConnection:
    if args.server_uds is not None:
        return _UnixConnection(args.server_uds, seconds)
    try:
        url = urlsplit(args.server_url if "://" in args.server_url else f"http://{args.server_url}")
        if url.scheme == "http" and url.hostname:
            return http.client.HTTPConnection(url.hostname, url.port or 80, timeout=seconds)
        raise ConfigError(f"{args.server_url}: give the server's address, such as http://127.0.0.1:8000")
    except ValueError as wrong:
        raise ConfigError(f"{args.server_url}: {wrong}") from wrong


class _UnixConnection(http.client.HTTPConnection):
    def __init__(self, path: str, seconds: float) -> None:
        super().__init__("localhost", timeout=seconds)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)
