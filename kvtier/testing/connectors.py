"""What both halves of every connector must do, as a test class to inherit from.

Whatever passes between the halves is packed, as for a process of its own, and read back: they share no memory. A new
connector's test file is a subclass with a ``connector`` fixture over a fresh store, and hooks::

    class TestMine(ConnectorSuite):
        @pytest.fixture
        def connector(self): ...               # for blocks.IDENTITY, at least 16 slots of HBM and 16 blocks of DRAM
        def turn(self): ...                    # run queued transfers, where no thread of the store's does
        def lose(self, keys): ...              # make the store forget or spoil these blocks
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import msgpack
import numpy as np
import pytest

from kvtier.abc.connector import Finished, KVConnector, LoadPlan, SavePlan, StepPlan
from kvtier.abc.store import Hints, Reason
from kvtier.key import BlockKey, Origin, Span
from kvtier.testing.blocks import LAYOUT, EngineMemory, chain, content

PATIENCE = 20.0
"""Seconds after which a load or a save is taken to hang."""


def packed(value: StepPlan | Finished) -> bytes:
    """The plain data of what one half says to the other."""
    made: bytes = msgpack.packb(asdict(value))
    return made


def _span(plain: dict[str, Any]) -> Span:
    return Span(Origin(**plain["origin"]), BlockKey(plain["parent"]), plain["depth"], tuple(plain["keys"]))


def plan_of(data: bytes) -> StepPlan:
    """What ``packed`` was made of."""
    plain = msgpack.unpackb(data)
    loads = [LoadPlan(**{**one, "span": _span(one["span"]), "slots": tuple(one["slots"])}) for one in plain["loads"]]
    saves = [
        SavePlan(one["request_id"], _span(one["span"]), tuple(one["slots"]), Hints(**one["hints"]))
        for one in plain["saves"]
    ]
    return StepPlan(tuple(loads), tuple(saves))


def finished_of(data: bytes) -> Finished:
    """What ``packed`` was made of."""
    return Finished(tuple((name, tuple(slots)) for name, slots in msgpack.unpackb(data)["saved"]))


class _Late:
    """A fence behind which the engine fills its slots."""

    def __init__(self, suite: ConnectorSuite, keys: Span, slots: Sequence[int]) -> None:
        self._suite, self._keys, self._slots = suite, keys, slots

    def wait(self) -> None:
        self._suite.fill(self._keys, self._slots)


class ConnectorSuite:
    """For connectors. ``slots`` is the engine's HBM."""

    slots = 64
    hbm: EngineMemory

    @pytest.fixture
    def connector(self) -> KVConnector:
        raise NotImplementedError("a suite's subclass gives the connector")

    def turn(self) -> None:
        """Run what is queued; nothing to do where the store has threads."""

    def lose(self, keys: Span) -> None:
        """Make the blocks fail to load, behind the connector."""
        raise NotImplementedError("a suite's subclass says how")

    @pytest.fixture(autouse=True)
    def registered(self, connector: KVConnector) -> None:
        self.hbm = EngineMemory(self.slots)
        connector.worker.register_kv_caches(self.hbm)

    def fill(self, keys: Span, slots: Sequence[int]) -> None:
        for index, slot in enumerate(slots):
            self.hbm.bytes[slot] = content(keys, index)

    def planned(self, connector: KVConnector) -> StepPlan:
        """What the scheduler half plans, as the worker half receives it."""
        plan = connector.scheduler.build_connector_meta()
        received = plan_of(packed(plan))
        assert received == plan, "a plan is not plain data"
        return received

    def report(self, connector: KVConnector) -> Finished:
        """What the worker half has ended, told to the scheduler half."""
        finished = connector.worker.get_finished()
        received = finished_of(packed(finished))
        assert received == finished, "a report is not plain data"
        connector.scheduler.update_connector_output(received)
        return received

    def saved(self, connector: KVConnector, request: str, keys: Span, slots: Sequence[int]) -> int:
        """Fill, offer and save blocks as one step does; how many were taken, all of which have ended."""
        self.fill(keys, slots)
        taken = connector.scheduler.offer(request, keys, slots)
        connector.worker.wait_for_save(self.planned(connector))
        ended: list[int] = []
        end = time.monotonic() + PATIENCE
        while len(ended) < taken:
            self.turn()
            ended += [slot for name, some in self.report(connector).saved if name == request for slot in some]
            assert time.monotonic() < end, "a save does not end"
            time.sleep(0.001)
        assert sorted(ended) == sorted(slots[:taken]), "every slot is given back once"
        return taken

    def asked(self, connector: KVConnector, request: str, keys: Span, computed: int = 0) -> int:
        """Tokens to load, once the answer is there."""
        end = time.monotonic() + PATIENCE
        while True:
            tokens = connector.scheduler.get_num_new_matched_tokens(request, keys, computed)
            self.turn()
            if tokens is not None:
                assert tokens % LAYOUT.block_tokens == 0
                return tokens
            assert time.monotonic() < end, "the answer does not come"
            time.sleep(0.001)

    def blocks(self, connector: KVConnector, request: str, keys: Span, computed: int = 0) -> int:
        return self.asked(connector, request, keys, computed) // LAYOUT.block_tokens

    def loaded(self, connector: KVConnector, plan: StepPlan) -> frozenset[int]:
        """Run a plan's loads to their end; the slots that failed. Every other one has the right bytes."""
        connector.worker.start_load_kv(plan)
        self.turn()
        for layer in range(2):
            connector.worker.wait_for_layer_load(layer)
        failed = connector.worker.get_block_ids_with_load_errors()
        for load in plan.loads:
            for index, slot in enumerate(load.slots):
                if slot not in failed:
                    expected = content(load.span, load.start + index)
                    assert np.array_equal(self.hbm.bytes[slot], expected), f"slot {slot} has wrong bytes"
        return failed

    def test_has_nothing_for_what_nobody_saved(self, connector: KVConnector) -> None:
        assert self.asked(connector, "r", chain(1, 3)) == 0
        connector.scheduler.update_state_after_alloc("r", [], 0)
        assert self.planned(connector) == StepPlan()
        assert connector.scheduler.request_finished("r") is False

    def test_what_one_request_saves_the_next_one_loads(self, connector: KVConnector) -> None:
        keys = chain(1, 4)
        assert self.saved(connector, "first", keys, [3, 9, 4, 7]) == 4
        assert connector.scheduler.request_finished("first") is False
        self.hbm.bytes[:] = 0
        assert self.blocks(connector, "second", keys) == 4
        connector.scheduler.update_state_after_alloc("second", [20, 11, 30, 2], 4 * LAYOUT.block_tokens)
        plan = self.planned(connector)
        assert [(load.request_id, load.slots, load.start) for load in plan.loads] == [("second", (20, 11, 30, 2), 0)]
        assert self.loaded(connector, plan) == frozenset()
        assert connector.scheduler.request_finished("second") is False

    def test_loads_begin_behind_what_the_engine_has(self, connector: KVConnector) -> None:
        keys = chain(1, 4)
        self.saved(connector, "first", keys, range(4))
        self.hbm.bytes[:] = 0
        assert self.blocks(connector, "second", keys, computed=3) == 1
        connector.scheduler.update_state_after_alloc("second", [40], LAYOUT.block_tokens)
        plan = self.planned(connector)
        assert plan.loads[0].start == 3
        assert self.loaded(connector, plan) == frozenset()
        assert not self.hbm.bytes[:40].any()

    def test_a_shorter_allocation_loads_less(self, connector: KVConnector) -> None:
        keys = chain(1, 4)
        self.saved(connector, "first", keys, range(4))
        assert self.blocks(connector, "second", keys) == 4
        connector.scheduler.update_state_after_alloc("second", [50, 51], 2 * LAYOUT.block_tokens)
        assert self.loaded(connector, self.planned(connector)) == frozenset()

    def test_asking_again_changes_nothing(self, connector: KVConnector) -> None:
        keys = chain(1, 3)
        self.saved(connector, "first", keys, range(3))
        assert {self.blocks(connector, "second", keys) for _ in range(5)} == {3}
        assert self.planned(connector) == StepPlan()
        connector.scheduler.update_state_after_alloc("second", [10, 11, 12], 3 * LAYOUT.block_tokens)
        assert len(self.planned(connector).loads) == 1
        assert self.planned(connector) == StepPlan(), "a plan is given once"

    def test_an_engine_may_decline(self, connector: KVConnector) -> None:
        keys = chain(1, 3)
        self.saved(connector, "first", keys, range(3))
        assert self.blocks(connector, "second", keys) == 3
        connector.scheduler.update_state_after_alloc("second", [], 0)
        assert self.planned(connector) == StepPlan()
        assert self.blocks(connector, "second", keys) == 3, "declined now is not declined for ever"
        connector.scheduler.request_finished("second")

    def test_takes_what_it_can_save_and_says_how_much(self, connector: KVConnector) -> None:
        """What running saves hold is capped; the rest is offered again, and everything is taken in the end."""
        keys = chain(1, 40)
        first = connector.scheduler.offer("r", keys, range(40))
        assert 0 < first <= 40
        again = connector.scheduler.offer("s", chain(2, 24), range(40, 64))
        assert first + again < 64, "saves may hold the whole of HBM"
        plan = self.planned(connector)
        assert sum(len(save.slots) for save in plan.saves) == first + again
        assert [len(save.span) for save in plan.saves] == [len(save.slots) for save in plan.saves]
        connector.worker.wait_for_save(plan)
        ended = 0
        end = time.monotonic() + PATIENCE
        while ended < first + again:
            self.turn()
            ended += sum(len(slots) for _, slots in self.report(connector).saved)
            assert time.monotonic() < end
        assert connector.scheduler.offer("r", keys, range(40)) == first, "room that came free is given out again"

    def test_slots_are_held_until_their_save_has_ended(self, connector: KVConnector) -> None:
        keys = chain(1, 2)
        self.fill(keys, [5, 6])
        assert connector.scheduler.offer("r", keys, [5, 6]) == 2
        assert connector.scheduler.request_finished("r") is True, "its save is planned and reads its slots"
        connector.worker.wait_for_save(self.planned(connector))
        ended: list[int] = []
        end = time.monotonic() + PATIENCE
        while len(ended) < 2:
            self.turn()
            ended += [slot for _, slots in self.report(connector).saved for slot in slots]
            assert time.monotonic() < end
        assert connector.scheduler.request_finished("r") is False
        assert self.report(connector) == Finished()

    def test_a_save_waits_for_its_fence(self, connector: KVConnector) -> None:
        keys = chain(1, 2)
        assert connector.scheduler.offer("r", keys, [5, 6]) == 2
        connector.worker.wait_for_save(self.planned(connector), _Late(self, keys, [5, 6]))
        end = time.monotonic() + PATIENCE
        while not self.report(connector).saved:
            self.turn()
            assert time.monotonic() < end
        assert self.blocks(connector, "s", keys) == 2
        connector.scheduler.update_state_after_alloc("s", [1, 2], 2 * LAYOUT.block_tokens)
        assert self.loaded(connector, self.planned(connector)) == frozenset()

    def test_blocks_that_do_not_come_are_named_by_slot(self, connector: KVConnector) -> None:
        keys = chain(1, 3)
        self.saved(connector, "first", keys, range(3))
        assert self.blocks(connector, "second", keys) == 3
        connector.scheduler.update_state_after_alloc("second", [30, 31, 32], 3 * LAYOUT.block_tokens)
        plan = self.planned(connector)
        self.lose(keys)
        assert self.loaded(connector, plan) == {30, 31, 32}
        other = chain(2, 1)
        self.saved(connector, "third", other, [0])
        assert self.blocks(connector, "fourth", other) == 1
        connector.scheduler.update_state_after_alloc("fourth", [31], LAYOUT.block_tokens)
        assert self.loaded(connector, self.planned(connector)) == frozenset(), "errors are of this step's loads"

    def test_a_request_that_ends_between_plan_and_load_harms_nobody(self, connector: KVConnector) -> None:
        keys = chain(1, 2)
        self.saved(connector, "first", keys, range(2))
        assert self.blocks(connector, "second", keys) == 2
        connector.scheduler.update_state_after_alloc("second", [30, 31], 2 * LAYOUT.block_tokens)
        plan = self.planned(connector)
        connector.scheduler.request_finished("second")
        self.loaded(connector, plan)  # right bytes, or named as failed
        assert self.blocks(connector, "third", keys) == 2

    def test_what_the_engine_drops_is_gone_until_it_is_saved_again(self, connector: KVConnector) -> None:
        keys = chain(1, 4)
        self.saved(connector, "first", keys, range(4))
        connector.scheduler.drop(Span(keys.origin, keys.keys[0], 1, keys.keys[1:]), Reason.RECOMPUTED_DIFFERENTLY)
        self.turn()
        assert self.blocks(connector, "second", keys) == 1, "what lies before stays"
        connector.scheduler.request_finished("second")
        assert self.saved(connector, "third", keys, range(8, 12)) == 4
        assert self.blocks(connector, "fourth", keys) == 4
        connector.scheduler.request_finished("fourth")

    def test_requests_it_never_saw_may_end(self, connector: KVConnector) -> None:
        for _ in range(2):
            assert connector.scheduler.request_finished("nobody") is False
        connector.scheduler.update_state_after_alloc("nobody", [1], LAYOUT.block_tokens)
        assert self.planned(connector) == StepPlan()
        assert connector.worker.get_finished() == Finished()
        assert connector.worker.get_block_ids_with_load_errors() == frozenset()
        connector.worker.save_kv_layer(0)
