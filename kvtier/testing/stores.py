"""What every store must do, as a test class to inherit from.

Nothing but ``Store`` and what follows from it is used, so a client that reaches a store over a socket can be tested as well.
A new store's test file is a subclass with a ``store`` fixture, and hooks where it has something to hook::

    class TestMine(StoreSuite[MyStore]):
        @pytest.fixture
        def store(self): ...                   # open for blocks.IDENTITY; 24 blocks fit at once, 200 do not
        def turn(self, store): ...             # run queued transfers, where no thread of the store's own does
        def drained(self, store): ...          # drain, in the same case
        def lose(self, store, keys): ...       # spoil the stored bytes behind the store; False where nobody can

The engine's memory is ``kvtier.testing.blocks.EngineMemory``; override ``memory`` where a store needs another kind.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import numpy as np
import pytest

from kvtier.abc.medium import Outcome, Status
from kvtier.abc.store import Found, Hints, Reason, Selection, SlotRange
from kvtier.errors import RequestError
from kvtier.key import Scope, Span
from kvtier.testing.blocks import GEOMETRY, IDENTITY, chain, content, filled, span
from kvtier.testing.requirements import require_machine
from kvtier.testing.store_hands import PATIENCE, S, StoreHands

__all__ = ["PATIENCE", "StoreSuite"]

NO_TENANT = bytes(16)
MANY = 200
"""Blocks that do not fit into the store under test at once."""


class Deferred:
    """A fence behind which the engine's memory is filled: who copies too early copies zeros."""

    def __init__(self, act: Callable[[], object]) -> None:
        self._act = act

    def wait(self) -> None:
        self._act()


class StoreSuite(StoreHands[S]):
    """For stores."""

    def test_what_was_never_stored_is_a_miss_and_says_so(self, store: S) -> None:
        match = self.matched(store, chain(1, 3))
        behind = (Found.MISS, Reason.BEHIND_A_MISS)
        assert self.answers(match) == [(Found.MISS, Reason.NEVER_STORED), behind, behind]
        assert (match.hits, match.request_id, match.span, match.start) == (0, "r", chain(1, 3), 0)
        match.release()

    def test_gives_back_what_was_saved(self, store: S) -> None:
        keys = chain(1, 6)
        assert self.saved(store, keys) == [Outcome(Status.DONE, GEOMETRY.block_bytes)] * 6
        match = self.matched(store, keys)
        assert match.hits == 6
        assert all(block.tier for block in match.blocks), "a hit names its tier"
        assert match.load_seconds >= 0
        assert all(outcome.done for outcome in self.loaded(store, match))

    def test_saving_what_is_there_is_a_no_op(self, store: S) -> None:
        keys = chain(1, 4)
        self.saved(store, keys.head(2))
        again = self.saved(store, keys)
        assert again == [Outcome(Status.DONE)] * 2 + [Outcome(Status.DONE, GEOMETRY.block_bytes)] * 2
        assert self.comes(store, keys) == 4

    def test_a_match_ends_at_the_first_block_that_is_not_there(self, store: S) -> None:
        self.saved(store, chain(1, 3))
        match = self.matched(store, chain(1, 5))
        assert match.hits == 3
        assert self.answers(match)[3:] == [(Found.MISS, Reason.NEVER_STORED), (Found.MISS, Reason.BEHIND_A_MISS)]
        assert all(outcome.done for outcome in self.loaded(store, match))

    def test_a_match_begins_where_the_engine_has_no_more(self, store: S) -> None:
        keys = chain(1, 6)
        self.saved(store, keys)
        match = self.matched(store, keys, start=4)
        assert (len(match.blocks), match.hits, match.start) == (2, 2, 4)
        assert all(outcome.done for outcome in self.loaded(store, match))
        nothing_left = self.matched(store, keys, "other", start=6)
        assert (list(nothing_left.blocks), nothing_left.hits) == ([], 0)
        nothing_left.release()

    def test_equal_tokens_of_another_salt_or_model_are_others(self, store: S) -> None:
        tokens = range(64)
        self.saved(store, span(tokens))
        other_model = type(IDENTITY)("other-model", IDENTITY.weights, IDENTITY.kv_dtype, IDENTITY.layout)
        for number, keys in enumerate(
            (span(tokens, salt=""), span(tokens, salt="s"), span(tokens, identity=other_model))
        ):
            match = self.matched(store, keys, f"r{number}")
            assert match.hits == 0
            match.release()

    def test_asking_again_gives_the_same_match(self, store: S) -> None:
        keys = chain(1, 3)
        self.saved(store, keys)
        match = store.match("r", keys)
        again = chain(1, 3)
        assert again is not keys
        assert store.match("r", again) is match
        self.settle(store, match)
        assert store.match("r", keys) is match
        other = store.match("r", keys, 1)
        assert other is not match, "from another block on it is another question"
        self.settle(store, other)
        assert self.loaded(store, match, 1)[0].done is False, "one request has one live match"
        assert all(outcome.done for outcome in self.loaded(store, other))

    def test_a_request_may_ask_for_nothing(self, store: S) -> None:
        self.saved(store, chain(1, 2))
        match = store.match("r", chain(1, 2), hints=Hints(no_load=True))
        assert not match.pending
        assert self.answers(match)[0] == (Found.MISS, Reason.NO_LOAD)
        match.release()

    def test_a_request_may_ask_not_to_be_stored(self, store: S) -> None:
        keys = chain(1, 2)
        outcomes = self.ended(store, store.save(keys, filled(self.memory(2), keys), hints=Hints(no_store=True)))
        assert [outcome.done for outcome in outcomes] == [False] * 2
        match = self.matched(store, keys)
        assert self.answers(match)[0] == (Found.MISS, Reason.NO_STORE)
        match.release()

    def test_loads_as_much_as_is_asked_for(self, store: S) -> None:
        keys = chain(1, 5)
        self.saved(store, keys)
        assert [one.done for one in self.loaded(store, self.matched(store, keys), 2)] == [True] * 2
        beyond = self.loaded(store, self.matched(store, keys), 7)
        assert [one.done for one in beyond] == [True] * 5 + [False] * 2
        assert all(outcome.detail for outcome in beyond[5:])
        assert self.loaded(store, self.matched(store, keys), 0) == []

    def test_a_released_match_loads_nothing_and_harms_nobody(self, store: S) -> None:
        keys = chain(1, 3)
        self.saved(store, keys)
        for give_up in (lambda match: match.release(), lambda match: store.forget(match.request_id)):
            match = self.matched(store, keys)
            for _ in range(2):
                give_up(match)
            assert not any(outcome.done for outcome in self.loaded(store, match, 3))
        store.forget("nobody")
        loaded = self.matched(store, keys)
        assert all(outcome.done for outcome in self.loaded(store, loaded))
        assert not any(outcome.done for outcome in self.loaded(store, loaded, 3)), "a load releases its match"

    def test_what_is_leased_stays(self, store: S) -> None:
        keys = chain(1, 4)
        self.saved(store, keys)
        match = self.matched(store, keys)
        assert match.hits == 4
        for number in range(2, 2 + MANY // 10):
            self.saved(store, chain(number, 10))
        assert all(outcome.done for outcome in self.loaded(store, match))

    def test_no_room_is_an_outcome_and_more_than_fits_is_no_error(self, store: S) -> None:
        keys = chain(1, MANY)
        outcomes = self.saved(store, keys)
        assert len(outcomes) == MANY
        whole = Outcome(Status.DONE, GEOMETRY.block_bytes)
        assert all(one == whole or (one.status is Status.FAILED and one.detail) for one in outcomes)
        came = self.comes(store, keys)
        assert came <= sum(one.done for one in outcomes)
        assert self.comes(store, chain(1, 1)) == min(1, came)

    def test_a_chain_loses_its_tail_before_its_head(self, store: S) -> None:
        keys = chain(1, 16)
        self.saved(store, keys)
        for number in range(2, 2 + MANY // 10):
            self.saved(store, chain(number, 10))
            match = self.matched(store, keys)
            assert all(block.found is Found.MISS for block in match.blocks[match.hits :])
            assert {reason for _, reason in self.answers(match)[match.hits + 1 :]} <= {Reason.BEHIND_A_MISS}
            match.release()

    def test_drop_forgets_for_a_reason_until_it_is_saved_again(self, store: S) -> None:
        keys = chain(1, 5)
        self.saved(store, keys)
        tail = Span(keys.origin, keys.keys[2], 3, keys.keys[3:])
        store.drop(tail, Reason.CLEARED)
        match = self.matched(store, keys)
        assert match.hits == 3
        assert self.answers(match)[3] == (Found.MISS, Reason.CLEARED)
        match.release()
        self.saved(store, keys)
        assert self.comes(store, keys) == 5
        store.drop(chain(9, 2), Reason.CLEARED)
        store.drop(keys.head(0), Reason.CLEARED)

    def test_a_drop_under_a_lease_never_gives_wrong_bytes(self, store: S) -> None:
        keys = chain(1, 4)
        self.saved(store, keys)
        match = self.matched(store, keys)
        store.drop(keys, Reason.CLEARED)
        for number in range(2, 12):
            self.saved(store, chain(number, 10))
        self.loaded(store, match, 4)  # right or not at all
        assert self.comes(store, keys) == 0

    def test_a_drop_of_what_is_being_saved_wins(self, store: S) -> None:
        keys = chain(1, 3)
        transfer = store.save(keys, filled(self.memory(3), keys))
        store.drop(keys, Reason.CLEARED)
        self.ended(store, transfer)
        assert self.comes(store, keys) == 0

    def test_cleared_scopes_miss_at_once_and_for_good(self, store: S) -> None:
        keys = chain(1, 3)
        self.saved(store, keys)
        before = store.epoch(NO_TENANT)
        done = store.clear(Selection())
        assert done.epoch == store.epoch(NO_TENANT)
        assert done.epoch > before
        for _ in range(2):
            match = self.matched(store, keys)
            assert match.hits == 0
            assert self.answers(match)[0] == (Found.MISS, Reason.CLEARED)
            match.release()
            assert not any(outcome.nbytes for outcome in self.saved(store, keys)), "what was cleared is kept again"
        today = span(range(64), scope=Scope(epoch=done.epoch))
        self.saved(store, today)
        assert self.comes(store, today) == 4

    def test_a_clear_leaves_the_scopes_that_it_is_not_about(self, store: S) -> None:
        mine, others = (span(range(48), scope=Scope(tenant=secret)) for secret in (b"mine", b"another's"))
        self.saved(store, mine)
        self.saved(store, others)
        store.clear(Selection(tenant=mine.origin.tenant))
        assert (self.comes(store, mine, "m"), self.comes(store, others, "o")) == (0, 3)
        assert store.epoch(others.origin.tenant) < store.epoch(mine.origin.tenant)

    def test_what_is_being_saved_when_it_is_cleared_is_not_found(self, store: S) -> None:
        keys = chain(1, 3)
        transfer = store.save(keys, filled(self.memory(3), keys))
        store.clear(Selection())
        self.ended(store, transfer)
        assert self.comes(store, keys) == 0

    def test_clearing_one_tier_is_refused_where_there_is_no_such_tier(self, store: S) -> None:
        with pytest.raises(RequestError, match="nowhere"):
            store.clear(Selection(), "nowhere")
        self.saved(store, chain(1, 2))
        assert self.drained(store), "else a write that is still on its way lands behind its tier's clear"
        for tier in store.health():
            store.clear(Selection(), tier)
            self.turn(store)
        assert self.comes(store, chain(1, 2)) == 0
        self.saved(store, chain(1, 2))
        assert self.comes(store, chain(1, 2)) == 2

    def test_explains_the_last_match_of_a_request(self, store: S) -> None:
        self.saved(store, chain(1, 2))
        match = self.matched(store, chain(1, 3))
        assert store.explain("r") == list(match.blocks)
        self.loaded(store, match)
        assert [block.found for block in store.explain("r")] == [Found.HIT, Found.HIT, Found.MISS]
        assert store.explain("nobody") == []

    def test_no_copy_starts_before_its_fence(self, store: S) -> None:
        keys = chain(1, 3)
        late = self.memory(3)
        transfer = store.save(keys, SlotRange(late, range(3)), Deferred(lambda: filled(late, keys)))
        assert all(outcome.done for outcome in self.ended(store, transfer))
        into = self.memory(3)
        seen: list[bool] = []
        fence = Deferred(lambda: seen.append(not into.bytes.any()))
        match = self.matched(store, keys)
        outcomes = self.ended(store, store.load(match, SlotRange(into, range(3)), fence))
        assert all(outcome.done for outcome in outcomes)
        assert seen
        assert all(seen), "bytes came before the fence"
        assert all(np.array_equal(into.bytes[index], content(keys, index)) for index in range(3))

    def test_a_fence_that_breaks_fails_its_copy_alone(self, store: S) -> None:
        def breaks() -> None:
            raise RuntimeError("the device is lost")

        keys = chain(1, 2)
        transfer = store.save(keys, filled(self.memory(2), keys), Deferred(breaks))
        assert [one.status for one in self.ended(store, transfer)] == [Status.FAILED] * 2
        assert self.comes(store, keys) == 0
        self.saved(store, keys)
        match = self.matched(store, keys)
        load = store.load(match, SlotRange(self.memory(2), range(2)), Deferred(breaks))
        assert [one.status for one in self.ended(store, load)] == [Status.FAILED] * 2
        assert self.comes(store, keys) == 2

    def test_a_transfer_that_is_taken_back_in_time_does_nothing(self, store: S) -> None:
        keys = chain(1, 2)
        save = store.save(keys, filled(self.memory(2), keys))
        taken_back = save.cancel()
        self.turn(store)
        assert self.drained(store)
        assert self.comes(store, keys) == (0 if taken_back else 2)
        self.saved(store, keys)
        memory = self.memory(2)
        load = store.load(self.matched(store, keys), SlotRange(memory, range(2)))
        if load.cancel():
            self.turn(store)
            assert not memory.bytes.any(), "bytes came although the load was taken back"
        assert self.comes(store, keys) == 2

    def test_prefetch_never_hurts(self, store: S) -> None:
        keys = chain(1, 3)
        store.prefetch(keys)
        self.turn(store)
        self.saved(store, keys)
        store.prefetch(chain(1, 9))
        self.turn(store)
        assert self.comes(store, keys) == 3

    def test_bytes_that_rotted_are_not_given_out(self, store: S) -> None:
        keys = chain(1, 3)
        self.saved(store, keys)
        require_machine(self.lose(store, keys), "a store whose bytes can be reached from behind")
        assert self.comes(store, keys) == 0
        match = self.matched(store, keys)
        assert self.answers(match)[0] == (Found.MISS, Reason.SUM_FAILED)
        match.release()
        self.saved(store, keys)
        assert self.comes(store, keys) == 3

    def test_drains_and_closes_and_then_keeps_still(self, store: S) -> None:
        keys = chain(1, 2)
        self.saved(store, keys)
        match = self.matched(store, keys)
        assert self.drained(store)
        store.close()
        store.close()
        self.closed = True
        for transfer in (
            store.save(chain(2, 2), filled(self.memory(2), chain(2, 2))),
            store.load(match, SlotRange(self.memory(2), range(2))),
        ):
            assert not any(outcome.done for outcome in transfer.result(PATIENCE))
        store.forget("r")

    def test_threads_get_their_own_bytes(self, store: S) -> None:
        """Each saves, matches, loads and drops chains of its own and one that all share."""
        wrong: list[str] = []

        def play(number: int) -> None:
            try:
                for turn in range(8):
                    self._played(store, [chain(100 * number + turn, 3), span(range(80))], f"{number}.{turn}")
                    if turn % 3 == 2:
                        store.drop(span(range(80)), Reason.CLEARED)
            except BaseException as failed:  # noqa: BLE001 - told to the thread that runs the test
                wrong.append(f"{type(failed).__name__}: {failed}")

        threads = [threading.Thread(target=play, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(PATIENCE)
        assert not any(thread.is_alive() for thread in threads)
        assert not wrong

    def _played(self, store: S, chains: Sequence[Span], name: str) -> None:
        for keys in chains:
            self.saved(store, keys)
            self.comes(store, keys, name)
