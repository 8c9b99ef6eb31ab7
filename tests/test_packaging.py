"""What is installed, and that the tools look at all of it."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from kvtier.testing.requirements import require_installed

ROOT = Path(__file__).parent.parent
LINKED = ("connectors", "storage_backends")
"""Folders at the top of the checkout that install under ``kvtier.``."""


def copy_of_checkout(target: Path) -> Path:
    """What the build and the tools read, links kept as links, without ``.venv`` and what builds leave."""
    ignored = shutil.ignore_patterns("__pycache__", "*.egg-info")
    for name in ("kvtier", *LINKED, "tests"):
        shutil.copytree(ROOT / name, target / name, symlinks=True, ignore=ignored)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        if (ROOT / name).exists():
            shutil.copy(ROOT / name, target / name)
    return target


def run(*command: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *command], cwd=cwd, capture_output=True, text=True, timeout=110, check=False)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with the sdist and the wheel that is built from it."""
    require_installed(find_spec("build") and find_spec("setuptools"), "pip install build setuptools")
    checkout = copy_of_checkout(tmp_path_factory.mktemp("checkout"))
    done = run("-m", "build", "--no-isolation", "--outdir", "dist", ".", cwd=checkout)
    assert done.returncode == 0, done.stderr
    yield checkout / "dist"
    shutil.rmtree(checkout)


def modules_of_checkout() -> set[str]:
    own = {f"kvtier/{path.relative_to(ROOT / 'kvtier')}" for path in (ROOT / "kvtier").rglob("*.py")}
    linked = {f"kvtier/{path.relative_to(ROOT)}" for name in LINKED for path in (ROOT / name).rglob("*.py")}
    return own | linked


@pytest.mark.slow
def test_the_wheel_holds_every_module_once(built: Path) -> None:
    (wheel,) = built.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    modules = [name for name in names if name.endswith(".py")]
    assert len(modules) == len(set(modules))
    assert set(modules) == modules_of_checkout()
    assert "kvtier/py.typed" in names
    assert any(name.endswith("licenses/LICENSE") for name in names)


@pytest.mark.slow
def test_the_sdist_holds_the_linked_packages(built: Path) -> None:
    (sdist,) = built.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
        assert not any(member.issym() for member in archive.getmembers())
    assert {f"kvtier/{name}/__init__.py" for name in LINKED} <= names
    assert "kvtier/py.typed" in names


@pytest.mark.slow
def test_the_wheel_works_where_nothing_of_the_checkout_is(built: Path, tmp_path: Path) -> None:
    (wheel,) = built.glob("*.whl")
    site = tmp_path / "site"
    zipfile.ZipFile(wheel).extractall(site)
    code = (
        f"import sys; sys.path.insert(0, {str(site)!r}); "
        # an editable install of this checkout must not fill a gap in the wheel
        "sys.meta_path[:] = [f for f in sys.meta_path if 'editable' not in getattr(f, '__module__', '')]; "
        "from kvtier.registry import plan_tier; from kvtier.config import TierUrl; "
        "plan_tier(TierUrl.parse('dram://?capacity=1MiB')); "
        "print(*(sys.modules[name].__file__ for name in ('kvtier', 'kvtier.storage_backends.dram')), sep='\\n')"
    )
    done = run("-c", code, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        str(site / "kvtier" / "__init__.py"),
        str(site / "kvtier" / "storage_backends" / "dram.py"),
    ]


@pytest.mark.parametrize("name", LINKED)
def test_the_links_point_at_the_folders_beside_the_package(name: str) -> None:
    link = ROOT / "kvtier" / name
    assert link.is_symlink()
    assert link.resolve() == ROOT / name


@pytest.mark.slow
@pytest.mark.parametrize("name", LINKED)
def test_mypy_sees_a_type_error_behind_the_links(name: str, tmp_path: Path) -> None:
    """Without the links mypy passes in silence on code that it never saw."""
    checkout = tmp_path / "checkout"
    checkout.mkdir()
    (checkout / "kvtier").mkdir()
    for folder in ("tests", "benchmarks"):
        (checkout / folder).mkdir()
        (checkout / folder / f"{folder}_nothing.py").touch()
    shutil.copy(ROOT / "pyproject.toml", checkout)
    (checkout / "kvtier" / "__init__.py").touch()
    for each in LINKED:
        (checkout / each).mkdir()
        (checkout / each / "__init__.py").touch()
        (checkout / "kvtier" / each).symlink_to((ROOT / "kvtier" / each).readlink())
    assert run("-m", "mypy", "--cache-dir", str(tmp_path / "cache"), cwd=checkout).returncode == 0
    (checkout / name / "planted.py").write_text('count: int = "one"\n')
    done = run("-m", "mypy", "--cache-dir", str(tmp_path / "cache"), cwd=checkout)
    assert done.returncode == 1
    assert f"kvtier/{name}/planted.py:1: error: Incompatible types in assignment" in done.stdout


def test_ruff_refuses_the_bare_names_of_linked_packages(tmp_path: Path) -> None:
    require_installed(find_spec("ruff"), "pip install ruff")
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    (tmp_path / "wrong.py").write_text("import connectors.bundled\nfrom storage_backends import dram\nimport pickle\n")
    done = run(
        "-m", "ruff", "check", "--select", "TID251", "--no-cache", "--output-format", "concise", ".", cwd=tmp_path
    )
    assert re.findall(r"wrong.py:(\d)", done.stdout) == ["1", "2", "3"]


@pytest.mark.parametrize(
    ("module", "line", "contract"),
    [
        ("kvtier/pool.py", "import kvtier.storage_backends.dram", "Arrows point one way"),
        ("connectors/planted.py", "import kvtier.cli.main", "Arrows point one way"),
        (
            "kvtier/engine/planted.py",
            "import kvtier.store",
            "The engine meets the store through the connector contract",
        ),
    ],
)
def test_an_import_against_the_arrows_breaks_its_contract(
    module: str, line: str, contract: str, tmp_path: Path
) -> None:
    require_installed(find_spec("importlinter"), "pip install import-linter")
    checkout = copy_of_checkout(tmp_path)
    with (checkout / module).open("a") as file:
        file.write(f"\n{line}\n")
    code = "import sys; sys.path.insert(0, '.'); from importlinter.cli import lint_imports_command as main; main(['--no-cache'])"
    done = run("-c", code, cwd=checkout)
    assert done.returncode == 1
    assert f"{contract} BROKEN" in done.stdout


def test_every_dependency_has_a_pin() -> None:
    name = re.compile(r'^"?([A-Za-z0-9_.-]+)', re.ASCII)
    listed = {
        line.split("==")[0] for line in (ROOT / "constraints.txt").read_text().splitlines() if not line.startswith("#")
    }
    text = (ROOT / "pyproject.toml").read_text()
    blocks = re.findall(r"^(?:dependencies|engine|demo|test|lint) = \[(.*?)\]$", text, re.DOTALL | re.MULTILINE)
    wanted = {
        found[1].lower()
        for block in blocks
        for entry in re.findall(r'"[^"]+"', block)
        if (found := name.match(entry)) is not None
    }
    assert len(blocks) == 5
    assert wanted - listed == set()
