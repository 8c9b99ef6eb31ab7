"""Every known bug can still be put back: its snippet is where it was, once, and the tests that notice it exist."""

from __future__ import annotations

import re

import pytest

from tests.support import ROOT, script

mutants = script("scripts/mutants.py")


def test_every_mutant_fits_the_tree() -> None:
    """Where this fails, a snippet was edited: say in ``tests/mutants`` how the same bug looks now."""
    known = mutants.read_mutants(ROOT)
    assert len(known) >= 30
    assert mutants.misfits(ROOT, known) == []
    for mutant in known:
        text = (ROOT / mutant.file).read_text(encoding="utf-8")
        compile(text.replace(mutant.old, mutant.new), mutant.file, "exec")


def test_every_symptom_has_a_mutant_of_its_own() -> None:
    """And no mutant has two tests: the one that turns red first would hide that the other stays green."""
    noticed = [test for mutant in mutants.read_mutants(ROOT) for test in mutant.tests]
    assert len(noticed) == len(mutants.read_mutants(ROOT))
    covered = {test.partition("[")[0] for test in noticed}
    for path in sorted((ROOT / "tests" / "symptoms").glob("test_*.py")):
        for name in re.findall(r"^def (test_\w+)\(", path.read_text(encoding="utf-8"), re.MULTILINE):
            test = f"tests/symptoms/{path.name}::{name}"
            assert test in covered, f"{test}: put the bug back in a mutant, or it may never have been red"


def test_what_does_not_fit_is_said() -> None:
    tests = ("tests/test_key.py::test_golden_vectors",)
    good = mutants.Mutant("m", "s", "kvtier/key.py", "def root_key(", "def roots_key(", tests)
    assert mutants.misfits(ROOT, [good]) == []
    for changes, says in (
        ({"old": "not there at all"}, "is 0 times in kvtier/key.py"),
        ({"old": "return"}, "times in kvtier/key.py, and has to be there once"),
        ({"new": good.old}, "changes nothing"),
        ({"file": "kvtier/nowhere.py"}, "is 0 times in kvtier/nowhere.py"),
        ({"tests": ("tests/test_key.py::test_of_nothing",)}, "no test tests/test_key.py::test_of_nothing"),
    ):
        (wrong,) = mutants.misfits(ROOT, [mutants.Mutant(**{**vars(good), **changes})])
        assert says in wrong


@pytest.mark.parametrize(
    ("code", "output", "hang", "word", "right"),
    [
        (1, "1 failed", False, "red", True),
        (0, "3 passed", False, "GREEN", False),
        (0, "1 passed, 1 skipped in 1 s", False, "GREEN", False),
        (0, "1 skipped in 1 s", False, "not run here", True),
        (2, "error in collection", False, "pytest ended with 2", False),
        (None, "", False, "stopped", False),
        (None, "", True, "red (hangs)", True),
    ],
)
def test_only_a_test_that_fails_is_red(code: int | None, output: str, hang: bool, word: str, right: bool) -> None:
    mutant = mutants.Mutant("m", "s", "f", "a", "b", ("t",), hang)
    assert mutants.verdict(mutant, mutants.Run(code, output, 1.0)) == (word, right)
