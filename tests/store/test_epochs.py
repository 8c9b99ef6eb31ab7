"""Clear epochs: their names, what implies what, and bounds."""

from __future__ import annotations

import pytest

from kvtier.abc.store import Selection
from kvtier.storage_backends.memory import MemoryMedium
from kvtier.store.epochs import MOST_SELECTIONS, Epochs, covers, name_of, selection_of

from .builders import make_bench


def test_names_of_selections_come_back_and_others_are_passed_by() -> None:
    for what in (Selection(), Selection("m \N{SNOWMAN}", bytes(16), 'a "b"'), Selection(tenant=b"t" * 16)):
        assert selection_of(name_of(what)) == what
    for name in (
        "",
        "[]",
        "{}",
        '["m", null]',
        '["m", "zz", null]',
        "[1, null, null]",
        "[" * 5000,
        '["m", "00", null]',
    ):
        assert selection_of(name) is None
    epochs = Epochs()
    epochs.merge({"no name": 7, name_of(Selection()): 1 << 32, name_of(Selection("m")): 3, name_of(Selection("n")): -1})
    assert epochs.of("m", bytes(16), bytes(16)) == 3
    assert epochs.of("n", bytes(16), bytes(16)) == 0
    assert epochs.clear(Selection("n")) == 4


def test_wider_and_later_clears_imply_narrower_ones() -> None:
    epochs = Epochs()
    tenant, other = b"t" * 16, b"o" * 16
    assert epochs.clear(Selection("m", tenant)) == 1
    assert epochs.clear(Selection("m")) == 2
    assert epochs.clear(Selection("m", other, "a")) == 3
    assert epochs.of("m", tenant, bytes(16)) == 2
    assert epochs.of("n", tenant, bytes(16)) == epochs.of(None, tenant, bytes(16)) == 0
    wanted, implied = epochs.lacking({name_of(Selection("m", tenant)): 1, "foreign": 5})
    assert wanted == {name_of(Selection("m")): 2, name_of(Selection("m", other, "a")): 3}
    assert implied == {name_of(Selection("m", tenant)): 1}


def test_selections_are_bounded_and_what_was_cleared_stays_cleared(monkeypatch: pytest.MonkeyPatch) -> None:
    most = 200
    monkeypatch.setattr("kvtier.store.epochs.MOST_SELECTIONS", most)
    epochs = Epochs()
    tenants = [number.to_bytes(16, "little") for number in range(1, most + 100)]
    given = [epochs.clear(Selection("m", tenant)) for tenant in tenants]
    wanted, _ = epochs.lacking({})
    assert len(wanted) <= most
    assert all(epochs.of("m", tenant, bytes(16)) >= epoch for tenant, epoch in zip(tenants, given, strict=True))
    for number in range(most + 5):
        epochs.clear(Selection(f"model {number}"))
    assert len(epochs.lacking({})[0]) <= most
    assert covers(Selection(), Selection("m", bytes(16)))


def test_a_flood_of_strange_selections_is_taken_over_soon_and_within_bounds() -> None:
    epochs = Epochs()
    models = MOST_SELECTIONS + 500
    epochs.merge({name_of(Selection(f"m{i % models}", None, f"a{i}")): i + 1 for i in range(3 * models)})
    wanted, implied = epochs.lacking({})
    assert len(wanted) <= MOST_SELECTIONS
    assert not implied
    assert epochs.of("m7", bytes(16), bytes(16)) >= 8, "more is cleared than was asked for, and never less"


@pytest.mark.parametrize(
    "name",
    ["[" * 4000, '[null, null, "\\ud800"]', '["\\udfff", null, null]', "[" + "9" * 4000],
    ids=["nested", "half", "other", "long"],
)
def test_a_store_opens_on_a_medium_with_names_that_are_no_text(name: str) -> None:
    shared = MemoryMedium()
    shared.raise_epochs({name: 5}, {})
    bench = make_bench(shared=shared)
    assert bench.store.clear(Selection()).tiers[bench.tiers[0].name].trouble is None
    bench.store.close()
