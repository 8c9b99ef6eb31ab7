"""What the documents tell people to type is taken, and what they point at is there."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from kvtier.cli import main as cli
from kvtier.registry import plan_tier
from kvtier.url import TierUrl

ROOT = Path(__file__).parent.parent
DOCUMENTS = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").rglob("*.md"))]
WITH_COMMANDS = [ROOT / "README.md", ROOT / "docs" / "operating.md", ROOT / "docs" / "measuring.md"]
ROOMS = (ROOT, ROOT / "kvtier", ROOT / "kvtier" / "testing", ROOT / "kvtier" / "sim", ROOT / "benchmarks")


def commands(document: Path) -> list[str]:
    """The lines of fenced blocks, and the spans of code in the text, that begin with ``kvtier`` and an argument."""
    text = document.read_text(encoding="utf-8").replace("\\\n", " ")
    fenced = re.findall(r"^```\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    plain = re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)
    spans = [" ".join(span.split()) for span in re.findall(r"`([^`]+)`", plain)]
    lines = [line for block in fenced for line in block.splitlines()]
    return [each for each in (*lines, *spans) if re.match(r"kvtier [a-z]+ .*\S", each) and "[" not in each]


@pytest.mark.parametrize("document", WITH_COMMANDS, ids=lambda path: path.name)
def test_each_command_is_one_that_is_taken(document: Path) -> None:
    found = commands(document)
    for command in found:
        _, args = cli._parse(shlex.split(command, comments=True)[1:])
        if args.subcommand != "simulate":  # whose URLs say how fast a tier is
            for url in getattr(args, "tiers", None) or ():
                plan_tier(TierUrl.parse(url))
    assert found


def anchors(document: Path) -> set[str]:
    headings = re.findall(r"^#+ (.*)$", document.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_what_a_document_points_at_is_there(document: Path) -> None:
    text = document.read_text(encoding="utf-8")
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        name, _, anchor = target.partition("#")
        if "://" not in target:
            there = document.parent / name if name else document
            assert there.exists(), target
            assert not anchor or anchor in anchors(there), target
    for name in re.findall(r"`((?:[\w.-]+/)*[\w-]+\.py)`", text):
        if name != "kvtier_box.py":
            assert any((room / name).exists() for room in ROOMS), name
