"""What tests on a GPU need, and what the interpreter at hand lacks of it."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec

import pytest

from kvtier.testing.requirements import require_installed, require_machine

NEEDED = ("torch", "numpy", "msgpack", "xxhash", "prometheus_client", "tokenizers", "jinja2")
"""Without these no test here can be read."""
WANTED = (
    "cupy",
    "triton",
    "safetensors",
    "gguf",
    "lz4",
    "zstandard",
    "redis",
    "rich",
    "pydantic",
    "starlette",
    "uvicorn",
)
"""What the rest of kvtier is made of."""


def _missing(names: tuple[str, ...]) -> list[str]:
    return [name for name in names if find_spec(name) is None]


if _missing(NEEDED):
    collect_ignore_glob = ["test_*.py"]


def pytest_report_header() -> str:
    lacks = [*_missing(NEEDED), *_missing(WANTED)]
    return f"this interpreter lacks: {', '.join(lacks) or 'nothing'}"


def pytest_sessionfinish(session: pytest.Session) -> None:
    if _missing(NEEDED):
        pytest.exit(f"tests on a GPU need, in this interpreter: {', '.join(_missing(NEEDED))}", returncode=2)


@pytest.fixture(scope="session", autouse=True)
def gpu() -> Iterator[None]:
    """Skips where there is no GPU or CuPy is missing."""
    import torch  # noqa: PLC0415 - see NEEDED

    require_machine(torch.cuda.is_available(), f"a CUDA device (torch {torch.__version__} sees none)")
    require_installed(find_spec("cupy"), "pip install 'kvtier[cuda]' (or [cuda13])")
    require_installed(find_spec("triton"), "pip install triton")
    torch.cuda.set_device(0)
    yield
    torch.cuda.synchronize()
