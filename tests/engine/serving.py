"""A server over the tiny model, as tests of its HTTP side start it."""

from __future__ import annotations

import socket
import threading
from typing import TYPE_CHECKING

import httpx
import uvicorn

from kvtier.abc.connector import KVConnector
from kvtier.engine.async_engine import AsyncEngine
from kvtier.engine.connection import Connection
from kvtier.engine.server import Served, make_app
from kvtier.metrics import Metrics
from tests.support import until

from .support import TEMPLATE, make_engine

if TYPE_CHECKING:
    from typing_extensions import Self

CHAT = [{"role": "user", "content": "hello there"}]


class Running:
    """A server on a thread of its own, on a free port of loopback."""

    def __init__(self, connector: KVConnector | None = None, *, template: str = TEMPLATE) -> None:
        self.metrics = Metrics()
        self.connector = connector
        self.core = make_engine(96, connector=connector, metrics=self.metrics.engine, template=template)
        self.engine = AsyncEngine(self.core, max_open=12)
        self.tiers = {"hbm": "ok", "redis": "ok"}
        self.notes: list[str] = []
        served = Served(
            "tiny",
            exact=True,
            tiers=lambda: self.tiers,
            notes=lambda: self.notes,
            metrics=self.metrics.render,
            shutdown_seconds=2.0,
        )
        self.server = uvicorn.Server(
            uvicorn.Config(make_app(self.engine, served), http=Connection, port=0, log_config=None)
        )
        self.socket = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self.socket.getsockname()[1]}"
        self.thread = threading.Thread(target=self.server.run, kwargs={"sockets": [self.socket]})

    def __enter__(self) -> Self:
        self.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.server.should_exit = True
        self.thread.join(60.0)
        self.socket.close()
        assert not self.thread.is_alive()

    def until_idle(self) -> None:
        until(lambda: not self.core.has_work, 60.0, "every request has ended")
        assert self.core.check_integrity() == []

    def post(self, path: str, body: object, **more: object) -> httpx.Response:
        return httpx.post(f"{self.url}{path}", json=body, timeout=60.0, **more)  # type: ignore[arg-type]

    def complete(self, **body: object) -> httpx.Response:
        return self.post(
            "/v1/completions", {"model": "tiny", "prompt": "abc", "max_tokens": 4, "temperature": 0, **body}
        )
