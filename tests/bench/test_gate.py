"""The gate's benchmark runs, and says what its readers rely on; its figures are for a quiet machine."""

from __future__ import annotations

import json
import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvtier.bench.ablation import Found
from kvtier.bench.engine import Passes
from kvtier.bench.report import Stopped
from kvtier.config import GateMode
from tests.support import ROOT, script

FAST = "paced://smollm2-135m?gpu=h100&utilisation=0.01"


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return script("benchmarks/gate.py")


def test_every_factor_has_a_row_and_without_the_gate_a_slow_tier_is_slow(
    module: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in (("SETTLING", 2), ("FACTORS", (2.0, 0.1)), ("MOST_DRIFT", 100.0)):
        monkeypatch.setattr(module, name, value)
    report = tmp_path / "report.json"
    options = ["--quick", "--models", FAST, "--tiers", "nvme", "--parts", "throttle"]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["gate", "--json", str(report), *options])
    told: dict[str, Any] = {}
    for slow in (2.0, 8.0, 32.0):  # a loaded machine may take longer for a step than a throttled tier for its blocks
        monkeypatch.setattr(module, "SLOW", slow)
        assert module.main() == 0
        assert "[" in capsys.readouterr().err
        told = json.loads(report.read_text())
        assert told["complete"]
        rows = {(row["what"], row["factor"]): row for row in told["rows"]}
        assert {factor for _, factor in rows if factor is not None} == set(module.FACTORS)
        assert {what for what, _ in rows} <= {"gate on", "gate off", "out of reach", "short, delayed", "long, delayed"}
        judged = {what: row for what, row in rows.items() if what[0] != "out of reach"}
        assert all(row["loaded_share"] + row["declined_share"] <= 1 for row in judged.values())
        off, on = rows["gate off", 0.1], rows["gate on", 0.1]
        assert off["loaded_share"] == 1.0
        if off["ttft_p50_s"] > 2 * off["no_cache_ttft_p50_s"] and on["declined_share"] >= 0.5:
            break
    else:
        pytest.fail(f"without the gate a slow tier is not slow, or with it it is used: {told['rows']}")


def test_a_run_that_is_ended_keeps_what_it_found_and_passes_nothing(
    module: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(self: Any) -> None:
        self.report.add(
            dict.fromkeys(("factor", "loaded_share", "declined_share", "ttft_p50_s"), 1)
            | {"model": "m", "tier": "t", "what": "w", "no_cache_ttft_p50_s": 1}
        )
        assert not json.loads(report.read_text())["complete"], "written as it comes"
        self.ground.proceed()

    report = tmp_path / "report.json"
    monkeypatch.setattr(module.Trial, "run", run)
    monkeypatch.chdir(tmp_path)
    options = ["--tiers", "dram", "--parts", "throttle", "--minutes", "0", "--quick"]
    monkeypatch.setattr(sys, "argv", ["gate", "--json", str(report), *options])
    assert module.main() == 1
    told = json.loads(report.read_text())
    assert len(told["rows"]) == 1 and not told["complete"]
    assert told["wrong"] == ["ended early (the time is up): what was not run is not shown"]
    assert issubclass(module.OutOfTime, Stopped)


@pytest.mark.parametrize("wrong", [("--tiers", "dram,nvem"), ("--parts", "throtle")])
def test_a_part_that_there_is_not_does_not_pass(
    module: Any, wrong: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["gate", *wrong])
    with pytest.raises(module.ConfigError, match=wrong[1]):
        module.main()


def test_what_comes_from_elsewhere_or_from_nowhere_is_told(module: Any, tmp_path: Path) -> None:
    """A tier that lost its blocks loads nothing, which is no merit of the gate; what DRAM still has is no merit of the tier."""
    ground = module.Ground("nvme", f"nvme://{tmp_path}/n?capacity=64MiB&write=through", 0, 128, 16, lambda: None)
    with module.bed(ground, f"{FAST}&slow=2", GateMode.ON) as made:
        made.store._lower("nvme").empty()
        lost = made.share(made.longs[:1], 1)
        assert (lost.loaded, lost.declined, lost.lost) == (0.0, 0.0, 1.0)
        empty, made.store.empty = made.store.empty, lambda tier: 0
        made.serve(made.longs[0])
        with pytest.raises(RuntimeError, match="dram had blocks that nvme alone was to have"):
            made.serve(made.longs[0])
        made.store.empty = empty


@pytest.mark.parametrize(
    ("factor", "loaded", "declined", "computing", "says"),
    [
        (0.5, 0.019, 0.981, 1.0, None),
        (0.5, 0.021, 0.979, 1.0, "2.1% of the tokens loaded at 0.5"),
        (0.1, 0.021, 0.979, 1.0, "2.1% of the tokens loaded at 0.1"),
        (0.1, 0.0, 0.9, 1.0, "invalid, 10.0% of the tokens at 0.1 neither loaded nor declined by the gate"),
        (1.0, 0.5, 0.5, 1.0, None),
        (2.0, 0.951, 0.049, 1.0, None),
        (2.0, 0.949, 0.051, 1.0, "94.9% of the tokens loaded at 2"),
        (10.0, 0.949, 0.051, 1.0, "94.9% of the tokens loaded at 10"),
        (10.0, 1.0, 0.0, 2.0, "invalid, computing takes 2.00 times as long at 10 as at first"),
    ],
)
def test_a_factor_holds_by_the_share_that_was_loaded(
    module: Any, factor: float, loaded: float, declined: float, computing: float, says: str | None
) -> None:
    share = module.Share(loaded, declined, 1.0, computing)
    made: Any = SimpleNamespace(
        throttled=lambda _: None, share=lambda *_, **__: share, longs=[], cold=1.0, even=1e9, computing=1.0
    )
    report = module.Report(None, {})
    module.Trial("m", SimpleNamespace(tier="t"), 1, report)._judged(made, factor)
    assert report.wrong == ([] if says is None else [f"m, t: {says}"])


@pytest.mark.parametrize(
    ("model", "spent", "says"),
    [("real", 0.03, None), ("real", 0.031, "3.1%"), ("real", 0.0, "0.0%"), ("paced://m", 0.5, None)],
)
def test_the_stores_threads_may_take_three_in_a_hundred(
    module: Any, monkeypatch: pytest.MonkeyPatch, model: str, spent: float, says: str | None
) -> None:
    found = Found(rows=[{"workload": "unique", "cache": "on", "store_cpu_share": spent}])
    monkeypatch.setattr(module, "compare", lambda *_: found)
    report = module.Report(None, {})
    module.workloads(report, model, [], 0, Passes(["unique"], 7, 2, 1.0), lambda: None)
    assert len(report.wrong) == int(says is not None)
    assert says is None or says in report.wrong[0]


@pytest.mark.parametrize(("ttft", "holds"), [(2.0, True), (1.9, False)])
def test_a_run_whose_throttle_slows_nothing_is_invalid(
    module: Any, monkeypatch: pytest.MonkeyPatch, ttft: float, holds: bool
) -> None:
    made: Any = SimpleNamespace(
        time_computing=lambda _: None, throttled=lambda _: None, bandwidth=lambda: 1e12, longs=[], tokens=256,
        share=lambda *_, **__: module.Share(0.0, 1.0, ttft, 1.0), computing=1.0, cold=1.0, even=1e6,
        assembly=SimpleNamespace(engine=SimpleNamespace(pace=None)),
    )  # fmt: skip
    monkeypatch.setattr(module, "FACTORS", (0.1,))
    monkeypatch.setattr(module.Trial, "_bed", lambda *_: nullcontext(made))
    report = module.Report(None, {})
    module.Trial("m", SimpleNamespace(tier="dram"), 1, report).run()
    assert report.wrong == (
        [] if holds else ["m, dram: invalid, without the gate it is not 2 times slower than no cache"]
    )
