"""A long random run over a store, its model beside it: ``python -m kvtier.testing.long_run``.

Verbs, transfers, faults, restarts and kills come in any order, also in the middle of each other: ahead of each call to a
medium another verb may come in between. Ends with what happened and the number of wrong bytes, or at the first thing that
does not hold, with the seed and the number of the operation.
"""

from __future__ import annotations

import argparse
import logging
import os
import random
import sys
import tempfile
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from pathlib import Path

from kvtier.abc.store import Selection
from kvtier.key import Span
from kvtier.testing.blocks import IDENTITY
from kvtier.testing.oracle import ASKED, MOST_BLOCKS, PROMPTS, Oracle
from kvtier.testing.rig import Mishap, Rig, drawn_rig

SHARE_BETWEEN = 0.2
"""Share of the calls to a medium ahead of which something else comes in between."""
REST_EVERY = 2000
"""Operations after which everything has to come to rest, and the next rig is drawn."""
MOST_MATCHES = 4
"""Live matches; more would hold DRAM without end."""
SHOWN = 40
"""Operations that are shown where something does not hold."""


class LongRun:
    """Random verbs from one seed."""

    def __init__(self, directory: Path, seed: int, faults: float, make: Callable[[Path, random.Random], Rig]) -> None:
        self._rng = random.Random(seed)
        self._faults = faults
        self._make = make
        self._directory = directory
        self._rigs = 0
        self.done = 0
        self.faults = 0
        self.seen: Counter[str] = Counter()
        self._happened: Counter[str] = Counter()
        self.last: deque[str] = deque(maxlen=SHOWN)
        self._inside = 0
        self.oracle = self._fresh()
        rng = self._rng
        self._verbs: list[tuple[float, str, Callable[[Oracle], None]]] = [
            (8, "save", lambda oracle: oracle.save(self._prompt())),
            (2, "fill", lambda oracle: oracle.fill(rng.randrange(1, 20))),
            (8, "match", self._match),
            (3, "ask again", lambda oracle: oracle.ask_again(self._any())),
            (10, "load", lambda oracle: oracle.load(self._any(), rng.choice([1, MOST_BLOCKS, MOST_BLOCKS]))),
            (1, "give up", lambda oracle: oracle.give_up(self._any(), by_name=rng.random() < 0.5)),
            (2, "take back", lambda oracle: oracle.take_back(self._any())),
            (1, "drop", lambda oracle: oracle.drop(self._prompt())),
            (1, "drop asked", lambda oracle: oracle.drop_asked(self._any(), self._any())),
            (1, "save asked", lambda oracle: oracle.save_asked(self._any())),
            (0.1, "clear", self._clear),
            (1, "prefetch", lambda oracle: oracle.prefetch(self._prompt())),
            (25, "turn", lambda oracle: oracle.turn(rng.randrange, rng.choice([1, 1, 5, 20]))),
            (3, "wait", lambda oracle: oracle.wait(rng.choice([0.1, 1.0, 3.0]))),
        ]
        self._weights = [weight for weight, _, _ in self._verbs]

    def run(self, operations: int) -> None:
        """Until ``operations`` have been done."""
        while self.done < operations:
            if self.done // REST_EVERY > self._rigs - 1:
                self._end()
                self.oracle = self._fresh()
            self._one()
        self._end()

    def _end(self) -> None:
        self.last.append("come to rest")
        self.oracle.come_to_rest()
        self._happened.update(self.oracle.rig.happened)
        self.oracle.rig.close()

    def _fresh(self) -> Oracle:
        self._rigs += 1
        rig = self._make(self._directory / f"rig-{self._rigs}", self._rng)
        rig.meanwhile = self._between
        return Oracle(rig, seen=self.seen)

    def _one(self) -> None:
        rng, oracle = self._rng, self.oracle
        if self.faults < self._faults * self.done and rng.random() < 0.5:  # verbs in between count as well
            self.faults += 1
            self._fault()
        elif rng.random() < 0.05:
            self._said("calm")
            oracle.calm()
        elif rng.random() < 0.002:
            kill = rng.random() < 0.5
            self._said("kill" if kill else "restart")
            oracle.restart(kill=kill)
        else:
            self._verb()
        oracle.check()

    def _verb(self) -> None:
        (_, name, act), *_ = self._rng.choices(self._verbs, self._weights)
        self._said(name)
        act(self.oracle)

    def _fault(self) -> None:
        rng, oracle = self._rng, self.oracle
        kind = rng.random()
        if kind < 0.2:
            self._said("flip")
            oracle.flip(rng.randrange)
        elif kind < 0.35:
            self._said("stall")
            oracle.stall(rng.randrange(3))
        else:
            weights = {Mishap.POWER: 1, Mishap.UNAVAILABLE: 4, Mishap.FULL: 4, Mishap.BUG: 2, Mishap.SLOW: 3}
            mishap = rng.choices(list(Mishap), [weights.get(each, 8) for each in Mishap])[0]
            self._said(mishap.name)
            oracle.befall(mishap, rng.randrange(2))

    def _between(self) -> None:
        """Somebody else's verb in the middle of a transfer."""
        if self._inside < 2 and not self.oracle.rig.dead and self._rng.random() < SHARE_BETWEEN:
            self._inside += 1
            try:
                self._verb()
            finally:
                self._inside -= 1

    def _said(self, name: str) -> None:
        self.done += 1
        self.last.append(f"{self.done}{' >' * self._inside} {name}")

    def _match(self, oracle: Oracle) -> None:
        if len(oracle.matches) > MOST_MATCHES:
            oracle.give_up(0, by_name=True)
        keys, rng = self._prompt(), self._rng
        start = rng.choice([0, 0, rng.randrange(len(keys) + 1)])
        oracle.match(keys, start, hints=rng.choice(ASKED), turns=rng.choice([None, None, 0, 1, 2]))

    def _clear(self, oracle: Oracle) -> None:
        rng = self._rng
        if rng.random() < 0.3:
            oracle.clear_tier(rng.choice(["dram", *oracle.rig.lasting]))
        else:
            oracle.clear(Selection(model=rng.choice([None, IDENTITY.model]), tenant=rng.choice([None, bytes(16)])))

    def _prompt(self) -> Span:
        return self.oracle.prompt(self._rng.randrange(PROMPTS), self._rng.randrange(1, MOST_BLOCKS + 1))

    def _any(self) -> int:
        return self._rng.randrange(1 << 16)

    def report(self, seconds: float) -> str:
        """What happened, a line per kind."""
        seen = self.seen
        happened = ", ".join(f"{name} {count}" for name, count in sorted(self._happened.items()))
        lines = [
            f"operations    {self.done}",
            f"faults        {self.faults} ordered, of which befell: {happened}",
            f"restarts      {seen['restarts']}, kills {seen['kills']}, clears {seen['clears']}, rigs {self._rigs}",
            f"blocks saved  {seen['saved']}, and {seen['not saved']} not",
            f"blocks loaded {seen['loaded']}, and {seen['not loaded']} not",
            f"wrong bytes   {seen['wrong']}",
            f"seconds       {seconds:.1f}",
        ]
        return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m kvtier.testing.long_run", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--operations", type=int, default=100_000, help="operations to do (default: 100000)")
    parser.add_argument(
        "--faults", type=float, default=0.05, help="share of operations that are faults (default: 0.05)"
    )
    parser.add_argument("--seed", type=int, help="seed of everything that is drawn (default: another one each time)")
    given = parser.parse_args(arguments)
    if (
        arguments is None and sys.flags.hash_randomization
    ):  # sets of bytes go in another order, and the seed tells nothing
        os.execve(sys.executable, [*sys.orig_argv], {**os.environ, "PYTHONHASHSEED": "0"})
    seed = random.SystemRandom().randrange(1 << 32) if given.seed is None else given.seed
    sys.stdout.write(f"seed          {seed}\n")
    sys.stdout.flush()
    logging.disable(logging.CRITICAL)  # every ordered fault is worth a line to an operator, and none here
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as directory:
        run = LongRun(Path(directory), seed, given.faults, drawn_rig)
        try:
            run.run(given.operations)
        except BaseException:
            sys.stdout.write(f"does not hold: operation {run.done} of --seed {seed}; the last ones were\n")
            sys.stdout.write("\n".join(run.last) + "\n")
            raise
        finally:
            sys.stdout.write(run.report(time.perf_counter() - began) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
