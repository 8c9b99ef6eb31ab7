"""``kvtier bench engine`` on a tiny checkpoint: what its rows count, how ways to batch are compared, and how it ends early."""

from __future__ import annotations

import itertools
import json
import math
import random
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kvtier.assembly.assemble import assemble
from kvtier.bench import engine as engine_bench
from kvtier.bench.ablation import EVERY, IDEAS, Found, Memory, Size, Slab, StaticBatch, _base, _figures, ideas
from kvtier.bench.drive import Drive, Played, store_cpu, store_cpu_since
from kvtier.bench.engine import Passes, _tell, _turns, compare, declined_tokens
from kvtier.bench.ratio import Ratio, ratio_of_medians
from kvtier.bench.report import Stopped, percentile
from kvtier.bench.workloads import WORKLOADS, Arrival, Conversation, Draw, arrivals, named
from kvtier.cli.main import main
from kvtier.config import Preemption, Settings, resolve
from kvtier.engine.request import RequestStats
from kvtier.engine.scheduler import Admission
from kvtier.metrics import Metrics
from tests.engine.tiny import make_tiny_checkpoint

pytestmark = pytest.mark.usefixtures("one_thread")

ROW = {
    "workload", "cache", "tiers", "ttft_p50_s", "ttft_p99_s", "itl_p50_s", "itl_p99_s", "tokens_per_s", "hit_rate",
    "loaded_tokens", "recomputed_on_purpose",
}  # fmt: skip
"""What each row has at least."""


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_checkpoint(tmp_path_factory.mktemp("tiny"), layers=1, hidden=32, heads=2, kv_heads=1, head_dim=16)


def settings(tiny: Path, **more: object) -> Settings:
    flags = {"model": str(tiny), "threads": 1, "tiers": ["dram://?capacity=16MiB"], "gate": "off", **more}
    return resolve(flags, {}).settings


def bench(tiny: Path, out: Path, *flags: str) -> tuple[int, dict[str, Any]]:
    common = ["--model", str(tiny), "--threads", "1", "--tier", "dram://?capacity=16MiB", "--json", str(out)]
    code = main(["bench", "engine", *common, *flags])
    return code, json.loads(out.read_text())


def test_hits_are_those_counted_by_hand(tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--scale", "0.25", "--hbm-blocks", "400", "--seed", "3", "--workloads", "documents,unique,chat"]
    code, report = bench(tiny, tmp_path / "out.json", *flags)
    rows = report["rows"]
    assert code == 0 and report["complete"] and report["seed"] == 3
    assert [(row["workload"], row["cache"]) for row in rows] == [
        ("documents", "on"), ("documents", "off"), ("unique", "on"), ("unique", "off"), ("chat", "on"), ("chat", "off"),
    ]  # fmt: skip
    assert all(set(row) >= ROW for row in rows)
    # Six documents of 128 tokens, four questions of 8 about each: three of four find the document's eight blocks.
    assert rows[0]["hit_rate"] == pytest.approx(3 * 128 / (4 * 136))
    assert [row["hit_rate"] for row in rows[1:4]] == [0, 0, 0]
    # Eight chats, prompts of 40, 60, 80 and 100 tokens: each finds the full blocks of what was computed before it (43, 63, 83
    # tokens), and all but the first two, which begin together, one block of the system prompt.
    assert rows[4]["prompt_tokens"] == rows[5]["prompt_tokens"] == 8 * (40 + 60 + 80 + 100)
    assert rows[4]["hit_rate"] == pytest.approx((8 * (32 + 48 + 80) + 6 * 16) / 2240)
    assert [row["tiers"] for row in rows] == ["hbm,dram", "none"] * 3
    assert all(row["loaded_tokens"] == 0 for row in rows)  # HBM holds all of it
    assert all(row["ttft_ratio"]["verdict"] == "too few pairs to say" for row in rows)
    shown = capsys.readouterr().out
    assert "seed 3" in shown and "documents" in shown


def test_what_hbm_cannot_hold_comes_from_the_tiers(tiny: Path, tmp_path: Path) -> None:
    flags = ["--scale", "0.25", "--workloads", "documents", "--gate", "off", "--pairs", "2"]
    _, report = bench(tiny, tmp_path / "out.json", *flags)
    on, off = report["rows"]
    assert on["loaded_tokens"] > 0 and off["loaded_tokens"] == 0
    assert on["prompt_tokens"] == off["prompt_tokens"] == 2 * 24 * 136


def test_a_run_finds_nothing_of_an_earlier_one(tiny: Path, tmp_path: Path) -> None:
    """With a tier that outlives the process, the same seed and as much from each tier."""
    rates = []
    for _ in range(2):
        nvme = f"nvme://{tmp_path / 'nvme'}?capacity=64MiB&write=through"
        flags = ["--scale", "0.25", "--workloads", "unique", "--gate", "off", "--tier", nvme]
        rates += [row["hit_rate"] for row in bench(tiny, tmp_path / "out.json", *flags)[1]["rows"]]
    assert rates == [0, 0, 0, 0]


def test_the_gates_counter_is_what_was_recomputed_on_purpose() -> None:
    metrics = Metrics()
    assert declined_tokens(metrics) == 0
    for tier, verdict, tokens in (("dram", "declined", 32), ("nvme", "declined", 16), ("dram", "admitted", 64)):
        metrics.gate_tokens.labels(tier, verdict).inc(tokens)
    assert declined_tokens(metrics) == 48


def test_a_pass_counts_its_own_and_leaves_hbm_empty() -> None:
    metrics, then = Metrics(), list[str]()
    declined = metrics.gate_tokens.labels("dram", "declined")
    declined.inc(100)  # by what ran before

    def conversations(*_: object) -> Played:
        declined.inc(16)
        return Played()

    engine = SimpleNamespace(
        settle=lambda _: then.append("saves end"), reset_prefix_cache=lambda: then.append("HBM is emptied")
    )
    tested = engine_bench.Tested("on", SimpleNamespace(engine=engine, metrics=metrics), lambda: None)  # type: ignore[arg-type]
    tested.drive = SimpleNamespace(conversations=conversations)  # type: ignore[assignment]
    tested.play([], 1)
    assert (tested.passes[0].declined, then) == (16, ["saves end", "HBM is emptied"])


def test_a_row_is_counted_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two passes of 2 and 8 seconds, on four cores: a hundred gaps between tokens, of which two are long."""
    monkeypatch.setattr(engine_bench, "os", SimpleNamespace(cpu_count=lambda: 4))

    def one(first: float, external: int) -> RequestStats:
        return RequestStats(100, 0.0, first_token=first, completion_tokens=20, hbm_tokens=30, external_tokens=external)

    passes = [
        Played([one(0.1, 20), one(0.2, 0)], [0.0, 0.5], gaps=[0.01] * 50, seconds=2.0, store_cpu_s=1.0, declined=16),
        Played(
            [one(0.3, 0), one(0.4, 40)],
            [0.0, 0.0],
            gaps=[0.01] * 48 + [0.5, 0.6],
            seconds=8.0,
            store_cpu_s=0.2,
            declined=32,
        ),
    ]
    assembly: Any = SimpleNamespace(engine=None, tiers=lambda: {"hbm": "ok", "dram": "ok"})
    assert engine_bench.Tested("on", assembly, lambda: None, passes).row("chat") == {
        "workload": "chat", "cache": "on", "tiers": "hbm,dram",
        "ttft_p50_s": 0.3, "ttft_p99_s": 0.7, "itl_p50_s": 0.01, "itl_p99_s": 0.5, "tokens_per_s": (20.0 + 5.0) / 2,
        "hit_rate": (4 * 30 + 60) / 400, "loaded_tokens": 60, "recomputed_on_purpose": 48, "prompt_tokens": 400,
        "store_cpu_share": 1.2 / (10.0 * 4),
    }  # fmt: skip


@pytest.mark.parametrize("name", WORKLOADS)
def test_workloads_come_from_their_seed_and_have_one_shape(name: str) -> None:
    def shape(conversations: list[Conversation]) -> list[object]:
        return [
            (len(each.opening), [(len(part.tokens), part.answer, part.n) for part in each.rounds])
            for each in conversations
        ]

    made = WORKLOADS[name](Draw(300, 7, 0.5))
    assert made == WORKLOADS[name](Draw(300, 7, 0.5))
    assert made != WORKLOADS[name](Draw(300, 8, 0.5))
    assert shape(made) == shape(WORKLOADS[name](Draw(2, 7, 0.5)))
    texts = [each.opening for each in made if each.opening]
    assert (len(set(texts)) == 1) == (name == "chat")


def test_arrivals_have_the_same_lengths_and_times_for_every_vocabulary() -> None:
    few, many = (arrivals(Draw(vocab, 5), 40, 10.0) for vocab in (2, 50_000))
    assert [(a.time_s, len(a.prompt), a.answer) for a in few] == [(a.time_s, len(a.prompt), a.answer) for a in many]
    assert sum(each.long for each in many) == 5
    assert [each.time_s for each in many] == sorted(each.time_s for each in many)


# -- ratios


@pytest.mark.parametrize(
    ("ratio", "verdict"),
    [
        (Ratio(1.0, 0.97, 1.03, 7), "holds"),
        (Ratio(0.96, 0.93, 0.99, 7), "holds"),
        (Ratio(0.94, 0.92, 0.97, 7), "slower"),
        (Ratio(1.0, 0.90, 1.10, 7), "inconclusive"),
        (Ratio(0.97, 0.90, 1.30, 9), "inconclusive"),
        (Ratio(5.0, 4.00, 6.00, 7), "inconclusive"),
        (Ratio(1.0, 0.95, 1.0502, 7), "inconclusive"),
        (Ratio(1.2, 1.15, 1.2498, 7), "holds"),
        (Ratio(5.0, 4.80, 5.29, 7), "holds"),
        (Ratio(5.0, 4.80, 5.31, 7), "inconclusive"),
        (Ratio(0.95, 0.92, 0.99, 7), "holds"),
        (Ratio(1.0, math.nan, math.nan, 7), "slower"),
        (Ratio(0.5, 0.40, 0.60, 7), "slower"),
        (Ratio(5.0, 4.00, 6.00, 6), "too few pairs to say"),
    ],
)
def test_verdicts(ratio: Ratio, verdict: str) -> None:
    assert ratio.verdict == verdict


def test_percentiles_are_values_that_were_seen(seed: int) -> None:
    assert percentile([], 99) is None
    assert [percentile([3.0, 1.0, 2.0], rank) for rank in (1, 33, 34, 50, 67, 99, 100)] == [1, 1, 2, 2, 3, 3, 3]
    assert percentile(range(1, 101), 7) == 7 and percentile(range(1, 101), 99) == 99
    seen = [random.Random(seed + each).random() for each in range(37)]
    assert percentile(seen, 90) == float(np.percentile(seen, 90, method="inverted_cdf"))


def test_the_interval_encloses_the_ratio_that_is_there(seed: int) -> None:
    rng = random.Random(seed)
    below = [rng.gauss(1.0, 0.05) for _ in range(25)]
    above = [1.2 * rng.gauss(1.0, 0.05) for _ in range(25)]
    found = ratio_of_medians(above, below, 1)
    assert found.low < 1.2 < found.high and found.high - found.low < 0.2
    assert found == ratio_of_medians(above, below, 1)
    assert ratio_of_medians([2.0] * 7, [1.0] * 7, 1) == Ratio(2.0, 2.0, 2.0, 7)
    drifting = [1.0 + number for number in range(7)]  # a machine that slows down, for both of a pair alike
    assert ratio_of_medians([2 * each for each in drifting], drifting, 1) == Ratio(2.0, 2.0, 2.0, 7)


@pytest.mark.parametrize(
    ("speed", "pairs", "failed", "holds"),
    [
        ([1.0] * 7, 7, 0, True),
        ([0.9] * 7, 7, 0, False),  # slower
        ([5.0, 6.0, 4.0, 5.5, 4.5, 6.5, 3.5], 7, 0, False),  # inconclusive, and so not passed
        ([0.5], 1, 0, True),  # too few pairs to say
        ([1.0] * 7, 7, 1, False),
    ],
)
def test_only_what_holds_holds(speed: list[float], pairs: int, failed: int, holds: bool) -> None:
    def passes(speeds: list[float]) -> list[Played]:
        stats = [RequestStats(1, 0.0, completion_tokens=4, first_token=1.0 / each) for each in speeds]
        return [Played([one], [0.0], seconds=1.0 / each) for one, each in zip(stats, speeds, strict=True)]

    tested: Any = [SimpleNamespace(passes=passes(each), row=lambda _: {}) for each in (speed, [1.0] * pairs)]
    tested[0].passes[0].failed = failed
    found = Found()
    _tell(found, "unique", 1, tested)
    assert (not found.faults) == holds, found.notes
    assert set(found.faults) <= set(found.notes) and len(found.faults) == (0 if holds else 1 if failed else 2)


def test_whoever_goes_first_goes_second_in_the_next_pair() -> None:
    played: list[tuple[str, object]] = []

    def tested(cache: str) -> Any:
        assembly = SimpleNamespace(engine=SimpleNamespace(vocab=100))
        return SimpleNamespace(cache=cache, assembly=assembly, play=lambda talks, _: played.append((cache, talks)))

    _turns("unique", Passes(["unique"], 3, 1, 0.1), 1, (tested("on"), tested("off")), lambda _: None)
    assert [cache for cache, _ in played] == ["on", "off", "off", "on", "on", "off"]
    texts = [talks for _, talks in played]
    assert texts[0] == texts[1] and texts[0] != texts[2], "both of a pair have one workload, and each pair its own"


def test_a_pass_without_a_token_is_told_and_not_compared() -> None:
    nothing = Played([RequestStats(1, 0.0)], [0.0], failed=1, seconds=1.0)
    tested: Any = [SimpleNamespace(passes=[nothing], row=lambda _: {}) for _ in range(2)]
    found = Found()
    _tell(found, "unique", 1, tested)
    assert (found.rows, found.faults) == ([], ["unique: invalid, 2 answers failed"])


def test_names_that_come_twice_are_run_once() -> None:
    assert named("unique, chat,unique") == ["unique", "chat"] and ideas("swap,slab,swap") == ["swap", "slab"]


# -- one idea off at a time


def test_a_request_waits_from_when_it_is_due(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not from when a step that was running let it in: else whoever computes a prompt whole looks faster than it is."""
    now = 0.0

    def step_takes() -> None:
        nonlocal now
        now += 0.05

    monkeypatch.setattr("kvtier.bench.drive.time", SimpleNamespace(perf_counter=lambda: now, sleep=lambda _: None))
    assembly = assemble(settings(tiny, hbm_blocks=64))
    listed = [Arrival(0.0, (1, 2, 3), 2), Arrival(0.01, (4, 5, 6), 1)]
    try:
        played = Drive(assembly.engine).arrivals(listed, step_takes)
    finally:
        assembly.close()
    assert played.late == pytest.approx([0.0, 0.04])
    ttfts = [stats.ttft for stats in played.stats]
    assert played.ttfts == [(ttft or 0.0) + late for ttft, late in zip(ttfts, played.late, strict=True)]


def test_each_idea_turns_off_what_it_names(tiny: Path) -> None:
    base, size = _base(settings(tiny, max_num_seqs=4), [Arrival(0.0, (1,) * 40, 24), Arrival(0.0, (1,) * 16, 16)])
    assert (size, base.engine.hbm_blocks) == (Size(64, 4), 6)  # half of what four of the mean could hold
    assert base.engine.longest_prefix_first and base.engine.preemption is Preemption.CHEAPER
    without = {name: IDEAS[name](base, size) for name in IDEAS}
    engines = {name: variant.settings.engine for name, variant in without.items()}
    assert [name for name in IDEAS if not engines[name].longest_prefix_first] == ["fcfs"]
    assert [name for name in IDEAS if not engines[name].prefix_cache] == ["slab"] and without["slab"].reserved == 4
    assert [name for name in IDEAS if engines[name].preemption is Preemption.RECOMPUTE] == ["swap"]
    assert [name for name in IDEAS if engines[name].max_num_batched_tokens == 4 * 64] == ["no-chunking"]
    assert [name for name in IDEAS if without[name].admission is not None] == ["slab", "static-batching"]


def test_what_giving_way_costs_is_by_the_gates_fits() -> None:
    fits = {
        "kvtier_gate_prefill_token_seconds": 0.5, "kvtier_gate_bandwidth_bytes": 1000.0, "kvtier_gate_t0_seconds": 0.25,
    }  # fmt: skip
    identity = SimpleNamespace(layout=SimpleNamespace(bytes_per_token=100))
    assembly: Any = SimpleNamespace(
        metrics=SimpleNamespace(value=lambda name, **_: fits[name]), engine=SimpleNamespace(identity=identity)
    )
    stats = [
        RequestStats(10, 0.0, first_token=1.0, completion_tokens=4, preemptions=1, recomputed_tokens=6, hbm_tokens=5),
        RequestStats(10, 0.0, first_token=5.0, completion_tokens=4, preemptions=2, demoted_tokens=20),
    ]
    played = Played(stats, [0.0, 1.0], gaps=[0.1] * 98 + [0.2, 0.3], seconds=2.0)
    listed = [Arrival(0.0, (1,), 1), Arrival(0.0, (1,), 1, long=True)]
    memory: Any = SimpleNamespace(share=0.75)
    assert _figures(assembly, listed, played, memory) == {
        "kv_share": 0.75, "tokens_per_s": 4.0, "hit_rate": 0.25, "itl_p99_s": 0.2, "ttft_p50_s": 3.5,
        "long_ttft_p50_s": 6.0, "failed": 0, "preemptions": 3, "recomputed_tokens": 6, "demoted_tokens": 20,
        "recompute_s": 3.0, "demotion_s": 2 * 0.25 + 2.0,
    }  # fmt: skip


def test_every_idea_can_be_turned_off(tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--ablate", "all", "--requests", "16", "--rate", "5000", "--scale", "0.25", "--gate", "off"]
    code, report = bench(tiny, tmp_path / "out.json", *flags)
    rows = {row["without"]: row for row in report["rows"]}
    assert code == 0 and list(rows) == [None, *IDEAS]
    assert all(rows[name]["kv_share"] > 0.75 for name in rows if name != "slab")
    assert rows["slab"]["kv_share"] < 0.5 and rows["slab"]["hit_rate"] == 0
    assert rows["swap"]["demoted_tokens"] == 0
    assert all(row["long_ttft_p50_s"] > 0 and row["tokens_per_s"] > 0 for row in rows.values())
    assert "no-chunking" in capsys.readouterr().out


def run_all(tiny: Path, admission: Admission | None, **more: object) -> list[tuple[int, set[str]]]:
    """(sequences waiting, ids of those that run) after each step, with twelve requests at once."""
    engine_settings = settings(tiny, hbm_blocks=64, max_num_seqs=4, **more)
    assembly, seen = assemble(engine_settings, admission=admission), []
    rng = random.Random(1)
    listed = [Arrival(0.0, tuple(rng.randrange(300) for _ in range(40)), 3 + number % 5) for number in range(12)]

    def look() -> None:
        sequences = assembly.engine.sequences()
        running = {each.id for each in sequences if each.slots}
        seen.append((len(sequences) - len(running), running))

    try:
        played = Drive(assembly.engine).arrivals(listed, look)
        assert played.tokens == sum(each.answer for each in listed)
        assert assembly.engine.check_integrity() == []
    finally:
        assembly.close()
    return seen


def test_a_slab_lets_so_many_in_as_reserved_lengths_fit(tiny: Path) -> None:
    assert max(len(running) for _, running in run_all(tiny, Slab(2))) == 2
    assert max(len(running) for _, running in run_all(tiny, None)) == 4


def test_nobody_joins_a_static_batch(tiny: Path) -> None:
    seen = run_all(tiny, StaticBatch(4))
    for (_, before), (_, now) in itertools.pairwise(seen):
        joined = now - before
        assert not joined or not before & now or (len(before) < 4 and before <= now)
    batches = {frozenset(running) for _, running in seen if len(running) == 4}
    assert len(batches) == 3 and not frozenset.intersection(*batches)
    continuous = run_all(tiny, None)
    assert any(
        now - before and before & now and before - now for (_, before), (_, now) in itertools.pairwise(continuous)
    )


@pytest.mark.parametrize(("reserved", "share"), [(None, 41 / 64), (5, 41 / 160)])
def test_memory_counts_shared_blocks_once(reserved: int | None, share: float) -> None:
    """Two sequences of 40 and 33 tokens in blocks of 16, the first two of which they share; a third one waits."""
    sequences = [
        SimpleNamespace(slots=[0, 1, 2], computed=40),
        SimpleNamespace(slots=[0, 1, 3], computed=33),
        SimpleNamespace(slots=[], computed=0),
    ]
    engine: Any = SimpleNamespace(sequences=lambda: sequences)
    memory = Memory(engine, 16, reserved)
    assert memory.share is None
    for _ in range(EVERY):
        memory.look()
    assert memory.share == pytest.approx(share)


# -- endings


def test_a_run_that_is_stopped_keeps_its_rows(tiny: Path) -> None:
    steps = 0

    def proceed() -> None:
        nonlocal steps
        steps += 1
        if steps > 100:  # in the second workload
            raise Stopped(2)

    found = compare(settings(tiny), Passes(["unique", "chat", "documents"], 1, 2, 0.25), proceed)
    assert found.stopped is not None and found.stopped.exit_code == 130
    assert [(row["workload"], row["cache"]) for row in found.rows] == [("unique", "on"), ("unique", "off")]


@pytest.mark.parametrize(("until", "pairs"), [(0, 0), (1, 0), (2, 1), (5, 2)])
def test_whole_pairs_of_a_workload_that_was_stopped_are_kept(
    until: int, pairs: int, tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    played = 0

    def play(self: engine_bench.Tested, talks: object, users: int) -> None:
        nonlocal played
        if played == until:
            raise Stopped(2)
        played += 1
        self.passes.append(Played([RequestStats(8, 0.0, first_token=1.0, completion_tokens=4)], [0.0], seconds=1.0))

    monkeypatch.setattr(engine_bench.Tested, "play", play)
    monkeypatch.setattr(engine_bench.Tested, "warm_up", lambda *_: None)
    found = compare(settings(tiny), Passes(["unique"], 50, 2, 0.25), lambda: None)
    assert found.stopped is not None
    assert [row["prompt_tokens"] for row in found.rows] == ([8 * pairs] * 2 if pairs else [])
    assert all(f"{pairs} pairs" in note for note in found.notes)


@pytest.mark.parametrize("flags", [[], ["--ablate", "all"]])
def test_what_was_ended_early_says_so_wherever_it_is_read(
    flags: list[str], tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("compare", "ablate"):
        monkeypatch.setattr(engine_bench, name, lambda *_: Found(rows=[{"workload": "chat"}], stopped=Stopped(2)))
    code, report = bench(tiny, tmp_path / "out.json", *flags)
    assert (code, report["complete"], report["rows"]) == (130, False, [{"workload": "chat"}])
    assert "ended early (SIGINT)" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--workloads", "chats"], "--workloads: unknown workload 'chats'; did you mean 'chat'?"),
        (["--ablate", "slabs"], "--ablate: unknown idea 'slabs'; did you mean 'slab'?"),
        (["--pairs", "0"], "above 0"),
        (["--json", "/no/such/folder/out.json"], "--json /no/such/folder/out.json"),
    ],
)
def test_wrong_settings_are_one_line(flags: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "engine", *flags]) == 2
    err = capsys.readouterr().err
    assert says in err and err.count("\n") == 1


def test_the_stores_threads_are_told_from_others_and_may_end() -> None:
    def spin() -> None:
        until = time.thread_time() + 0.05
        while time.thread_time() < until:
            pass
        spun.release()
        done.wait(60.0)

    spun, done = threading.Semaphore(0), threading.Event()
    before = {**store_cpu(), -1: 100.0}  # the last one of a thread that is no more
    threads = [threading.Thread(target=spin, name=name) for name in ("kvtier-test-0", "other")]
    for thread in threads:
        thread.start()
    for _ in threads:
        assert spun.acquire(timeout=60.0)
    spent = store_cpu_since(before)
    done.set()
    for thread in threads:
        thread.join()
    assert 0.05 <= spent < 0.09
