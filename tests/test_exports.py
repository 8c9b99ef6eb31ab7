"""What ``import kvtier`` gives, and what it does not load."""

from __future__ import annotations

import subprocess
import sys
from types import ModuleType

import pytest

import kvtier


def test_all_is_the_namespace_and_sorted() -> None:
    names = {
        name
        for name, value in vars(kvtier).items()
        if not isinstance(value, ModuleType) and (name == "__version__" or not name.startswith("_"))
    }
    assert kvtier.__all__ == sorted(names)


@pytest.mark.parametrize("module", ["kvtier", "kvtier.config", "kvtier.metrics", "kvtier.registry", "kvtier.cli.main"])
def test_importing_loads_neither_torch_nor_redis(module: str) -> None:
    code = f"import sys, {module}; print(*sorted({{'torch', 'redis', 'transformers', 'rich'}} & set(sys.modules)))"
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout.strip(), done.stderr) == (0, "", "")
