"""Our tiers beside LMCache's and Mooncake's: the same blocks, the same sockets, taking turns in one run.

    python benchmarks/peers/run.py [--json FILE] [--environments DIR] [--directory DIR] [--rounds N] [--seed N]

64 blocks of 2 MiB. dram: an engine's memory <-> DRAM. disk: DRAM <-> files, to fdatasync on both sides. redis: DRAM <-> one
Valkey over TCP on the loopback, LMCache by both of its clients. tcp: ours on Valkey beside Mooncake Store, a server of its own.
Look-ups: a prompt of 100,000 tokens in chunks of 16, hashed and found whole. Ours has its sums on; ``bare`` shows what they
cost, and ``limit`` is what the machine does with the same bytes. CPU seconds are those of the client's process. Each peer
runs in a virtual environment that is made at the first run (some minutes, see --environments); one that cannot be made, or
fails, is a row that says why. Every process is ended by its id.
"""

from __future__ import annotations

import argparse
import json
import os
import select
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import environments
from environments import Environment, NotBuilt

from kvtier.bench.report import Stopped, check_json, machine, stoppable, table, write_json
from kvtier.errors import KvtierError
from kvtier.testing.valkey import start_valkey

HERE = Path(__file__).parent
OURS = "kvtier"
BLOCK_BYTES, BLOCKS, TOKENS = 2 << 20, 64, 100_000
CHUNKS = TOKENS // 16
READY_SECONDS, ANSWER_SECONDS = 90.0, 60.0


class Failed(Exception):
    """A side cannot go on; the text says why."""


class Side:
    """A process of one side."""

    def __init__(self, name: str, environment: Environment, script: str, task: dict[str, Any], log: Path) -> None:
        self.name = name
        self._log = log
        with log.open("ab") as err:
            self._process = subprocess.Popen(
                [environment.python, HERE / script, json.dumps(task)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=err,
                env={**os.environ, **environment.variables},
                start_new_session=True,
            )
        self._rest = b""

    def ready(self) -> None:
        self._answer(READY_SECONDS)

    def ask(self, do: str) -> dict[str, Any]:
        """What it took. Raises ``Failed`` where it failed, ended, or did not answer in time."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(do.encode() + b"\n")
            self._process.stdin.flush()
        except OSError:
            raise Failed(self._last_words()) from None
        return self._answer(ANSWER_SECONDS)

    def _answer(self, seconds: float) -> dict[str, Any]:
        assert self._process.stdout is not None
        end = time.monotonic() + seconds
        while b"\n" not in self._rest:
            left = end - time.monotonic()
            if left <= 0 or not select.select([self._process.stdout], [], [], left)[0]:
                raise Failed(f"no answer for {seconds:.0f} s")
            came = os.read(self._process.stdout.fileno(), 1 << 16)
            if not came:
                raise Failed(self._last_words())
            self._rest += came
        line, _, self._rest = self._rest.partition(b"\n")
        answer: dict[str, Any] = json.loads(line)
        if "trouble" in answer:
            raise Failed(answer["trouble"])
        return answer

    def end(self) -> None:
        """In order; killed where that takes more than a few seconds."""
        with suppress(OSError, subprocess.TimeoutExpired):
            self._process.communicate(b"end\n", timeout=5)
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait()

    def _last_words(self) -> str:
        lines = self._log.read_text(errors="replace").strip().splitlines()
        return f"it has ended: {lines[-1][:200] if lines else self._process.wait(5)}"


@dataclass(slots=True)
class Took:
    """What one side took for one thing, round by round."""

    seconds: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)


@dataclass(slots=True)
class Run:
    """What is known so far."""

    took: dict[tuple[str, str, str], Took] = field(default_factory=dict)
    """By medium, side and what was done."""
    troubles: dict[tuple[str, str], str] = field(default_factory=dict)
    """By medium and side: why there is nothing, or no more."""

    def seconds(self, medium: str, side: str, do: str) -> float | None:
        took = self.took.get((medium, side, do))
        return statistics.median(took.seconds) if took is not None and took.seconds else None

    def cpu(self, medium: str, side: str, do: str) -> float | None:
        took = self.took.get((medium, side, do))
        return statistics.median(took.cpu) if took is not None and took.cpu else None


def take_turns(
    run: Run,
    medium: str,
    sides: Sequence[Side],
    does: Callable[[str], Sequence[str]],
    rounds: int,
    proceed: Callable[[], None],
) -> None:
    """Every side does its things once a round, another one first each time; one round more goes before."""
    alive = list(sides)
    for turn in range(rounds + 1):
        for step in range(len(sides)):
            side = sides[(turn + step) % len(sides)]
            if side not in alive:
                continue
            proceed()
            try:
                for do in does(side.name):
                    answer = side.ask(do)
                    if do == "lookup" and answer["found"] != TOKENS:
                        raise Failed(f"it found {answer['found']} of {TOKENS} tokens")
                    if turn:
                        took = run.took.setdefault((medium, side.name, do), Took())
                        took.seconds.append(answer["seconds"])
                        took.cpu.append(answer["cpu"])
                if turn in (0, rounds) and "get" in does(side.name) and not side.ask("check")["right"]:
                    raise Failed("it gave back other bytes than were put")
            except Failed as failed:
                run.troubles[medium, side.name] = str(failed)
                alive.remove(side)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        return int(free.getsockname()[1])


Wanted = tuple[str, "Environment | str", str, dict[str, Any]]
"""A side: its name, its environment or why there is none, its script and its task."""


@contextmanager
def started(run: Run, medium: str, wanted: Sequence[Wanted], folder: Path) -> Iterator[list[Side]]:
    """The sides that start, each with (name, its environment or why there is none, script, task)."""
    sides: list[Side] = []
    try:
        for name, environment, script, task in wanted:
            if isinstance(environment, str):
                run.troubles[medium, name] = environment
                continue
            side = Side(name, environment, script, task, folder / f"{medium}-{name.replace(' ', '-')}.log")
            sides.append(side)
            try:
                side.ready()
            except Failed as failed:
                run.troubles[medium, name] = str(failed)
        yield [side for side in sides if (medium, side.name) not in run.troubles]
    finally:
        for side in sides:
            side.end()


@contextmanager
def mooncake_server(environment: Environment | str, folder: Path) -> Iterator[tuple[Environment | str, int]]:
    """Its master and a process that holds the memory; the environment, or why there is no server in it."""
    if isinstance(environment, str):
        yield environment, 0
        return
    port = free_port()
    flags = ["-rpc_address=127.0.0.1", f"-rpc_port={port}", "-metrics_host=127.0.0.1", f"-metrics_port={free_port()}"]
    log = folder / "mooncake-master.log"
    with log.open("ab") as out:
        master = subprocess.Popen(
            [environments.mooncake_master(environment), *flags, "-enable_metric_reporting=false", "-logtostderr"],
            stdout=out,
            stderr=out,
            env={**os.environ, **environment.variables},
            start_new_session=True,
        )
    holder: Side | None = None
    try:
        end = time.monotonic() + 10
        while not _listens(port) and master.poll() is None and time.monotonic() < end:
            time.sleep(0.02)
        task = {"port": port, "holds": 1 << 30}
        holder = Side("holder", environment, "mooncake_peer.py", task, folder / "mooncake-holder.log")
        try:
            holder.ready()
        except Failed as failed:
            yield str(failed), 0
            return
        yield environment, port
    finally:
        if holder is not None:
            holder.end()
        master.terminate()
        try:
            master.wait(5)
        except subprocess.TimeoutExpired:
            master.kill()
            master.wait()


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def built(parent: Path) -> dict[str, Environment | str]:
    """Each peer's environment, or why there is none."""
    found: dict[str, Environment | str] = {}
    for name, make in (("lmcache", environments.lmcache), ("mooncake", environments.mooncake)):
        print(f"environment of {name}: {parent / name}", flush=True)
        try:
            found[name] = make(parent)
        except NotBuilt as why:
            found[name] = f"not built: {why}"
    return found


def measure(
    peers: dict[str, Environment | str],
    folder: Path,
    options: argparse.Namespace,
    run: Run,
    proceed: Callable[[], None],
) -> None:
    ours, lmcache = Environment(Path(sys.executable)), peers["lmcache"]
    ours_do = ("put", "get", "bare_put", "bare_get", "limit_put", "limit_get")

    def blocks(name: str) -> Sequence[str]:
        return (*ours_do[2:], *ours_do[:2]) if name == OURS else ("put", "get")

    def lookups(_: str) -> Sequence[str]:
        return ("lookup",)

    def play(medium: str, does: Callable[[str], Sequence[str]], wanted: Sequence[Wanted]) -> None:
        proceed()
        print(f"{medium}: {', '.join(name for name, *_ in wanted)}", flush=True)
        with started(run, medium, wanted, folder) as sides:
            for side in [each for each in sides if does is lookups and each.name != OURS]:
                try:
                    side.ask("put")
                except Failed as failed:
                    run.troubles[medium, side.name] = str(failed)
            alive = [side for side in sides if (medium, side.name) not in run.troubles]
            take_turns(run, medium, alive, does, options.rounds, proceed)

    port, lm, us = free_port(), "lmcache_peer.py", "kvtier_peer.py"
    task = {"seed": options.seed, "block_bytes": BLOCK_BYTES, "blocks": BLOCKS, "port": port}
    prompt = {"seed": options.seed, "block_bytes": 512, "blocks": CHUNKS, "tokens": TOKENS, "port": port}
    (folder / "kvtier").mkdir()
    for medium in ("dram", "disk"):
        both = [(OURS, ours, us, folder / "kvtier"), ("lmcache", lmcache, lm, folder / "lmcache")]
        play(
            medium,
            blocks,
            [(name, made, by, {**task, "medium": medium, "directory": str(at)}) for name, made, by, at in both],
        )
    dram = {**prompt, "medium": "dram"}
    play("dram look-up", lookups, [(OURS, ours, us, dram), ("lmcache", lmcache, lm, dram)])
    with start_valkey(folder / "valkey", port=port):
        redis = [(OURS, ours, us, {**task, "medium": "redis"})]
        clients = [(f"lmcache {kind}", lmcache, lm, {**task, "medium": kind}) for kind in ("redis", "resp")]
        play("redis", blocks, [*redis, *clients])
        resp = {**prompt, "medium": "resp"}
        play("redis look-up", lookups, [(OURS, ours, us, resp), ("lmcache resp", lmcache, lm, resp)])
        with mooncake_server(peers["mooncake"], folder) as (store, store_port):  # its threads would disturb the others
            play("tcp", blocks, [*redis, ("mooncake", store, "mooncake_peer.py", {**task, "port": store_port})])


ASKED: dict[tuple[str, str], float] = {
    ("dram", "get"): 1.1, ("dram", "put"): 1.0, ("disk", "put"): 1.5, ("disk", "get"): 1.0, ("redis", "get"): 1.5,
    ("dram look-up", "lookup"): 2.0, ("redis look-up", "lookup"): 5.0,
}  # fmt: skip
"""Ours over the best client of LMCache. Loads from DRAM need no more than 0.9 of the limit."""
ENOUGH = {("dram", "get"): 0.9}


def rows_of(run: Run) -> list[dict[str, object]]:
    """A row per medium, side and operation, with what is asked of ours beside it."""
    rows: list[dict[str, object]] = []
    moved = BLOCKS * BLOCK_BYTES / 1e9
    for medium, side, do in run.took:
        seconds, cpu = run.seconds(medium, side, do), run.cpu(medium, side, do)
        assert seconds is not None, "there is one"
        assert cpu is not None, "there is one"
        bulk = do != "lookup"
        row: dict[str, object] = {
            "medium": medium, "side": side, "op": do, "ms": round(1e3 * seconds, 3),
            "gb_s": round(moved / seconds, 3) if bulk else None,
            "cpu_s_per_gb": round(cpu / moved, 4) if bulk else None, "cpu_ms": round(1e3 * cpu, 3),
            "trouble": run.troubles.get((medium, side)),
        }  # fmt: skip
        rows.append(
            {**row, **(judged(run, medium, do) if side == OURS else {"asked": "", "measured": "", "met": None})}
        )
    for (medium, side), why in run.troubles.items():
        if not any((row["medium"], row["side"]) == (medium, side) for row in rows):
            nothing = dict.fromkeys(("ms", "gb_s", "cpu_s_per_gb", "cpu_ms", "met"))
            rows.append(
                {"medium": medium, "side": side, "op": "", **nothing, "trouble": why, "asked": "", "measured": ""}
            )
    return rows


def judged(run: Run, medium: str, do: str) -> dict[str, object]:
    """What is asked of ours for this, what was measured, and whether that is met; None where no peer has a figure."""
    theirs = [side for (of, side, what) in run.took if (of, what) == (medium, do) and side.startswith("lmcache")]
    seconds, cpu = run.seconds(medium, OURS, do), run.cpu(medium, OURS, do)
    if not theirs or seconds is None or cpu is None:
        return {"asked": "", "measured": "", "met": None}
    best = min(run.seconds(medium, side, do) or 0.0 for side in theirs)
    cheapest = min(run.cpu(medium, side, do) or 0.0 for side in theirs)
    factor, share = ASKED.get((medium, do)), ENOUGH.get((medium, do))
    fast, parts, seen = True, [], [f"{best / seconds:.2f}x"]
    if factor is not None:
        parts.append(f">= {factor}x")
        fast = best / seconds >= factor
    if share is not None and (limit := run.seconds(medium, OURS, f"limit_{do}")) is not None:
        parts[-1] += f" or {share} of the limit"
        seen.append(f"{limit / seconds:.2f} of the limit")
        fast = fast or limit / seconds >= share
    parts.append("less CPU")
    seen.append(f"{cpu / cheapest:.2f} of its CPU" if cheapest else "")
    return {"asked": ", ".join(parts), "measured": ", ".join(seen), "met": fast and cpu < cheapest}


def _number(row: Any, name: str, form: str) -> str:  # noqa: ANN401 - a row
    return "-" if row[name] is None else format(row[name], form)


COLUMNS: dict[str, Callable[[Any], str]] = {
    "medium": lambda row: str(row["medium"]),
    "side": lambda row: str(row["side"]),
    "op": lambda row: str(row["op"]),
    "ms": lambda row: _number(row, "ms", ".1f"),
    "GB/s": lambda row: _number(row, "gb_s", ".2f"),
    "CPU s/GB": lambda row: _number(row, "cpu_s_per_gb", ".3f"),
    "asked": lambda row: str(row["asked"]),
    "measured": lambda row: str(row["measured"]),
    "met": lambda row: {True: "yes", False: "NO", None: ""}[row["met"]],
    "why not": lambda row: row["trouble"] or "",
}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the rows here")
    parser.add_argument(
        "--environments",
        type=Path,
        metavar="DIR",
        default=environments.ROOT / "build" / "peers",
        help="where the peers' virtual environments are, or are made (default: build/peers)",
    )
    parser.add_argument(
        "--directory", type=Path, metavar="DIR", help="where the disk's files go (default: a new temporary one)"
    )
    parser.add_argument("--rounds", type=int, default=5, help="rounds in which the sides take turns (default: 5)")
    parser.add_argument("--seed", type=int, default=20)
    options = parser.parse_args()
    if options.rounds < 1:
        parser.error("--rounds: at least 1")
    run, stopped = Run(), None
    try:
        check_json(options.json)
        peers = built(options.environments.absolute())
        print(
            f"seed {options.seed}, {BLOCKS} blocks of 2 MiB, median of {options.rounds} rounds, {os.cpu_count()} cores"
        )
        folder = Path(tempfile.mkdtemp(prefix="kvtier-peers-", dir=options.directory))
        try:
            with stoppable() as proceed:
                measure(peers, folder, options, run, proceed)
        except Stopped as signal:
            stopped = signal
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        rows = rows_of(run)
        print(table(rows, COLUMNS))
        complete = stopped is None and not run.troubles
        write_json(
            options.json,
            {"seed": options.seed, "machine": machine(), "rounds": options.rounds, "complete": complete, "rows": rows},
        )
    except KvtierError as fault:
        print(f"peers: error: {fault}", file=sys.stderr)
        return 2
    if stopped is not None:
        print(f"peers: stopped by {stopped}: the rows above are not all", file=sys.stderr)
        return stopped.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
