"""Virtual environments of the peers: made once, in a folder that is given, and used again."""

from __future__ import annotations

import ctypes.util
import os
import re
import subprocess
import sys
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parents[2]
LMCACHE = "lmcache==0.5.6"
WITHOUT = {"torch", "cupy-cuda13x", "cuda-python", "cufile-python", "google-cloud-bigtable"}
"""What LMCache asks for and does without on a CPU; torch comes by our own pin."""
MOONCAKE = "mooncake-transfer-engine-non-cuda==0.3.13.post1"
DEBIAN = ("libibverbs1", "libnl-3-200", "libnl-route-3-200", "librdmacm1")
"""Libraries that Mooncake is linked to, for TCP as well."""
BUILD_SECONDS = 900.0


class NotBuilt(Exception):
    """Why an environment could not be made, in a line."""


@dataclass(frozen=True, slots=True)
class Environment:
    """Where a peer runs."""

    python: Path
    variables: dict[str, str] = field(default_factory=dict)


def _run(command: Sequence[str | Path], log: Path, cwd: Path | None = None) -> None:
    with log.open("ab") as out:
        try:
            done = subprocess.run(command, stdout=out, stderr=out, cwd=cwd, timeout=BUILD_SECONDS, check=False)
        except (OSError, subprocess.TimeoutExpired) as failed:
            raise NotBuilt(f"{Path(command[0]).name}: {failed}") from failed
    if done.returncode:
        lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
        raise NotBuilt(f"{lines[-1][:200] if lines else done.returncode} (log: {log})")


def _pip(folder: Path, *arguments: str | Path) -> None:
    pip = (folder / "bin" / "python", "-m", "pip", "--disable-pip-version-check")
    _run([*pip, *arguments], folder / "install.log")


def _fresh(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    _run([sys.executable, "-m", "venv", "--clear", folder], folder.parent / "venv.log")


def lmcache(parent: Path) -> Environment:
    """Raises ``NotBuilt``."""
    folder = parent / "lmcache"
    made = Environment(folder / "bin" / "python", {"LMCACHE_LOG_LEVEL": "ERROR", "LMCACHE_TRACK_USAGE": "false"})
    if (folder / "complete").exists():
        return made
    _fresh(folder)
    _pip(folder, "install", "-c", ROOT / "constraints.txt", "torch")
    _pip(folder, "download", "--no-deps", "-d", folder, LMCACHE)
    (wheel,) = folder.glob("lmcache-*.whl")
    with zipfile.ZipFile(wheel) as opened:
        (name,) = [each for each in opened.namelist() if each.endswith(".dist-info/METADATA")]
        lines = opened.read(name).decode().splitlines()
    asked = [line.partition(":")[2].strip() for line in lines if line.startswith("Requires-Dist:")]
    needed = [one for one in asked if "extra ==" not in one and re.split(r"[\s<>=!;\[]", one)[0].lower() not in WITHOUT]
    _pip(folder, "install", *needed)
    _pip(folder, "install", "--no-deps", wheel)
    (folder / "complete").touch()
    return made


def mooncake(parent: Path) -> Environment:
    """Raises ``NotBuilt``. Its libraries come from Debian's packages where the machine has none; nothing is installed."""
    folder = parent / "mooncake"
    variables = {}
    if ctypes.util.find_library("ibverbs") is None:
        root = folder / "debian"
        places = [str(each.parent) for each in root.rglob("lib*.so.*")]
        variables["LD_LIBRARY_PATH"] = os.pathsep.join(dict.fromkeys(places))
    made = Environment(folder / "bin" / "python", variables)
    if (folder / "complete").exists():
        return made
    _fresh(folder)
    _pip(folder, "install", MOONCAKE)
    if ctypes.util.find_library("ibverbs") is None:
        root = folder / "debian"
        root.mkdir()
        try:
            _run(["apt-get", "download", *DEBIAN], folder / "install.log", cwd=root)
            for package in root.glob("*.deb"):
                _run(["dpkg-deb", "-x", package, root], folder / "install.log")
        except NotBuilt as failed:
            raise NotBuilt(f"it needs {', '.join(DEBIAN)}: {failed}") from failed
    (folder / "complete").touch()
    return mooncake(parent)


def mooncake_master(environment: Environment) -> Path:
    """The program that Mooncake's clients ask where things are."""
    (found,) = (environment.python.parents[1]).glob("lib/python*/site-packages/mooncake/mooncake_master")
    return found
