"""The gate's benchmark runs, and says what its readers rely on; its figures are for a quiet machine."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tests.support import script


def test_every_factor_has_a_row_and_without_the_gate_a_slow_tier_is_slow(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = script("benchmarks/gate.py")
    for name, value in (("SETTLING", 2), ("PROMPTS", 1), ("FACTORS", (2.0, 0.1)), ("PACED_LONG", 256)):
        monkeypatch.setattr(module, name, value)
    monkeypatch.setattr(module, "SLOW", 2.0)
    report = tmp_path / "report.json"
    options = [
        "--quick",
        "--models",
        "paced://smollm2-135m?gpu=h100&utilisation=0.01",
        "--tiers",
        "nvme",
        "--parts",
        "throttle",
    ]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["gate", "--json", str(report), *options])
    assert module.main() == 0
    told = json.loads(report.read_text())
    rows = {(row["what"], row["factor"]): row for row in told["rows"]}
    assert {factor for _, factor in rows if factor is not None} == set(module.FACTORS)
    assert {what for what, _ in rows} <= {"gate on", "gate off", "out of reach", "short, delayed", "long, delayed"}
    assert all(0 <= row["loaded_share"] <= 1 for (what, _), row in rows.items() if what != "out of reach")
    assert rows["gate off", 0.1]["loaded_share"] == 1.0
