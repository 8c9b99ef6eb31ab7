"""What requests were told, as runs."""

from __future__ import annotations

import random
from itertools import groupby

from kvtier.store.history import repeats


def test_repeats_are_what_a_look_at_each_finds() -> None:
    rng = random.Random(1)
    for _ in range(300):
        things = [
            thing for thing in rng.choices("abc", k=rng.randrange(12)) for _ in range(rng.choice((1, 1, 2, 7, 300)))
        ]
        assert list(repeats(things)) == [(thing, len(list(equal))) for thing, equal in groupby(things)]
