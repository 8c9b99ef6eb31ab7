"""A simulated ladder counts and times what a hand can count and time, and is the same in every run."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from kvtier.cli.main import main
from kvtier.errors import ConfigError
from kvtier.key import Address
from kvtier.sim.clock import Schedule, TimedWorkers
from kvtier.sim.media import DeviceStandIn, Pipe
from kvtier.sim.replay import Counting, Workload, workload
from kvtier.sim.simulate import STEP_SECONDS, Books, Machine, Simulation, _Request, ladder
from kvtier.sim.traces import Reference
from kvtier.transfer.workers import Urgency
from kvtier.url import TierUrl
from tests.sim.builders import drawn_chains, mooncake, recorded

BLOCK = 1 << 20
"""Bytes of a block here."""
TOKENS = 16
RATE = 1000.0
"""Tokens computed per second."""
MACHINE = Machine(BLOCK, lambda tokens, past: tokens / RATE)


def work_of(chains: Sequence[Sequence[int]], every_s: float = 100.0, warmup: float = 0.0) -> Workload:
    requests = [
        Reference(every_s * number, tuple(Address(one.to_bytes(16, "big")) for one in chain), TOKENS * len(chain), 1)
        for number, chain in enumerate(chains)
    ]
    return workload(requests, TOKENS, Counting(warmup=warmup))


def simulated(work: Workload, *tiers: str, gated: bool = False) -> Books:
    rungs = ladder([TierUrl.parse(tier) for tier in tiers], BLOCK)
    return Simulation(work, rungs, MACHINE, gated=gated).run()


def test_what_is_due_first_happens_first_and_sleepers_take_turns() -> None:
    schedule, said = Schedule(), list[tuple[float, str]]()

    def say(what: str) -> None:
        said.append((schedule.now, what))

    def sleeper(name: str, until: float) -> None:
        say(f"{name} begins")
        schedule.sleep_until(until)
        say(f"{name} wakes")

    schedule.at(2.0, lambda: say("late"))
    schedule.at(1.0, lambda: say("early"))
    schedule.at(1.0, lambda: say("early, asked later"))
    schedule.spawn(lambda: sleeper("a", 3.0))
    schedule.spawn(lambda: sleeper("b", 1.5))
    schedule.run()
    schedule.close()
    assert said == [
        (0.0, "a begins"),
        (0.0, "b begins"),
        (1.0, "early"),
        (1.0, "early, asked later"),
        (1.5, "b wakes"),
        (2.0, "late"),
        (3.0, "a wakes"),
    ]


def test_a_load_never_waits_behind_slow_saves_in_virtual_time() -> None:
    schedule, ended = Schedule(), list[tuple[float, str]]()
    workers = TimedWorkers("t", 2, schedule)

    def job(name: str, seconds: float) -> None:
        schedule.sleep_until(schedule.now + seconds)
        ended.append((schedule.now, name))

    for number in range(3):
        workers.submit(Urgency.SAVE, lambda number=number: job(f"save {number}", 10.0))  # type: ignore[misc]  # bound early
    workers.submit(Urgency.LOAD, lambda: job("load", 1.0))
    schedule.at(0.5, lambda: ended.append((workers.longest_load, "the load's age")))
    schedule.run()
    schedule.close()
    assert ended == [(0.5, "the load's age"), (1.0, "load"), (10.0, "save 0"), (20.0, "save 1"), (30.0, "save 2")]
    assert workers.idle


def test_a_dram_without_end_hits_what_an_infinite_cache_hits() -> None:
    work = work_of(drawn_chains(2, 200), warmup=0.5)
    books = simulated(work, "dram://?capacity=4GiB")
    assert books.hit_rate == work.infinite
    assert books.references == sum(map(len, work.chains[100:]))
    assert books.requests == len(books.ttft) == 100


def test_blocks_that_dram_had_to_give_up_come_from_below() -> None:
    """What is hit in all is what an infinite cache hits; the device was written once per distinct block."""
    work = work_of(drawn_chains(5, 200))
    below = f"nvme:///?capacity={work.unique * BLOCK}&write=through&bandwidth=10GB&t0=0"
    books = simulated(work, f"dram://?capacity={20 * BLOCK}", below)
    assert books.hit_rate == work.infinite
    assert books.hits["nvme"] > 0 and books.hits["dram"] > 0
    assert books.moved["nvme"] == (books.hits["nvme"] * BLOCK, work.unique * BLOCK)
    assert books.moved["dram"][0] == (books.hits["nvme"] + books.hits["dram"]) * BLOCK


def test_what_moves_while_it_warms_up_is_not_counted() -> None:
    work = work_of([(1, 2), (3, 4), (5, 6), (1, 2)], warmup=0.5)
    books = simulated(work, "dram://?capacity=1GiB", "nvme:///?capacity=1GiB&write=through&bandwidth=1GB")
    assert books.moved == {"dram": (2 * BLOCK, 2 * BLOCK), "nvme": (0, 2 * BLOCK)}


def test_a_server_of_names_gives_what_was_used_twice() -> None:
    work = work_of([(1, 2), (1, 2), (3, 4), (5, 6), (7, 8), (1, 2)])
    books = simulated(work, f"dram://?capacity={6 * BLOCK}", "redis://host?bandwidth=1GB&t0=1ms&write=selective")
    assert books.moved["redis"] == (2 * BLOCK, 2 * BLOCK)
    assert books.hits == {"hbm": 0, "dram": 2, "redis": 2}


def test_times_are_those_of_the_pipe_and_the_prefill() -> None:
    work = work_of([(1, 2, 3, 4), (1, 2, 3, 4)])
    books = simulated(work, f"dram://?capacity=1GiB&bandwidth={BLOCK}&t0=0.25")
    assert books.ttft_without == [4 * TOKENS / RATE] * 2
    assert books.ttft[0] == 4 * TOKENS / RATE
    assert books.ttft[1] == pytest.approx(0.25 + 4.0 + 1 / RATE), "latency, four blocks at one a second, the last token"
    assert books.gpu_seconds_saved == pytest.approx(63 / RATE)


def test_the_engines_own_cache_is_asked_first() -> None:
    work = work_of([(1, 2, 3), (1, 2, 3), (1, 2, 4)])
    books = simulated(work, f"hbm://?capacity={4 * BLOCK}", "dram://?capacity=1GiB")
    assert books.hits == {"hbm": 5}
    assert books.moved["dram"] == (0, 4 * BLOCK)


def test_the_gate_computes_what_a_slow_tier_would_take_longer_for() -> None:
    chains = [(number % 30, 100 + number % 30) for number in range(300)]
    work = work_of(chains, warmup=0.5)
    slow = f"nvme:///?capacity=1GiB&write=through&bandwidth={10 * BLOCK}&t0=0"
    tiers = f"dram://?capacity={8 * BLOCK}", slow
    assert simulated(work, *tiers).hits["nvme"] == 300, "0.2 s to load what takes 0.032 s to compute"
    gated = simulated(work, *tiers, gated=True)
    assert gated.hits["nvme"] < 30
    assert gated.missed["loading would be slower than computing"] > 270
    assert sum(gated.ttft) < sum(simulated(work, *tiers).ttft) / 3


def test_a_server_at_its_capacity_forgets_what_was_used_longest_ago() -> None:
    work = work_of([(number,) for number in (*range(20), *range(20))])
    few = simulated(
        work, f"dram://?capacity={2 * BLOCK}", f"redis://h?capacity={5 * BLOCK}&bandwidth=1GB&write=through"
    )
    all_of_it = simulated(work, f"dram://?capacity={2 * BLOCK}", "redis://h?bandwidth=1GB&write=through")
    assert few.hits["redis"] == 0
    assert all_of_it.hits["redis"] == 20


TIERS = ["--tier", "dram://?capacity=64MiB", "--tier", "nvme:///?capacity=1GiB&write=through"]
SPEED = ["--prefill", "1000", "--block-bytes", "1MiB"]


def test_the_same_call_gives_the_same_bytes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = mooncake(tmp_path / "t.jsonl.gz", drawn_chains(4, 120), every_s=0.05)
    reports = []
    for name in ("a", "b"):
        assert main(["simulate", "--trace", str(path), *TIERS, *SPEED, "--json", str(tmp_path / name)]) == 0
        reports.append((capsys.readouterr().out, (tmp_path / name).read_bytes()))
    assert reports[0] == reports[1]
    report = json.loads(reports[0][1])
    assert [row["tier"] for row in report["rows"]] == ["dram", "nvme"]
    assert report["hit_rate"] == pytest.approx(sum(row["hit_rate"] for row in report["rows"]), abs=1e-5)
    assert report["hit_rate"] + sum(report["computed_because"].values()) == pytest.approx(1.0, abs=1e-5)
    assert report["rows"][1]["bytes_written_per_day"] > 0
    assert "written a day" in reports[0][0] and "GPU-seconds of prefill" in reports[0][0]


def test_a_model_and_a_gpu_say_what_blocks_weigh_and_prefill_takes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = mooncake(tmp_path / "t", [(1, 2), (1, 2)])
    assert main(["simulate", "--trace", str(path), "--tier", "dram://?capacity=1GiB"]) == 0
    assert "blocks of 512 tokens and 64MiB" in capsys.readouterr().out


@pytest.mark.parametrize("after", [10, 150])
def test_a_simulation_that_is_stopped_tells_what_it_has_and_says_so(
    after: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path, out = tmp_path / "t.jsonl", tmp_path / "out.json"
    mooncake(path, drawn_chains(7, 200))
    begin = _Request.begin

    def begun(request: _Request) -> None:
        if request._name == f"r{after}":
            os.kill(os.getpid(), signal.SIGINT)
        begin(request)

    monkeypatch.setattr(_Request, "begin", begun)
    assert main(["simulate", "--trace", str(path), *TIERS, *SPEED, "--json", str(out)]) == 130
    said = capsys.readouterr()
    counting = max(0, after + 1 - 100)
    assert f"stopped by SIGINT: {counting} requests" in said.err
    assert ("hit rate" in said.out) == out.exists() == (counting > 0)
    if counting:
        told = json.loads(out.read_text())
        assert (told["requests"], told["complete"]) == (counting, False)
        assert {row["tier"] for row in told["rows"]} >= {"dram", "nvme"}


def test_a_device_takes_blocks_while_it_gives_others() -> None:
    schedule, ended = Schedule(), dict[str, float]()
    device = DeviceStandIn(4, BLOCK, Pipe(schedule, BLOCK, BLOCK, 0.0), Pipe(schedule, BLOCK, BLOCK, 0.0))

    def copy(name: str, act: Callable[[], object]) -> None:
        act()
        ended[name] = schedule.now

    schedule.spawn(lambda: copy("save", lambda: device.read([0, 1, 2, 3], [])))
    schedule.spawn(lambda: copy("load", lambda: device.write([0, 1], [])))
    schedule.spawn(lambda: copy("later load", lambda: device.write([2], [])))
    schedule.run()
    schedule.close()
    assert ended == {"save": 4.0, "load": 2.0, "later load": 3.0}


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["--tier", "nvme:///?capacity=1GiB", *SPEED], "one dram:// is needed"),
        (SPEED, "got none"),
        (["--tier", "dram://?capacity=0", *SPEED], "less than one block"),
        (["--tier", "dram://", *SPEED], "capacity is missing"),
        (["--tier", "tape://?capacity=1GiB", *SPEED], "tape:// cannot be simulated"),
        (["--tier", "dram://?capactiy=1GiB", *SPEED], "unknown parameter 'capactiy'; did you mean 'capacity'?"),
        (["--tier", "dram://?capacity=1GiB&bandwidth=0", *SPEED], "bandwidth: nothing would ever come"),
        (["--tier", "dram://?capacity=1GiB&policy=lur", *SPEED], "unknown policy 'lur'; did you mean 'lru'?"),
        ([*TIERS, "--tier", "fs:///x?capacity=1GiB", *SPEED], "bandwidth is missing"),
        (["--tier", "dram://?capacity=1GiB&admission=second", *SPEED], "dram:// takes every block"),
        (["--tier", "hbm://?capacity=1GiB&write_budget=1GB", *TIERS, *SPEED], "hbm:// takes every block"),
        (["--tier", "dram://?capacity=1GiB&write=back", *SPEED], "write: dram:// is offered every block"),
        ([*TIERS, "--tier", "nvme:///?capacity=1GiB&codec=zstd", *SPEED], "codec: not simulated; leave it out"),
        ([*TIERS, "--tier", "nvme:///?capacity=1GiB&encrypt=key", *SPEED], "encrypt: not simulated; leave it out"),
        (["--tier", "dram://?capacity=1GiB&verify=always", *SPEED], "verify: not simulated; leave it out"),
        ([*TIERS, "--tier", "redis://h?policy=lru", *SPEED], "redis:// itself chooses what goes"),
        ([*TIERS, "--tier", "redis://h?ttl=0", *SPEED], "ttl"),
        (
            [*TIERS, "--tier", "nvme:///?capacity=1GiB&ttl=1h", *SPEED],
            "ttl: nvme:// keeps blocks until they are evicted",
        ),
        ([*TIERS, "--tier", "nvme:///?capacity=1GiB&write_budget=1MB", *SPEED], "less than a block an hour"),
        ([*TIERS, "--tier", "nvme:///?capacity=1GiB&admission=adaptive", *SPEED], "adaptive spends a write_budget"),
        (["--tier", "dram://?capacity=1GiB&t0=-1s", *SPEED], "t0"),
        ([*TIERS, "--prefill", "1000"], "--prefill and --block-bytes"),
        ([*TIERS, "--prefill", "0", "--block-bytes", "1"], "never computed"),
        ([*TIERS, "--model", "llama-9"], "model 'llama-9' is not in the table"),
        ([*TIERS, *SPEED, "--warmup", "2"], "share of the requests"),
        ([*TIERS, *SPEED, "--deadline", "soon"], "not a duration"),
    ],
)
def test_what_cannot_be_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], why: str
) -> None:
    path = mooncake(tmp_path / "t", [(1, 2), (1, 2)])
    assert main(["simulate", "--trace", str(path), *arguments]) == 2
    said = capsys.readouterr().err
    assert why in said and said.count("\n") == 1


def test_a_broken_trace_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = mooncake(tmp_path / "t", [(1, 2), (1, 2)])
    path.write_text(path.read_text() + "{}\n")
    assert main(["simulate", "--trace", str(path), *TIERS, *SPEED]) == 2
    assert capsys.readouterr().err == f"kvtier: error: {path}: line 3: 'hash_ids' is missing\n"


def test_the_first_tier_may_be_the_engines_own_and_only_that() -> None:
    with pytest.raises(ConfigError, match="one dram:// is needed"):
        ladder([TierUrl.parse("dram://?capacity=1GiB"), TierUrl.parse("hbm://?capacity=1GiB")], BLOCK)


def test_a_tiny_ladder_is_what_a_hand_computes(tmp_path: Path) -> None:
    """Six blocks of DRAM: the third and fourth prompt push out 3, 4 and 2; the last finds 1 in DRAM, 2 and 3 below."""
    chains = [(1, 2, 3), (1, 2, 4), (5, 6, 7), (8, 9), (1, 2, 3)]
    path, out = recorded(tmp_path / "t", chains, TOKENS, every_s=100.0), tmp_path / "report.json"
    tiers = (f"dram://?capacity={6 * BLOCK}", f"nvme:///?capacity=1GiB&write=through&bandwidth={2 * BLOCK}&t0=0.5")
    flags = [flag for tier in tiers for flag in ("--tier", tier)]
    more = ["--prefill", "1000", "--block-bytes", str(BLOCK), "--gate", "off", "--warmup", "0", "--json", str(out)]
    assert main(["simulate", "--trace", str(path), *flags, *more]) == 0
    report = json.loads(out.read_text())
    dram, nvme = report["rows"]
    assert (report["requests"], report["references"]) == (5, 14)
    assert dram["hit_rate"] == pytest.approx(3 / 14, abs=1e-6)
    assert nvme["hit_rate"] == pytest.approx(2 / 14, abs=1e-6)
    assert report["computed_because"] == {"never stored": pytest.approx(9 / 14, abs=1e-6)}
    assert (dram["bytes_read"], dram["bytes_written"]) == (5 * BLOCK, 9 * BLOCK)
    assert (nvme["bytes_read"], nvme["bytes_written"]) == (2 * BLOCK, 9 * BLOCK)
    assert report["gpu_seconds"] == pytest.approx(0.048 + 0.016 + 0.080 + 0.001)
    assert report["gpu_seconds_saved"] == pytest.approx(0.032 + 0.047)
    copied = 2e-5 + 5 * BLOCK / 25e9
    below = 0.5 + 1.0
    waited = 5 * report["ttft_s"]["mean"] - 0.145 - copied - below
    assert 0.0 <= waited <= STEP_SECONDS + 1e-5, "what came from below is noticed at the next step"
    assert report["seconds"] == pytest.approx(400 + below + 0.001 + waited + 1e-5 + 3 * BLOCK / 25e9, abs=1e-5)
    assert nvme["bytes_written_per_day"] == pytest.approx(9 * BLOCK / report["seconds"] * 86400, abs=1)
    assert report["ttft_without_s"]["mean"] == pytest.approx(0.0448)


def test_a_ladder_chooses_what_it_writes_by_the_rules_that_serve() -> None:
    once = [(number, 100 + number) for number in range(40)]
    work = work_of([*once, *once[:10]])
    dram, below = f"dram://?capacity={4 * BLOCK}", "nvme:///?capacity=1GiB&write=through&bandwidth=1GB"
    written = {
        rule: simulated(work, dram, f"{below}{rule}").moved["nvme"][1] // BLOCK
        for rule in ("", "&admission=second", f"&write_budget={24 * 4 * BLOCK}")
    }
    assert written[""] == 80
    assert written["&admission=second"] == 20, "what was offered before"
    hours = work.times[-1] / 3600
    assert 4 <= written[f"&write_budget={24 * 4 * BLOCK}"] <= 4 + 4 * hours, "an hour's worth, and as much an hour"


def test_names_expire_where_nothing_renews_them() -> None:
    work = work_of([(1, 2), (3, 4), (5, 6), (1, 2)], every_s=100.0)
    below = "redis://h?bandwidth=1GB&write=through"
    dram = f"dram://?capacity={4 * BLOCK}"
    assert simulated(work, dram, f"{below}&ttl=301s").hits["redis"] == 2
    assert simulated(work, dram, f"{below}&ttl=299s").hits["redis"] == 0
    renewed = work_of([(1, 2), (3, 4), (1, 2), (5, 6), (7, 8), (1, 2)], every_s=100.0)
    assert simulated(renewed, dram, f"{below}&ttl=310s").hits["redis"] == 2, "a hit in DRAM renews what is below"
