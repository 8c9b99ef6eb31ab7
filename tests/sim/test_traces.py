"""Traces of all formats are read alike, a line at a time, and a broken line is named."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest

from kvtier.errors import ConfigError
from kvtier.sim.traces import MOST_BLOCKS, Sample, open_trace
from tests.sim.builders import mooncake, recorded, session, write_lines


@pytest.fixture(params=["trace.jsonl", "trace.jsonl.gz"])
def place(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    return tmp_path / str(request.param)


def test_mooncakes_ids_are_blocks_of_512_tokens(place: Path) -> None:
    trace = open_trace(mooncake(place, [(0, 1, 2), (0, 1, 3)], every_s=1.5))
    first, second = trace
    assert trace.block_tokens == 512
    assert (first.time_s, second.time_s) == (0.0, 1.5)
    assert (first.input_tokens, first.output_tokens) == (1536, 10)
    assert first.chain[:2] == second.chain[:2] and first.chain[2] != second.chain[2]
    assert [len(entry) for entry in first.chain] == [16] * 3


def test_a_recorded_trace_has_the_keys_it_was_given(place: Path) -> None:
    trace = open_trace(recorded(place, [(7, 8)], block_tokens=32))
    (one,) = trace
    assert trace.block_tokens == 32
    assert one.chain == ((7).to_bytes(16, "big"), (8).to_bytes(16, "big"))
    assert (one.time_s, one.input_tokens, one.output_tokens) == (0.0, 64, 4)


def test_sessions_share_no_blocks_and_begin_at_random_within_the_time(place: Path) -> None:
    sessions = [session(f"s{number}", [(0.0, [(1, 16)]), (5.0, [(1, 8), (20, 27)])]) for number in range(4)]
    trace = open_trace(write_lines(place, sessions), Sample(sessions=4, over_s=100.0))
    requests = list(trace)
    assert trace.block_tokens == 512
    assert len(requests) == 8
    assert all(before.time_s <= after.time_s for before, after in pairwise(requests))
    assert all(one.time_s <= 105.0 for one in requests)
    assert len({one.chain[0] for one in requests}) == 4, "one head for each session"
    for head in {one.chain[0] for one in requests}:
        first, second = (one for one in requests if one.chain[0] == head)
        assert second.time_s - first.time_s == pytest.approx(5.0)
        assert len(first.chain) == len(second.chain) == 2 and first.chain[1] != second.chain[1]


def test_a_block_of_eight_says_what_stands_before_it(tmp_path: Path) -> None:
    """The second eight are the same ids twice, behind another first eight: another block."""
    path = write_lines(tmp_path / "t", [session("s", [(0.0, [(1, 16)]), (1.0, [(2, 9), (9, 16)]), (2.0, [(1, 15)])])])
    first, second, third = open_trace(path)
    assert not set(first.chain) & set(second.chain)
    assert third.chain == first.chain[:1], "seven ids are left over, and in no block"


def test_the_sample_of_sessions_follows_from_its_seed(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "t", [session(f"s{number}", [(0.0, [(1, 8)])]) for number in range(50)])

    def drawn(seed: int) -> list[tuple[float, tuple[bytes, ...]]]:
        return [(one.time_s, one.chain) for one in open_trace(path, Sample(sessions=5, seed=seed))]

    assert drawn(1) == drawn(1)
    assert len(drawn(1)) == 5
    assert {chain for _, chain in drawn(1)} != {chain for _, chain in drawn(2)}


def moon(**changed: object) -> dict[str, object]:
    return {"timestamp": 2000, "input_length": 512, "output_length": 1, "hash_ids": [1], **changed}


def own(**changed: object) -> dict[str, object]:
    return {"t": 1.0, "in": 16, "out": 1, "keys": ["00" * 16], **changed}


OWN = {"format": "kvtier-trace", "version": 1, "block_tokens": 16}
AGENT = session("a", [(0.0, [(1, 8)])])


@pytest.mark.parametrize(
    ("lines", "why"),
    [
        ([moon(), {"timestamp": 1}], "line 2: 'hash_ids' is missing"),
        ([moon(), [1]], "line 2: no JSON object"),
        ([moon(), moon(hash_ids=[-1])], "line 2: hash_ids has -1"),
        ([moon(), moon(hash_ids=[True])], "line 2: hash_ids has True"),
        ([moon(), moon(hash_ids="abc")], "line 2: hash_ids is 'abc'"),
        ([moon(), moon(hash_ids=[1, 2, 1])], "line 2: hash_ids names a block twice"),
        ([OWN, own(keys=["00" * 16, "00" * 16])], "line 2: keys names a block twice"),
        ([moon(), moon(input_length=1.5)], "line 2: input_length is 1.5"),
        ([moon(), moon(timestamp=float("nan"))], "line 2: timestamp is nan"),
        ([moon(), moon(timestamp=10**400)], "line 2: timestamp is 1000"),
        ([moon(), moon(timestamp=1)], "line 2: its time 0.001 s lies before"),
        ([OWN, own(), own(keys=["0g" * 16])], "line 3: non-hexadecimal"),
        ([OWN, own(keys=["00"])], "line 2: keys has '00', and not 16 bytes"),
        ([OWN, own(keys=[None])], "line 2: keys has None"),
        ([{**OWN, "version": 2}], "line 1: version 2 of kvtier-trace is not known"),
        ([{**OWN, "block_tokens": 0}], "line 1: block_tokens is 0"),
        ([AGENT, {**AGENT, "block_size": 32}], "line 2: block_size is 32"),
        ([AGENT, {**AGENT, "id": 3}], "line 2: id is 3"),
        ([AGENT, {**AGENT, "requests": [3]}], "line 2: requests has 3"),
        ([AGENT, {**AGENT, "requests": [{"t": 0, "in": 512, "out": 1, "r": [[2, 1]]}]}], r"line 2: r has \[2, 1\]"),
        ([AGENT, {**AGENT, "requests": [{"t": 0, "in": 64, "out": 1, "r": [[1, 8]]}]}], "line 2: r has 8 blocks of 64"),
        (
            [AGENT, {**AGENT, "requests": [{"t": 0, "in": 10**12, "out": 1, "r": [[1, 10**9]]}]}],
            r"line 2: r has \[1, 1000000000\]",
        ),
        (
            [AGENT, {**AGENT, "requests": [{"t": 0, "in": 10**12, "out": 1, "r": [[1, MOST_BLOCKS]] * 2}]}],
            "line 2: r has 8,388,608 blocks",
        ),
        ([{"a": 1}], "line 1: unknown format"),
        ([], "no request is in it"),
        ([OWN], "no request is in it"),
        ([{**AGENT, "requests": []}], "no request is in it"),
    ],
)
def test_a_line_that_is_not_what_its_format_says_is_named(place: Path, lines: list[object], why: str) -> None:
    write_lines(place, lines)
    with pytest.raises(ConfigError, match=why) as raised:
        list(open_trace(place))
    assert str(raised.value).startswith(f"{place}: ")
    assert "\n" not in str(raised.value)


def _no_json(whole: bytes) -> bytes:
    return whole + b"{not json\n"


def _no_text(whole: bytes) -> bytes:
    return whole + b"\xff\xfe\x00{\n"


def _too_deep(whole: bytes) -> bytes:
    return whole + b"[" * 200_000 + b"\n"


@pytest.mark.parametrize("spoil", [_no_json, _no_text, _too_deep])
def test_a_line_that_is_no_json_is_named(tmp_path: Path, spoil: Callable[[bytes], bytes]) -> None:
    path = mooncake(tmp_path / "t", [(1,), (2,)])
    path.write_bytes(spoil(path.read_bytes()))
    with pytest.raises(ConfigError, match=r"line 3: no JSON"):
        list(open_trace(path))


def test_a_line_without_an_end_is_not_read_into_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvtier.sim.traces.MOST_LINE_BYTES", 1000)
    path = mooncake(tmp_path / "t.gz", [(1,)])
    path.write_bytes(gzip.compress(gzip.decompress(path.read_bytes()) + b" " * 5000))
    with pytest.raises(ConfigError, match=r"line 2: longer than 1,000 bytes"):
        list(open_trace(path))


def test_a_packed_file_that_was_cut_says_where(tmp_path: Path) -> None:
    path = mooncake(tmp_path / "t.gz", [tuple(range(number, number + 50)) for number in range(400)])
    path.write_bytes(path.read_bytes()[:-200])
    with pytest.raises(ConfigError, match=r"t\.gz: line \d+: "):
        list(open_trace(path))
    path.write_bytes(path.read_bytes()[:30])
    with pytest.raises(ConfigError, match=r"t\.gz: line 1: "):
        open_trace(path)


def test_a_file_that_is_not_there_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere: No such file"):
        open_trace(tmp_path / "nowhere")


def test_empty_lines_are_passed_by_and_counted(tmp_path: Path) -> None:
    path = tmp_path / "t"
    path.write_text(f"\n{json.dumps(moon())}\n\n{{}}\n")
    with pytest.raises(ConfigError, match=r"line 4: 'hash_ids'"):
        list(open_trace(path))
