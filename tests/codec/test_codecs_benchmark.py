"""The codec benchmark runs on real KV and says what its readers rely on; its rates are for a quiet machine."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tests.support import script

COST = {"codec", "ratio", "gb_s_in", "gb_s_out", "cpu_s_per_gb_in", "cpu_s_per_gb_out", "limit_gb_s"}


@pytest.mark.model
def test_every_codec_has_a_row_and_the_lossy_ones_say_what_they_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    module = script("benchmarks/codec_costs.py")
    monkeypatch.setattr(module, "GREEDY", 4)
    report = tmp_path / "report.json"
    monkeypatch.setattr(sys, "argv", ["codecs", "--json", str(report), "--rounds", "1", "--tokens", "320"])
    assert module.main() == 0
    rows = {row["codec"]: row for row in json.loads(report.read_text())["rows"]}
    assert list(rows) == ["raw", "shuffle+lz4", "zstd", "fp8", "int8"]
    assert all(row.keys() >= COST for row in rows.values())
    assert rows["raw"]["ratio"] == 1 < rows["shuffle+lz4"]["ratio"] < rows["zstd"]["ratio"] < rows["int8"]["ratio"] < 2
    for name in ("fp8", "int8"):
        assert 0 < rows[name]["kl_per_token"] < 0.01
        assert abs(rows[name]["perplexity_change_percent"]) < 2
        assert rows[name]["best_token_same_percent"] > 90
        assert rows[name]["greedy_of"] == 32
    assert rows["int8"]["kl_per_token"] < rows["fp8"]["kl_per_token"]
    assert "limit: np.copyto" in capsys.readouterr().out
