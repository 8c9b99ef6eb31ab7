"""What this machine allows: the same bytes to the same kind of place, without header, sum or index of ours."""

from __future__ import annotations

import os
import queue
import socket
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

from kvtier.abc.medium import Iovec
from kvtier.errors import MediumError
from kvtier.storage_backends.nvme import NvmeMedium
from kvtier.storage_backends.nvme_file import PAGE_BYTES

SOCKET_BYTES = 1 << 20
"""Buffers of a Unix socket, as the tier sets them."""
LIFE_MS = 600_000
"""What a limit leaves on a server expires by itself, should nobody be left to remove it."""


def spread(job: Callable[[int], None], indices: Sequence[int], hands: int, pool: Executor) -> None:
    """``job`` for each index, on this thread and up to ``hands - 1`` of the pool's, as the tiers do it: nobody waits for a
    thread that has not begun."""
    turn = iter(indices)  # next() of a C iterator is atomic under the GIL

    def play() -> None:
        for index in turn:
            job(index)

    others = [pool.submit(play) for _ in range(min(hands, len(indices)) - 1)]
    try:
        play()
    finally:
        begun = [other for other in others if not other.cancel()]
        wait(begun)
    for other in begun:
        other.result()


class Limit(ABC):
    """Moves values (header page and payload) between buffers and bare places, which are numbered. Thread-safe."""

    @abstractmethod
    def write(self, part: range, data: Sequence[Iovec]) -> None:
        """Returns when the values of ``part`` are as safe as the tier makes them; ``data`` is by number."""

    @abstractmethod
    def read(self, part: range, into: Sequence[Iovec]) -> None:
        """Fill ``into``, which is by number, with the values of ``part``."""

    @abstractmethod
    def close(self) -> None:
        """Remove what was written, where the tier does not."""


def _whole(done: int, wanted: int) -> None:
    if done != wanted:
        raise MediumError(f"the limit's I/O was short: {done} of {wanted} bytes")


class FileLimit(Limit):
    """preadv and pwritev on the tier's own slots, one fdatasync per batch, with as many threads as the tier has."""

    def __init__(self, medium: NvmeMedium, directory: Path, slots: Sequence[int], threads: int) -> None:
        (self.path,) = directory.glob("slots-*.kvt")
        stride = int(self.path.stem.partition("-")[2])
        self._places = [slot * stride + PAGE_BYTES for slot in slots]
        self._threads = threads
        self._pool = ThreadPoolExecutor(threads)
        self._descriptor = os.open(self.path, os.O_RDWR | (os.O_DIRECT if medium.io == "direct" else 0))

    def write(self, part: range, data: Sequence[Iovec]) -> None:
        def write(index: int) -> None:
            _, payload = data[index]
            _whole(os.pwritev(self._descriptor, [payload], self._places[index]), len(payload))

        spread(write, part, self._threads, self._pool)
        os.fdatasync(self._descriptor)

    def read(self, part: range, into: Sequence[Iovec]) -> None:
        def read(index: int) -> None:
            _, payload = into[index]
            _whole(os.preadv(self._descriptor, [payload], self._places[index]), len(payload))

        spread(read, part, self._threads, self._pool)

    def close(self) -> None:
        self._pool.shutdown()
        os.close(self._descriptor)


class SocketLimit(Limit):
    """A bare RESP loop over sockets that redis-py has connected, as many as the tier has, under the tier's own names."""

    def __init__(self, make: Callable[[], Any], names: Sequence[bytes], connections: int) -> None:
        self._names = names
        self._pool = ThreadPoolExecutor(connections)
        self._connections = [make() for _ in range(connections)]
        self._idle: queue.LifoQueue[socket.socket] = queue.LifoQueue()
        try:
            for connection in self._connections:
                connection.connect()
                sock: socket.socket = connection._sock  # redis-py has no public name for it
                if sock.family == socket.AF_UNIX:
                    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SOCKET_BYTES)
                    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, SOCKET_BYTES)
                self._idle.put(sock)
        except BaseException:
            self.close()
            raise

    def write(self, part: range, data: Sequence[Iovec]) -> None:
        def write(sock: socket.socket, index: int) -> None:
            name, (page, payload) = self._names[index], data[index]
            size = len(page) + len(payload)
            head = b"*5\r\n$3\r\nSET\r\n$%d\r\n%b\r\n$%d\r\n" % (len(name), name, size)
            sock.sendall(head + page)
            sock.sendall(payload)
            sock.sendall(b"\r\n$2\r\nPX\r\n$%d\r\n%d\r\n" % (len(str(LIFE_MS)), LIFE_MS))
            _came(sock, b"+OK\r\n")

        self._over_sockets(write, part)

    def read(self, part: range, into: Sequence[Iovec]) -> None:
        def read(sock: socket.socket, index: int) -> None:
            name, (page, payload) = self._names[index], into[index]
            sock.sendall(b"*2\r\n$3\r\nGET\r\n$%d\r\n%b\r\n" % (len(name), name))
            _came(sock, b"$%d\r\n" % (len(page) + len(payload)))
            _fill(sock, page)
            _fill(sock, payload)
            _came(sock, b"\r\n")

        self._over_sockets(read, part)

    def _over_sockets(self, job: Callable[[socket.socket, int], None], part: range) -> None:
        hands = min(len(self._connections), len(part))

        def play(hand: int) -> None:
            sock = self._idle.get()
            try:
                for index in part[hand::hands]:
                    job(sock, index)
            except OSError as error:
                raise MediumError(f"the limit's connection: {error}") from error
            finally:
                self._idle.put(sock)

        spread(play, range(hands), hands, self._pool)

    def close(self) -> None:
        self._pool.shutdown()
        for connection in self._connections:
            connection.disconnect()


def _came(sock: socket.socket, wanted: bytes) -> None:
    came = bytearray(len(wanted))
    _fill(sock, memoryview(came))
    if came != wanted:
        raise MediumError(f"the limit's server answered {bytes(came)!r}")


def _fill(sock: socket.socket, into: memoryview) -> None:
    got = 0
    while got < len(into):
        came = sock.recv_into(into[got:])
        if not came:
            raise MediumError("the server closed the limit's connection")
        got += came


class FolderLimit(Limit):
    """A file per value: written under another name, synced, renamed; read by one readv. On one thread, as the tier does it."""

    def __init__(self, folder: Path, *, sync: bool) -> None:
        self._folder = folder
        self._sync = sync
        folder.mkdir(0o700)

    def write(self, part: range, data: Sequence[Iovec]) -> None:
        for index in part:
            path = self._folder / f"{index}.new"
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
            try:
                _whole(os.writev(descriptor, data[index]), sum(map(len, data[index])))
                if self._sync:
                    os.fsync(descriptor)
            finally:
                os.close(descriptor)
            path.rename(self._folder / f"{index}")

    def read(self, part: range, into: Sequence[Iovec]) -> None:
        for index in part:
            descriptor = os.open(self._folder / f"{index}", os.O_RDONLY | os.O_CLOEXEC)
            try:
                _whole(os.readv(descriptor, into[index]), sum(map(len, into[index])))
            finally:
                os.close(descriptor)

    def close(self) -> None:
        """The folder goes with the one around it."""
