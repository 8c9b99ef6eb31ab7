"""What ships for testing asks for no more than it uses: never torch, and pytest and Hypothesis only for suites and machine."""

from __future__ import annotations

import subprocess
import sys

import pytest

SUITES = ("media", "policies", "codecs", "stores", "connectors", "machine", "faults")
TOOLS = ("hand", "blocks", "faults", "rig", "oracle", "long_run")


@pytest.mark.parametrize(
    ("modules", "absent"),
    [(SUITES, ("torch", "transformers")), (TOOLS, ("torch", "transformers", "pytest", "hypothesis"))],
    ids=["suites", "tools"],
)
def test_is_imported_without(modules: tuple[str, ...], absent: tuple[str, ...]) -> None:
    script = "import sys\n"
    script += "".join(f"sys.modules[{name!r}] = None\n" for name in absent)
    script += "".join(f"import kvtier.testing.{name}\n" for name in modules)
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)
