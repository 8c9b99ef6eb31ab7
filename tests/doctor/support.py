"""``kvtier doctor`` as a person runs it."""

from __future__ import annotations

import json
from typing import Any

import pytest

from kvtier.cli import main as cli

SEALED = "1 sealed frame proven but for the payload, which takes the tier's key (encrypt=KEYFILE)"


def doctor(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, dict[str, Any], str]:
    """Exit code, the tier's part of the JSON, and what stderr had."""
    code = cli.main(["doctor", "--json", *argv])
    out, err = capsys.readouterr()
    return code, json.loads(out)["tiers"][0] if out else {}, err


def kinds(told: dict[str, Any]) -> list[str]:
    return [finding["kind"] for finding in told["findings"]]
