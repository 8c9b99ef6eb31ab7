"""A replay counts what it says it counts: against naive caches, an independent count and every possible eviction."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from kvtier.abc.policy import EntryMeta
from kvtier.bench.plot import Series
from kvtier.cli.main import main
from kvtier.errors import ConfigError
from kvtier.key import Address
from kvtier.policy import names
from kvtier.sim.belady import belady_hits, infinite_hits
from kvtier.sim.replay import BELADY, Counting, ReplayedTier, Workload, blocks_of, near_best, regret, replay, workload
from kvtier.sim.traces import Reference, open_trace
from tests.sim.builders import drawn_chains, mooncake, recorded, session, write_lines
from tests.support import script


def named(chain: Sequence[int]) -> tuple[Address, ...]:
    return tuple(Address(one.to_bytes(16, "big")) for one in chain)


def work_of(chains: Sequence[Sequence[int]], counting: Counting) -> Workload:
    requests = [Reference(float(number), named(chain), 16 * len(chain) - 3, 1) for number, chain in enumerate(chains)]
    return workload(requests, 16, counting)


def naive_lru(chains: Sequence[Sequence[int]], capacity: int) -> list[int]:
    """A list, coldest first."""
    order: list[int] = []
    hits = []
    for chain in chains:
        hits.append(len(list(itertools.takewhile(order.__contains__, chain))))
        order = [one for one in order if one not in chain] + list(reversed(chain))
        order = order[max(0, len(order) - capacity) :]
    return hits


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("capacity", [1, 5, 40, 1000])
def test_lru_hits_what_a_naive_cache_hits(seed: int, capacity: int) -> None:
    chains = drawn_chains(seed, 150)
    work = work_of(chains, Counting())
    expected = naive_lru(chains, capacity)
    tier = ReplayedTier("lru", capacity, max(map(len, chains)), work.metas)
    assert [tier.request(chain, now) for chain, now in zip(work.chains, work.times, strict=True)] == expected
    assert tier.pool.check() == [] and tier.pool.ready <= capacity
    counted = sum(map(len, chains[75:]))
    assert replay(work, "lru", capacity) == sum(expected[75:]) / counted


@pytest.mark.parametrize("seed", range(3))
def test_without_parents_fifo_is_a_queue_that_lets_heads_go_first(seed: int) -> None:
    chains, capacity = drawn_chains(seed, 150), 20
    queue: list[int] = []
    expected = []
    for chain in chains:
        expected.append(len(list(itertools.takewhile(queue.__contains__, chain))))
        queue += [one for one in chain if one not in queue]
        queue = queue[-capacity:]
    work = work_of(chains, Counting(warmup=0.0, flat=True))
    assert replay(work, "fifo", capacity) == sum(expected) / sum(map(len, chains))


@pytest.mark.parametrize("seed", range(3))
def test_without_parents_lru_uses_heads_first(seed: int) -> None:
    chains, capacity = drawn_chains(seed, 150), 20
    order: list[int] = []
    expected = 0
    for chain in chains:
        expected += len(list(itertools.takewhile(order.__contains__, chain)))
        new = [one for one in chain if one not in order]
        used = [one for one in chain if one in order]
        order = ([one for one in order if one not in used] + new + used)[-capacity:]
    work = work_of(chains, Counting(warmup=0.0, flat=True))
    assert replay(work, "lru", capacity) == expected / sum(map(len, chains))


def best_of_all(chains: Sequence[Sequence[int]], capacity: int) -> int:
    """Hits of the best of all ways to evict, by trying them."""
    states: dict[frozenset[int], int] = {frozenset(): 0}
    for chain in chains:
        after: dict[frozenset[int], int] = {}
        for resident, hits in states.items():
            now = hits + len(list(itertools.takewhile(resident.__contains__, chain)))
            full = resident | set(chain)
            for kept in map(frozenset, itertools.combinations(sorted(full), min(capacity, len(full)))):
                after[kept] = max(after.get(kept, 0), now)
        states = after
    return max(states.values())


@pytest.mark.parametrize("seed", range(12))
def test_the_optimum_is_the_best_of_all_ways_to_evict(seed: int) -> None:
    chains = drawn_chains(seed, 9, roots=1, longest=4)
    for capacity in (1, 2, 3, 5):
        found = sum(belady_hits([named(chain) for chain in chains], capacity))
        assert found == best_of_all(chains, capacity), f"capacity {capacity} of {chains}"


@pytest.mark.parametrize("policy", names())
def test_no_policy_passes_the_optimum_and_all_reach_the_infinite_cache(policy: str) -> None:
    work = work_of(drawn_chains(7, 300), Counting())
    for capacity in (3, 20, 60):
        assert replay(work, policy, capacity) <= replay(work, BELADY, capacity)
    assert replay(work, policy, work.unique) == work.infinite == replay(work, BELADY, work.unique)


def test_an_infinite_tier_hits_what_an_independent_count_says(tmp_path: Path) -> None:
    path = mooncake(tmp_path / "t.jsonl.gz", drawn_chains(3, 401))
    trace = open_trace(path)
    work = workload(trace, 512, Counting())
    hits, references = script("benchmarks/replay.py").count_independently(path)
    tier = ReplayedTier("lru", work.unique, max(map(len, work.chains)), work.metas)
    served = [tier.request(chain, now) for chain, now in zip(work.chains, work.times, strict=True)]
    assert served == infinite_hits(work.chains)
    assert sum(served[200:]) == hits
    assert work.infinite == hits / references


def test_tokens_count_a_prompts_last_block_as_what_is_in_it() -> None:
    work = work_of([(1, 2, 3), (1, 2, 3), (1, 2, 4)], Counting(warmup=0.0, unit="tokens"))
    assert [sum(work.tokens), work.infinite] == [3 * 45, (45 + 32) / 135]


def test_the_warm_up_is_a_share_of_the_requests() -> None:
    chains = [(1, 2), (1, 2), (1, 2, 3), (9, 8)]
    assert work_of(chains, Counting(warmup=0.0)).infinite == 4 / 9
    assert work_of(chains, Counting(warmup=0.5)).infinite == 2 / 5
    with pytest.raises(ValueError, match="share of the requests"):
        Counting(warmup=1.0)


def test_a_block_knows_its_parent_and_depth() -> None:
    work = work_of([(1, 2), (1, 3)], Counting())
    one, two, three = named((1, 2, 3))
    assert work.metas == {one: EntryMeta(None, 0), two: EntryMeta(one, 1), three: EntryMeta(one, 1)}


@pytest.mark.parametrize(
    ("capacity", "why"),
    [
        ("0", "not even one block"),
        ("0%", "^capacity 0% is not even one block"),
        ("0.1%", "of 500 distinct blocks is not even one block"),
        ("-3", "not even one block"),
        ("nan%", "neither a share"),
        ("inf%", "neither a share"),
        ("2.5", "neither a share"),
        ("%", "neither a share"),
    ],
)
def test_a_size_that_holds_nothing_is_refused(capacity: str, why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        blocks_of(capacity, 500)


def test_sizes_are_shares_of_the_distinct_blocks_or_blocks() -> None:
    assert blocks_of("2%", 182_790) == 3655
    assert blocks_of("0.5%", 1000) == 5
    assert blocks_of("77", 1000) == 77


def replayed(*arguments: str, seed: str) -> str:
    """Standard output of the command in a process whose hashes are salted by ``seed``."""
    done = subprocess.run(
        [sys.executable, "-m", "kvtier", "replay", *arguments],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PYTHONHASHSEED": seed},
        timeout=60,
    )
    return done.stdout


def test_the_same_call_gives_the_same_bytes(tmp_path: Path) -> None:
    """Whatever the process's hashes and how many processes share the work."""
    sessions = [
        session(f"s{number}", [(3.0 * turn, [(1, 8 * (turn + 1))]) for turn in range(6)]) for number in range(9)
    ]
    path = write_lines(tmp_path / "t.jsonl.gz", sessions)
    policies = ",".join(names())
    reports = []
    for seed, jobs in (("1", "1"), ("2", "2")):
        out = tmp_path / f"{seed}.json"
        arguments = [str(path), "--policy", policies, "--capacity", "10%,20", "--sessions", "7", "--over", "10"]
        reports.append((replayed(*arguments, "--jobs", jobs, "--json", str(out), seed=seed), out.read_bytes()))
    assert reports[0] == reports[1]
    assert "coding-agent, seed 0" in reports[0][0]


def test_the_report_has_a_row_for_every_policy_and_size(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = recorded(tmp_path / "t", drawn_chains(1, 60))
    out = tmp_path / "out.json"
    assert (
        main(["replay", str(path), "--policy", "lru,fifo", "--capacity", "10%,5", "--jobs", "1", "--json", str(out)])
        == 0
    )
    report = json.loads(out.read_text())
    assert list(report) == ["references", "unique", "infinite", "rows", "complete"]
    assert [(row["policy"], row["capacity"]) for row in report["rows"]] == [
        (policy, capacity) for policy in ("lru", "fifo", "belady") for capacity in ("10%", "5")
    ]
    assert report["rows"][1]["blocks"] == 5
    assert report["references"] == sum(map(len, drawn_chains(1, 60)))
    shown = capsys.readouterr().out
    assert "kvtier: 60 requests" in shown and "infinite" in shown


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["--policy", "lur"], "--policy: unknown policy 'lur'; did you mean 'lru'?"),
        (["--policy", "lru,,fifo"], "something is missing"),
        (["--capacity", "0"], "capacity 0 is not even one block"),
        (["--capacity", "2%,much"], "capacity 'much' is neither"),
        (["--warmup", "1"], "--warmup: the warm-up is a share"),
        (["--jobs", "0"], "--jobs 0"),
        (["--sessions", "0"], "at least one session"),
        (["--json", "/nowhere/at/all.json"], "--json /nowhere/at/all.json"),
        (["--plot", "picture.gif"], "--plot picture.gif"),
    ],
)
def test_what_cannot_be_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], why: str
) -> None:
    path = mooncake(tmp_path / "t", [(1, 2), (1, 2)])
    assert main(["replay", str(path), *arguments]) == 2
    said = capsys.readouterr().err
    assert why in said and said.count("\n") == 1


def test_a_broken_trace_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = mooncake(tmp_path / "t", [(1, 2), (1, 2)])
    path.write_text(path.read_text() + '{"timestamp": 9000}\n')
    assert main(["replay", str(path)]) == 2
    assert capsys.readouterr().err == f"kvtier: error: {path}: line 3: 'hash_ids' is missing\n"


def test_a_cache_larger_than_the_trace_takes_no_more_memory_than_the_trace() -> None:
    work = work_of(drawn_chains(7, 50), Counting())
    assert replay(work, "wtinylfu", 10**15) == replay(work, BELADY, 10**15) == work.infinite


def test_a_trace_without_a_block_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = mooncake(tmp_path / "t", [(), ()])
    assert main(["replay", str(path)]) == 2
    assert capsys.readouterr().err == f"kvtier: error: {path}: no request in it has a whole block\n"


def test_what_was_played_before_an_interrupt_is_kept_and_marked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object) -> Iterator[float]:
        yield 0.25
        yield 0.5
        raise KeyboardInterrupt

    monkeypatch.setattr("kvtier.cli.replay.replay_cells", interrupted)
    path, out = mooncake(tmp_path / "t", drawn_chains(1, 30)), tmp_path / "out.json"
    picture = tmp_path / "p.svg"
    flags = ["--policy", "lru,arc", "--capacity", "2,4,8", "--json", str(out), "--plot", str(picture)]
    assert main(["replay", str(path), *flags]) == 130
    said = capsys.readouterr()
    report = json.loads(out.read_text())
    assert report["complete"] is False
    assert [(row["policy"], row["capacity"], row["hit_rate"]) for row in report["rows"]] == [
        ("lru", "2", 0.25),
        ("lru", "4", 0.5),
    ]
    assert "25.0 %  50.0 %" in said.out and "infinite" in said.out
    assert said.err == "stopped: 2 of 9 cells, and no picture\n"
    assert not picture.exists()


def test_regret_is_what_the_best_static_policy_has_more() -> None:
    assert regret({"lru": 30.0, "arc": 31.5, "adaptive": 31.0, "belady": 40.0}) == 0.5
    assert near_best([0.0] * 9 + [1.5]) == (0.9, True)
    assert near_best([0.0] * 8 + [1.5, 1.1]) == (0.8, False)
    assert near_best([0.0] * 9 + [2.1]) == (0.9, False)


def test_limits_of_all_lines_have_colours_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[Series] = []
    monkeypatch.setattr("kvtier.cli.replay.line_plot", lambda series, *_, **__: drawn.extend(series))
    path = mooncake(tmp_path / "t", drawn_chains(1, 30))
    assert main(["replay", str(path), "--capacity", "4,8", "--jobs", "1", "--plot", str(tmp_path / "p.svg")]) == 0
    assert [one.label for one in drawn] == ["lru", "belady", "infinite"]
    assert len({one.colour for one in drawn}) == 3
