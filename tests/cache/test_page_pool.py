"""Tests PagePool: no order of steps, forks, truncations and frees loses a page or gives it to two sequences."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fastattn import InputError
from fastattn.cache.pages import PageDemand, PagePool, Reservation
from fastattn.errors import CacheFull

PAGES, PAGE_SIZE, LAYERS = 7, 3, 2


class Holder:
    """An object that stands for a step; the step is dropped with it."""


@dataclass(eq=False)
class Step:
    """The model's record of a step, with the pool's reservation that it must match."""

    reservation: Reservation
    num_new: dict[int, int]
    new: dict[int, list[str]]
    tables: dict[int, list[int]]
    before: dict[int, int]
    layers: set[int] = field(default_factory=set)
    is_good: bool = True
    counts: bool = False
    holder: Any = field(default_factory=Holder)


class Machine:
    """A pool, the rows of its pages as a dict, and the contents that each sequence should find."""

    def __init__(self) -> None:
        self.pool = PagePool(PAGES, PAGE_SIZE)
        self.contents: dict[int, list[str]] = {}
        self.rows: dict[tuple[int, int, int], str] = {}  # layer, page, row
        self.steps: list[Step] = []
        self.num_tokens = 0

    def settle(self) -> None:
        for step in self.steps:
            if step.is_good and not step.counts and len(step.layers) == LAYERS:
                step.counts = True
                for name, new in step.new.items():
                    self.contents[name] += new
            elif step.is_good and not step.counts and step.holder is None:
                step.is_good = False

    def change(self, name: int) -> None:
        """Ends the steps of this sequence."""
        for step in self.steps:
            if name in step.num_new:
                step.is_good = False

    def add(self) -> None:
        name = self.pool.add()
        assert name not in self.contents
        self.contents[name] = []

    def fork(self, name: int, length: int) -> None:
        if length > len(self.contents[name]):
            with pytest.raises(InputError):
                self.pool.fork(name, length)
            return
        child = self.pool.fork(name, length)
        self.change(name)
        self.contents[child] = self.contents[name][:length]

    def truncate(self, name: int, length: int) -> None:
        if length > len(self.contents[name]):
            with pytest.raises(InputError):
                self.pool.truncate(name, length)
            return
        self.pool.truncate(name, length)
        self.change(name)
        del self.contents[name][length:]

    def free(self, name: int) -> None:
        self.pool.free(name)
        self.change(name)
        del self.contents[name]

    def step(self, names: list[int], num_new: list[int], fails_at: str | None) -> bool:
        """Tries a step and returns whether it exists. ``fails_at`` is the stage that ran out of memory, if any did."""
        try:
            demand = self.pool.demand(names, num_new)
        except CacheFull:
            return False
        if demand.copies_take_reserved:
            self.pool.end_superseded(demand)
            for step in self.steps:
                if any(step.reservation is ended for ended in demand.superseded):
                    step.is_good = False
        if fails_at == "demand":
            return False
        self.copy(demand)
        if fails_at == "copies":
            return False
        tables = demand.tables()
        reservation = self.pool.reserve(demand, LAYERS)
        for name in names:
            self.change(name)
        new = []
        for count in num_new:
            new.append([f"token {self.num_tokens + i}" for i in range(count)])
            self.num_tokens += count
        step = Step(
            reservation,
            dict(zip(names, num_new, strict=True)),
            dict(zip(names, new, strict=True)),
            dict(zip(names, tables, strict=True)),
            {name: len(self.contents[name]) for name in names},
        )
        reservation.holder = lambda: step.holder
        self.steps.append(step)
        return True

    def copy(self, demand: PageDemand) -> None:
        for _, source, target in demand.copies:
            for layer in range(LAYERS):
                for row in range(PAGE_SIZE):
                    self.rows[layer, target, row] = self.rows.get((layer, source, row), "nothing")

    def attend(self, step: Step, layer: int) -> None:
        if not step.is_good:
            with pytest.raises(InputError, match="step: it can store no more"):
                step.reservation.check_current()
            return
        step.reservation.check_current()
        for name, new in step.new.items():
            for i, token in enumerate(new):
                at = step.before[name] + i
                self.rows[layer, step.tables[name][at // PAGE_SIZE], at % PAGE_SIZE] = f"{token} of layer {layer}"
        step.layers.add(layer)
        step.reservation.stored[layer] = True

    def cancel(self, step: Step) -> None:
        self.pool.cancel(step.reservation)
        if not step.counts:
            step.is_good = False

    def drop(self, step: Step) -> None:
        step.holder = None

    def check(self) -> None:
        pool = self.pool
        pool.settle()
        self.settle()
        assert list(pool.sequences) == list(self.contents)
        held = Counter(page for sequence in pool.sequences.values() for page in sequence.pages)
        reserved = [
            page
            for step in self.steps
            if step.is_good and not step.counts
            for pages in step.reservation.pages
            for page in pages
        ]
        assert [held[page] for page in range(PAGES)] == pool.references
        assert sorted([*held, *reserved, *pool.free_pages]) == list(range(PAGES))
        for name, tokens in self.contents.items():
            sequence = pool.sequences[name]
            assert sequence.length == len(tokens)
            assert len(sequence.pages) == -(-len(tokens) // PAGE_SIZE)
            for layer in range(LAYERS):
                for at, token in enumerate(tokens):
                    found = self.rows[layer, sequence.pages[at // PAGE_SIZE], at % PAGE_SIZE]
                    assert found == f"{token} of layer {layer}"


OPERATIONS = [
    *["whole step"] * 6,
    *["step"] * 3,
    *["attend"] * 4,
    *["fork"] * 3,
    "add",
    "truncate",
    "free",
    "cancel",
    "drop",
]


@settings(max_examples=100, deadline=None, derandomize=True)
@given(st.data())
def test_any_operations_in_any_order(data: st.DataObject) -> None:
    """Layers run in any order and repeatedly. Steps are interleaved, abandoned, cancelled, overtaken. Devices fail."""
    machine = Machine()
    machine.add()
    for _ in range(data.draw(st.integers(10, 40))):
        alive = list(machine.contents)
        operation = data.draw(st.sampled_from(OPERATIONS))
        if operation == "add" and len(alive) < 5:
            machine.add()
        elif operation in ("fork", "truncate") and alive and len(alive) < 6:
            name = data.draw(st.sampled_from(alive))
            getattr(machine, operation)(name, data.draw(st.integers(0, len(machine.contents[name]) + 1)))
        elif operation == "free" and len(alive) > 1:
            machine.free(data.draw(st.sampled_from(alive)))
        elif operation in ("step", "whole step") and alive:
            names = data.draw(st.lists(st.sampled_from(alive), unique=True, min_size=1))
            num_new = data.draw(st.lists(st.integers(0, 4), min_size=len(names), max_size=len(names)))
            if operation == "step":
                machine.step(names, num_new, data.draw(st.sampled_from([None, None, None, "demand", "copies"])))
            elif machine.step(names, num_new, None):
                for layer in (1, 0):
                    machine.attend(machine.steps[-1], layer)
        elif operation in ("attend", "cancel", "drop") and machine.steps:
            step = machine.steps[-data.draw(st.integers(1, min(4, len(machine.steps))))]
            if operation == "attend":
                machine.attend(step, data.draw(st.integers(0, LAYERS - 1)))
            else:
                getattr(machine, operation)(step)
        machine.check()
    for name in list(machine.contents):
        machine.free(name)
    machine.check()
    assert len(machine.pool.free_pages) == PAGES


def test_a_step_that_takes_the_place_of_another_may_have_its_pages() -> None:
    pool = PagePool(num_pages=2, page_size=4)
    name = pool.add()
    pool.reserve(pool.demand([name], [8]), LAYERS)
    again = pool.demand([name], [7])
    assert sorted(again.pages[0]) == [0, 1]
    with pytest.raises(CacheFull, match="this step needs 3 more pages of 4 tokens, and 2 of 2 are free"):
        pool.demand([name], [9])


def test_a_copy_that_needs_reserved_pages_is_made_only_once_their_step_is_over() -> None:
    """An earlier copy would overwrite what that step has stored, and might then fail."""
    pool = PagePool(num_pages=3, page_size=4)
    waiting, parent = pool.add(), pool.add()
    pool.reserve(pool.demand([parent], [2]), 1).stored[0] = True
    child = pool.fork(parent, None)
    step = pool.reserve(pool.demand([waiting], [8]), LAYERS)
    demand = pool.demand([child, waiting], [1, 1])
    assert demand.copies_take_reserved
    pool.end_superseded(demand)
    with pytest.raises(InputError, match="sequence 0 has had another step"):
        step.check_current()
    pool.reserve(demand, LAYERS)
    assert pool.free_pages == []
    assert sorted(pool.references) == [0, 1, 1]  # the third is reserved
