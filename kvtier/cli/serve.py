"""``kvtier serve``: the OpenAI-compatible server over the configured tiers."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import errno
import logging
import os
import signal
import socket
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from kvtier.cli.log import start_logging
from kvtier.config import ServerSettings, Settings, resolve
from kvtier.config import add_arguments as add_settings
from kvtier.errors import ConfigError

if TYPE_CHECKING:
    import uvicorn

    from kvtier.assembly.assemble import Assembly
    from kvtier.engine.recording import Recorder

log = logging.getLogger(__name__)

GRACE_SECONDS = 10
"""How long open requests may go on after SIGTERM."""

LATE_SECONDS = 5
"""How long after that their connections may take to end."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_settings(parser, "engine", "store", "server")


def run(args: argparse.Namespace) -> int:
    settings = resolve(vars(args)).settings
    start_logging(settings.log_level)
    stop = _Stop()
    if settings.server.uds is None and settings.server.host not in ("127.0.0.1", "::1", "localhost"):
        log.warning(
            "%s is not loopback: whoever reaches it can use this server without a password", settings.server.host
        )
    with closing(_bound(settings.server)) as sock, _recorder(settings) as recorder:
        from kvtier.assembly.assemble import assemble

        assembly = assemble(settings)
        assembly.engine.recorder = recorder
        try:
            server = _server(assembly)
            stop.server = server
            print(f"kvtier serves {assembly.engine.identity.model} at {_place(sock)}", file=sys.stderr, flush=True)
            if not stop.asked:
                server.run(sockets=[sock])
        finally:
            if settings.server.uds is not None:
                Path(settings.server.uds).unlink(missing_ok=True)
            if not assembly.close():
                log.warning("not everything could be written down in %.0f s", assembly.drain_seconds)
    return 0


@contextlib.contextmanager
def _recorder(settings: Settings) -> Iterator[Recorder | None]:
    """Who writes the trace that was asked for; made before the model is loaded, so that a name in use is one line at once."""
    if settings.server.record is None:
        yield None
        return
    from kvtier.assembly import assemble  # noqa: F401 - says in a line what is missing where the engine cannot be imported
    from kvtier.engine.recording import Recorder

    recorder = Recorder(Path(settings.server.record), settings.engine.block_tokens)
    try:
        yield recorder
    finally:
        recorder.close()


class _Stop:
    """SIGTERM and SIGINT while the server does not handle them itself: before it listens, and after it has shut down.

    Then it raises the signal once more, which would end the process before the tiers have been drained.
    """

    def __init__(self) -> None:
        self.asked = False
        self.server: uvicorn.Server | None = None
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._note)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.asked = True
        if self.server is not None:
            self.server.should_exit = True


def _bound(settings: ServerSettings) -> socket.socket:
    """Bound and listening before the model is loaded, so that an address in use is one line at once."""
    try:
        if settings.uds is None:
            family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
            return socket.create_server((settings.host, settings.port), family=family, backlog=512)
        return _bound_path(settings.uds)
    except (OSError, OverflowError) as error:
        where = settings.uds or f"{settings.host}:{settings.port}"
        why = str(getattr(error, "strerror", None) or error)
        # Python repeats the address behind the reason.
        raise ConfigError(f"cannot listen on {where}: {why.partition(' (while attempting')[0]}") from error


def _bound_path(path: str) -> socket.socket:
    """A socket that only this user may open. One that a dead server has left is replaced; a live one is not."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    with (
        contextlib.suppress(FileNotFoundError, ConnectionRefusedError),
        closing(socket.socket(socket.AF_UNIX)) as probe,
    ):
        probe.connect(path)
        raise OSError(errno.EADDRINUSE, "another server listens there")
    if Path(path).is_socket():
        Path(path).unlink()
    before = os.umask(0o177)
    try:
        sock.bind(path)
    finally:
        os.umask(before)
    sock.listen(512)
    return sock


def _place(sock: socket.socket) -> str:
    if sock.family == socket.AF_UNIX:
        return f"unix:{sock.getsockname()}"
    host, port = sock.getsockname()[:2]
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"


def _server(assembly: Assembly) -> uvicorn.Server:
    import uvicorn

    from kvtier.engine.async_engine import AsyncEngine
    from kvtier.engine.connection import Connection
    from kvtier.engine.server import Served, make_app

    engine = AsyncEngine(assembly.engine)

    class Server(uvicorn.Server):
        async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
            """The engine ends what is open after the grace, so that clients are told; uvicorn would cut them off."""
            log.info("stopping; open requests have %d s to end", GRACE_SECONDS)
            closing = asyncio.ensure_future(engine.close(GRACE_SECONDS))
            await super().shutdown(sockets)
            if self.force_exit:  # a second Ctrl-C: uvicorn has not told the application to end
                await self.lifespan.shutdown()
            closing.cancel()
            await asyncio.gather(closing, return_exceptions=True)

    served = Served(
        assembly.engine.identity.model,
        assembly.engine.config.exact,
        tiers=assembly.tiers,
        notes=assembly.notes,
        audit=assembly.audit,
        clear=None if assembly.store is None else assembly.store.clear,
        metrics=assembly.render_metrics,
        shutdown_seconds=0,  # the grace is over when the application is told to end
    )
    config = uvicorn.Config(
        make_app(engine, served),
        http=Connection,
        log_config=None,
        access_log=False,
        server_header=False,
        log_level="warning",
        timeout_graceful_shutdown=GRACE_SECONDS + LATE_SECONDS,
    )
    return Server(config)
