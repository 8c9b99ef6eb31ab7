"""``kvtier doctor`` asks a running server what it finds in its memory."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn

from kvtier.cli import main as cli
from kvtier.engine.async_engine import AsyncEngine
from kvtier.engine.server import Served, make_app
from tests.engine.support import make_engine


@pytest.fixture
def served(tmp_path: Path) -> Iterator[tuple[str, str, list[str]]]:
    """URL and socket of a server, and the faults that its audit is to tell."""
    faults: list[str] = []
    app = make_app(AsyncEngine(make_engine(16)), Served("tiny", exact=True, audit=lambda: faults))
    path = tmp_path / "s.sock"
    tcp, unix = socket.create_server(("127.0.0.1", 0)), socket.socket(socket.AF_UNIX)
    unix.bind(str(path))
    unix.listen()
    server = uvicorn.Server(uvicorn.Config(app, log_config=None))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [tcp, unix]})
    thread.start()
    yield f"http://127.0.0.1:{tcp.getsockname()[1]}", str(path), faults
    server.should_exit = True
    thread.join(20)
    tcp.close()
    unix.close()


def test_a_running_server_is_asked(served: tuple[str, str, list[str]], capsys: pytest.CaptureFixture[str]) -> None:
    url, path, faults = served
    for way in (["--base-url", url], ["--uds", path]):
        assert cli.main(["doctor", *way]) == 0
        assert capsys.readouterr().out.endswith("no faults in memory\n")
    faults.append("leaked lease: dram slot 3 has 1 references, 0 are held")
    assert cli.main(["doctor", "--uds", path, "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["findings"] == faults
    assert cli.main(["doctor", "--base-url", url.removeprefix("http://")]) == 1
    assert "  leaked lease: dram slot 3" in capsys.readouterr().out


def test_nobody_else_may_ask(served: tuple[str, str, list[str]]) -> None:
    app = make_app(AsyncEngine(make_engine(16)), Served("tiny", exact=True))

    async def status(host: str, path: str = "/admin/audit", **more: Any) -> int:
        transport = httpx.ASGITransport(app, client=(host, 5))
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            return (await client.post(path, **more)).status_code

    async def all_of_them() -> Sequence[int]:
        hosts = ("127.0.0.1", "::1", "", "10.1.2.3", "2001:db8::1", "localhost.example")
        return [await status(host, json={}) for host in hosts]

    assert asyncio.run(all_of_them()) == [200, 200, 200, 404, 404, 404]
    assert asyncio.run(status("127.0.0.1", content=b"{}")) == 415, "as a web page would ask"
