"""The Triton kernel without a GPU: interpreted against torch's attention, and compiled ahead of time for GPUs."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kvtier.testing.requirements import require_installed

CASES = Path(__file__).parent / "triton_cases.py"
ERRORS = {"bf16": 0.02, "fp16": 0.002, "fp32": 2e-6}
"""Queries and weights are rounded to the KV dtype, which torch's attention does not do; sums are float32 in both."""


def run(what: str, cache: Path, **environment: str) -> dict[str, Any]:
    require_installed(importlib.util.find_spec("triton"), "pip install triton")
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("TRITON_")}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(CASES), what],
        env=inherited | {"PYTHONPATH": os.pathsep.join(sys.path), "TRITON_CACHE_DIR": str(cache), **environment},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    result: dict[str, Any] = json.loads(done.stdout)
    return result


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_kernel_gives_what_torch_gives(tmp_path: Path) -> None:
    results = run("compare", tmp_path, TRITON_INTERPRET="1")
    assert results.pop("company") is True, "a row's bits depend on what is computed beside it"
    assert len(results) >= 16
    for case, got in results.items():
        print(case, got)
        dtype = next(name for name in ERRORS if name in case)
        assert got["error"] < ERRORS[dtype], case
        assert (got["spare"], got["written alike"], got["other layer"]) == (0.0, 1.0, 0.0), case


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_kernel_compiles_for_gpus(tmp_path: Path) -> None:
    sizes = run("compile", tmp_path)
    assert len(sizes) == 4
    assert min(sizes.values()) > 10_000
