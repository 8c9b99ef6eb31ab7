"""What a run says of the tests that it could not do."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from kvtier.testing.requirements import kind_of

SUITE = """
import pytest
from kvtier.testing.requirements import require_installed, require_machine

@pytest.mark.model
def test_real_model(): pass

def test_browser(): require_installed(False, "apt-get install chromium")

def test_gpu(): require_machine(False, "a GPU")

def test_another_gpu(): require_machine(None, "a GPU")

def test_plain():
    require_installed(True, "nothing")
    require_machine([1], "nothing")
"""


def run(folder: Path, *options: str, require_all: bool = False) -> subprocess.CompletedProcess[str]:
    shutil.copy(Path(__file__).parent / "conftest.py", folder)
    shutil.copy(Path(__file__).parent.parent / "pyproject.toml", folder)
    (folder / "test_some.py").write_text(SUITE)
    environment = os.environ | {"KVTIER_REQUIRE_ALL": str(int(require_all)), "PYTEST_SEED": "77"}
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-v", *options, "test_some.py"]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=60, check=False)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The output of a run in which nothing is wrong."""
    done = run(tmp_path_factory.mktemp("plain"))
    assert done.returncode == 0, done.stdout
    return done.stdout


def test_the_closing_list_has_two_kinds(plain: str) -> None:
    _, _, closing = plain.partition("could not run here")
    lines = [line.strip() for line in closing.splitlines()]
    installable = next(number for number, line in enumerate(lines) if line.startswith("installable"))
    assert lines[installable + 1] == "1 x apt-get install chromium"
    assert lines[installable + 2].startswith("machine")
    assert lines[installable + 3] == "2 x a GPU"


def test_with_require_all_what_is_installable_fails_and_what_is_not_is_skipped(tmp_path: Path) -> None:
    done = run(tmp_path, require_all=True)
    assert done.returncode == 1
    assert "1 failed, 2 passed, 2 skipped" in done.stdout
    assert "installable: apt-get install chromium (KVTIER_REQUIRE_ALL=1)" in done.stdout


def test_fast_tests_go_first_and_the_seed_is_printed(plain: str) -> None:
    order = [line.partition("::")[2].split()[0] for line in plain.splitlines() if line.startswith("test_some.py::")]
    assert order[-1] == "test_real_model"
    assert "seed: 77 (PYTEST_SEED)" in plain


def test_a_marker_that_nobody_declared_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "test_other.py").write_text("import pytest\n\n@pytest.mark.gpuu\ndef test_it(): pass\n")
    done = run(tmp_path, "test_other.py")
    assert done.returncode == 2
    assert "'gpuu' not found in `markers`" in done.stdout


@pytest.mark.parametrize(
    ("said", "kind"),
    [
        ("Skipped: installable: a thing", ("installable", "a thing")),
        ("machine: a: b", ("machine", "a: b")),
        ("Skipped: not today", ("other", "not today")),
        ("other: thing", ("other", "other: thing")),
    ],
)
def test_the_kind_is_read_back_from_a_skip(said: str, kind: tuple[str, str]) -> None:
    assert kind_of(said) == kind
