"""Put known bugs back, one at a time, and see that the tests notice.

Each ``[[mutant]]`` in ``tests/mutants/*.toml`` says which ``file``, what stands there (``old``, exactly once), what the bug
is to make of it (``new``), which ``tests`` must turn red, and the ``symptom`` that a user would see. Everything happens in
copies of the tree in a temporary folder. Green without a mutant is checked first; then every mutant has one pytest of its
own. A mutant that its tests do not notice, or whose snippet is not there exactly once, fails the run.
"""

from __future__ import annotations

import argparse
import os
import queue
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields
from pathlib import Path

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[1]
WORKERS = min(2, os.cpu_count() or 1)
MUTANT_SECONDS = 60
"""A pytest that takes longer is stopped: red where the symptom is a hang, else a failure of this run."""
GREEN_SECONDS = 300
_LEFT_OUT = shutil.ignore_patterns(
    ".venv", ".git", "build", "dist", "*.egg-info", "__pycache__", ".*_cache", ".hypothesis", ".coverage*"
)
_WHERE = "import kvtier, kvtier.storage_backends.dram as m; print(kvtier.__file__); print(m.__file__)"


@dataclass(frozen=True)
class Mutant:
    """One bug."""

    name: str
    symptom: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]
    hang: bool = False
    """Whether the bug shows as tests that do not end."""

    def misfit(self, root: Path) -> str | None:
        """Why it cannot be applied to the tree at ``root``."""
        path = root / self.file
        found = path.read_text(encoding="utf-8").count(self.old) if path.is_file() else 0
        if found != 1:
            return f"{self.name}: its snippet is {found} times in {self.file}, and has to be there once"
        if self.old == self.new:
            return f"{self.name}: changes nothing"
        return None

    def unknown_tests(self, root: Path) -> list[str]:
        """Tests whose file has no function of that name."""
        unknown = []
        for test in self.tests:
            file, _, rest = test.partition("::")
            function = rest.rpartition("::")[2].partition("[")[0]
            path = root / file
            if not path.is_file() or f"def {function}(" not in path.read_text(encoding="utf-8"):
                unknown.append(test)
        return unknown


def read_mutants(root: Path = ROOT) -> list[Mutant]:
    """All mutants in the order of their files. Raises ``ValueError`` for a wrong field or a name that is there twice."""
    known = {field.name for field in fields(Mutant)}
    mutants: list[Mutant] = []
    for path in sorted((root / "tests" / "mutants").glob("*.toml")):
        for table in tomllib.loads(path.read_text(encoding="utf-8"))["mutant"]:
            if set(table) - known:
                raise ValueError(f"{path.name}: unknown fields {sorted(set(table) - known)}")
            mutants.append(Mutant(**{**table, "tests": tuple(table["tests"])}))
    names = [mutant.name for mutant in mutants]
    if len(set(names)) < len(names):
        raise ValueError(f"a name is there twice: {sorted(name for name in names if names.count(name) > 1)}")
    return mutants


def misfits(root: Path, mutants: Sequence[Mutant]) -> list[str]:
    """What is wrong with mutants against the tree at ``root``, in words."""
    wrong = [why for mutant in mutants if (why := mutant.misfit(root)) is not None]
    return wrong + [f"{each.name}: no test {test}" for each in mutants for test in each.unknown_tests(root)]


@dataclass(frozen=True)
class Run:
    """How a pytest ended."""

    code: int | None
    """Its exit status; None where it was stopped."""
    output: str
    seconds: float


class Copy:
    """A copy of the tree, in which Python imports kvtier from the copy and not from where it is installed."""

    def __init__(self, root: Path, place: Path) -> None:
        shutil.copytree(root, place, symlinks=True, ignore=_LEFT_OUT)
        self._root = root
        self.place = place
        kept = {name: value for name, value in os.environ.items() if not name.startswith("KVTIER_")}
        kept |= {name: os.environ[name] for name in ("KVTIER_REQUIRE_ALL",) if name in os.environ}
        self._environment = kept | {
            "PYTHONPATH": str(place),
            "HF_HUB_OFFLINE": "1",
            "TOKENIZERS_PARALLELISM": "false",
            "OMP_NUM_THREADS": "1",
        }
        for line in self._python("-c", _WHERE, seconds=60).output.split():
            if not Path(line).is_relative_to(place):
                raise RuntimeError(f"{line} is imported, and not the copy in {place}")

    def test(self, tests: Sequence[str], *, seconds: float, first_failure: bool) -> Run:
        """Run ``tests`` in the copy as it is now."""
        options = ["-q", "--no-header", "-p", "no:cacheprovider", *(["-x"] if first_failure else [])]
        return self._python("-m", "pytest", *options, *tests, seconds=seconds)

    def mutated(self, mutant: Mutant) -> Run:
        """Run the mutant's tests under the mutant; the copy is whole again afterwards."""
        path = self.place / mutant.file
        text = path.read_text(encoding="utf-8").replace(mutant.old, mutant.new)
        compile(text, mutant.file, "exec")
        path.write_text(text, encoding="utf-8")
        try:
            return self.test(mutant.tests, seconds=MUTANT_SECONDS, first_failure=True)
        finally:
            shutil.copy2(self._root / mutant.file, path)  # with its time, so that what was compiled of it counts again

    def _python(self, *arguments: str, seconds: float) -> Run:
        began = time.monotonic()
        process = subprocess.Popen(
            [sys.executable, *arguments],
            cwd=self.place,
            env=self._environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        try:
            output, _ = process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            output, _ = process.communicate()
            return Run(None, output, time.monotonic() - began)
        return Run(process.returncode, output, time.monotonic() - began)


NOT_RUN = "not run here"


def verdict(mutant: Mutant, run: Run) -> tuple[str, bool]:
    """One word, and whether it is what it should be."""
    if run.code is None:
        return ("red (hangs)", True) if mutant.hang else ("stopped", False)
    if run.code == 1:
        return "red", True
    if run.code == 0:
        last = run.output.rstrip().rpartition("\n")[2]
        return (NOT_RUN, True) if "skipped" in last and "passed" not in last else ("GREEN", False)
    return f"pytest ended with {run.code}", False


def main() -> int:
    parser = argparse.ArgumentParser(description="put known bugs back and see that the tests notice")
    parser.add_argument("-k", metavar="WORD", default="", help="only mutants whose name or file has this word")
    parser.add_argument("--list", action="store_true", help="say what there is, and do nothing")
    arguments = parser.parse_args()
    mutants = [each for each in read_mutants() if arguments.k in each.name or arguments.k in each.file]
    if arguments.list:
        for mutant in mutants:
            print(f"{mutant.name}\n    {mutant.symptom}\n    {mutant.file}; {', '.join(mutant.tests)}")
        return 0
    wrong = misfits(ROOT, mutants)
    for line in wrong:
        print(line)
    if wrong or not mutants:
        return 1
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="kvtier-mutants-") as folder:
        copies: queue.Queue[Copy] = queue.Queue()
        for number in range(WORKERS):
            copies.put(Copy(ROOT, Path(folder).resolve() / f"tree{number}"))

        def green(tests: Sequence[str]) -> Run:
            copy = copies.get()
            try:
                return copy.test(tests, seconds=GREEN_SECONDS, first_failure=False)
            finally:
                copies.put(copy)

        def judge(mutant: Mutant) -> tuple[str, bool]:
            copy = copies.get()
            try:
                run = copy.mutated(mutant)
            finally:
                copies.put(copy)
            word, right = verdict(mutant, run)
            print(f"{word:<12} {run.seconds:5.1f} s  {mutant.name}", flush=True)
            if not right:
                print(f"    {mutant.symptom}\n    {', '.join(mutant.tests)}\n{run.output[-2000:]}", flush=True)
            return word, right

        with ThreadPoolExecutor(WORKERS) as pool:
            tests = sorted({test for mutant in mutants for test in mutant.tests})
            halves = [tests[start::WORKERS] for start in range(WORKERS) if tests[start::WORKERS]]
            for run in pool.map(green, halves):
                if run.code != 0:
                    print(f"the tests are not green without any mutant:\n{run.output[-4000:]}")
                    return 1
            print(f"green without mutants: {len(tests)} tests in {time.monotonic() - began:.0f} s", flush=True)
            verdicts = list(pool.map(judge, mutants))
    noticed = sum(word.startswith("red") for word, _ in verdicts)
    away = sum(word == NOT_RUN for word, _ in verdicts)
    print(
        f"{noticed} of {len(mutants)} mutants were noticed"
        + (f", the tests of {away} could not run here" if away else "")
        + f"; {time.monotonic() - began:.0f} s"
    )
    return 0 if all(right for _, right in verdicts) else 1


if __name__ == "__main__":
    sys.exit(main())
