"""The guide for writing a backend is true: its package is taken from the page, installed, and passes its own tests."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from kvtier.abc.medium import KeyMedium
from kvtier.testing.requirements import require_installed

GUIDE = Path(__file__).parent.parent / "docs" / "writing-a-backend.md"


def files_of(guide: str) -> dict[str, str]:
    """The files of a page: its blocks of code that name one, those of one file one after the other."""
    files: dict[str, str] = {}
    for name, text in re.findall(r"^```\w+ file=(\S+)\n(.*?)^```$", guide, re.MULTILINE | re.DOTALL):
        files[name] = files.get(name, "") + text
    return files


def test_the_guide_names_every_method_that_a_key_medium_needs() -> None:
    guide = GUIDE.read_text(encoding="utf-8")
    missing = [name for name in sorted(KeyMedium.__abstractmethods__) if f"`{name}(" not in guide]
    assert not missing, f"the guide does not say what these are for: {missing}"


@pytest.mark.slow
def test_the_package_of_the_guide_passes_its_tests(tmp_path: Path) -> None:
    require_installed(find_spec("setuptools"), "pip install setuptools")
    package, site = tmp_path / "kvtier-box", tmp_path / "site"
    package.mkdir()
    files = files_of(GUIDE.read_text(encoding="utf-8"))
    assert sorted(files) == ["kvtier_box.py", "pyproject.toml", "test_box.py"]
    for name, text in files.items():
        (package / name).write_text(text, encoding="utf-8")
    quiet = ("-p", "no:cacheprovider", "-p", "no:asyncio", "-p", "no:valkey")
    for command in (
        ("pip", "install", "--quiet", "--no-deps", "--no-build-isolation", "--target", str(site), "."),
        ("pytest", "-q", "-W", "error", *quiet, "test_box.py"),
    ):
        done = subprocess.run(
            [sys.executable, "-m", *command],
            cwd=package,
            env={**os.environ, "PYTHONPATH": str(site)},
            capture_output=True,
            text=True,
            timeout=100,
            check=False,
        )
        assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
        print(done.stdout[-200:])
