"""Compares PagedKVCache with lists of tokens: after any operations in any order, it holds what the lists hold.

hypothesis draws the operations, on the PyTorch path and with so few small pages that they run out. Each run draws the
same operations, unless FASTATTN_EXAMPLES=1000 asks for others.
"""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    multiple,
    precondition,
    rule,
)
from torch import Tensor

import fastattn
from fastattn import InputError, PagedKVCache
from fastattn.cache.paged import PagedChunk, PagedStep
from fastattn.errors import CacheFull

MORE = int(os.environ.get("FASTATTN_EXAMPLES", "0"))
LAYERS, KV_HEADS, HEADS, DIM, VALUE_DIM = 2, 1, 2, 4, 3
PAGES, PAGE_SIZE, MOST_SEQUENCES = 6, 3, 5


def vectors(tokens: list[int], layer: int, what: str, dim: int, heads: int = KV_HEADS) -> Tensor:
    """Returns a layer's vectors of the tokens, ``[heads, len(tokens), dim]``: a function of the arguments."""
    phase = {"query": 0.3, "key": 1.1, "value": 2.3}[what] + layer
    number = torch.tensor(tokens, dtype=torch.float64)[None, :, None]
    head, column = torch.arange(heads)[:, None, None], torch.arange(dim)
    return torch.sin(number * (1.7 + phase) + 0.9 * head + column)


def attention(tokens: list[int], num_new: int, layer: int) -> Tensor:
    """Returns causal attention of the last ``num_new`` tokens, ``[HEADS, num_new, VALUE_DIM]``."""
    query = vectors(tokens, layer, "query", DIM, HEADS)[:, len(tokens) - num_new :]
    scores = query @ vectors(tokens, layer, "key", DIM).transpose(1, 2) / math.sqrt(DIM)
    is_seen = torch.ones(num_new, len(tokens)).tril(len(tokens) - num_new).bool()
    return scores.masked_fill(~is_seen, -math.inf).softmax(-1) @ vectors(tokens, layer, "value", VALUE_DIM)


@dataclass(eq=False)
class ModelStep:
    """The model's record of a step: ``new`` tokens of sequences that hold the tokens ``before``."""

    real: PagedStep | PagedChunk | None  # None: the step was dropped
    new: dict[int, list[int]]
    before: dict[int, list[int]]
    stored: set[int] = field(default_factory=set)  # layers
    refusal: str | None = None
    counts: bool = False

    @property
    def is_open(self) -> bool:
        return not self.counts and self.refusal is None

    def num_reserved(self) -> int:
        return sum(
            pages_for(len(self.before[s]) + len(new)) - pages_for(len(self.before[s])) for s, new in self.new.items()
        )


def pages_for(tokens: int) -> int:
    return -(-tokens // PAGE_SIZE)


class CacheMachine(RuleBasedStateMachine):
    """A machine that operates on the cache and on a list of tokens per sequence."""

    sequences, steps = Bundle("sequences"), Bundle("steps")

    def __init__(self) -> None:
        super().__init__()
        self.cache = PagedKVCache(
            LAYERS, PAGES, KV_HEADS, DIM, page_size=PAGE_SIZE, value_dim=VALUE_DIM, dtype=torch.float64
        )
        self.tokens: dict[int, list[int]] = {}
        self.model_steps: list[ModelStep] = []
        self.numbers = itertools.count(1)

    # --- The model ----------------------------------------------------------------------------------------------------

    def settle(self) -> None:
        """Counts steps whose tokens every layer has stored, and ends steps that were dropped."""
        for step in self.model_steps:
            if step.is_open and len(step.stored) == LAYERS:
                step.counts = True
                for sequence, new in step.new.items():
                    self.tokens[sequence] = self.tokens[sequence] + new
            elif step.is_open and step.real is None:
                step.refusal = "nobody held it any more"

    def end_steps_of(self, sequence: int, reason: str) -> None:
        for step in self.model_steps:
            if sequence in step.new and step.refusal is None and sequence in self.tokens:
                step.refusal = f"sequence {sequence} {reason}"

    def num_free(self) -> int:
        held = {page for sequence in self.tokens for page in self.cache.pages(sequence)}
        return PAGES - len(held) - sum(step.num_reserved() for step in self.model_steps if step.is_open)

    def num_copies(self, counts: dict[int, int]) -> int:
        """Counts pages that are partly full, shared and about to be written. The last writer keeps the page itself."""
        references: dict[int, int] = {}
        for sequence in self.tokens:
            for page in self.cache.pages(sequence):
                references[page] = references.get(page, 0) + 1
        copies = 0
        for sequence, count in counts.items():
            if count and len(self.tokens[sequence]) % PAGE_SIZE:
                page = self.cache.pages(sequence)[-1]
                if references[page] > 1:
                    references[page] -= 1
                    copies += 1
        return copies

    def snapshot(self) -> Any:
        layers = [[tensor.tolist() for tensor in self.cache.pools(layer)] for layer in range(LAYERS)]
        named = {
            sequence: (self.cache.length(sequence), self.cache.pages(sequence)) for sequence in self.cache.sequences
        }
        return self.cache.num_free_pages, named, layers

    # --- Sequences ----------------------------------------------------------------------------------------------------

    @initialize(target=sequences)
    def begin(self) -> int:
        return self.add_one()

    @precondition(lambda self: len(self.tokens) < MOST_SEQUENCES)
    @rule(target=sequences)
    def add(self) -> int:
        return self.add_one()

    def add_one(self) -> int:
        name = self.cache.add()
        assert name not in self.tokens
        self.tokens[name] = []
        return name

    @precondition(lambda self: len(self.tokens) < MOST_SEQUENCES)
    @rule(target=sequences, sequence=sequences, share=st.floats(0, 1), whole=st.booleans())
    def fork(self, sequence: int, share: float, whole: bool) -> Any:
        self.settle()
        if sequence not in self.tokens:
            with pytest.raises(InputError, match=r"sequence: expected the number of a sequence"):
                self.cache.fork(sequence)
            return multiple()
        length = len(self.tokens[sequence]) if whole else round(share * len(self.tokens[sequence]))
        free = self.cache.num_free_pages + sum(
            s.num_reserved() for s in self.model_steps if s.is_open and sequence in s.new
        )
        child = self.cache.fork(sequence) if whole else self.cache.fork(sequence, length)
        self.end_steps_of(sequence, "was forked")
        self.tokens[child] = self.tokens[sequence][:length]
        assert self.cache.num_free_pages == free  # a fork takes no page; it frees what the sequence's step had reserved
        return child

    @rule(sequence=sequences, share=st.floats(0, 1))
    def truncate(self, sequence: int, share: float) -> None:
        self.settle()
        if sequence not in self.tokens:
            return
        has = len(self.tokens[sequence])
        before = self.snapshot()
        with pytest.raises(InputError, match=f"length: expected at most the {has} tokens"):
            self.cache.truncate(sequence, has + 1)
        assert self.snapshot() == before
        self.cache.truncate(sequence, round(share * has))
        self.end_steps_of(sequence, "was truncated")
        self.tokens[sequence] = self.tokens[sequence][: round(share * has)]

    @rule(sequence=consumes(sequences))
    def free(self, sequence: int) -> None:
        self.settle()
        if sequence in self.tokens:
            self.cache.free(sequence)
            self.end_steps_of(sequence, "was freed")
            del self.tokens[sequence]

    @precondition(lambda self: len(self.tokens) > 3)
    @rule()
    def reset(self) -> None:
        self.settle()
        self.cache.reset()
        for sequence in list(self.tokens):
            self.end_steps_of(sequence, "was freed")
            del self.tokens[sequence]
        assert self.cache.num_free_pages == PAGES

    # --- Steps --------------------------------------------------------------------------------------------------------

    @rule(
        target=steps,
        some=st.lists(sequences, min_size=1, max_size=3, unique=True),
        counts=st.lists(st.integers(0, 5), min_size=3, max_size=3),
        form=st.sampled_from(["step", "chunk"]),
        whole=st.booleans(),
    )
    def step(self, some: list[int], counts: list[int], form: str, whole: bool) -> Any:
        """Begins a step. If ``whole``, every layer attends at once."""
        self.settle()
        some = [sequence for sequence in some if sequence in self.tokens]
        counts = counts[: len(some)] if form == "chunk" else [counts[0]] * len(some)
        wanted = dict(zip(some, counts, strict=True))
        additional = sum(
            pages_for(len(self.tokens[s]) + count) - pages_for(len(self.tokens[s])) for s, count in wanted.items()
        )
        superseded = [step for step in self.model_steps if step.is_open and not wanted.keys().isdisjoint(step.new)]
        available = self.num_free() + sum(step.num_reserved() for step in superseded)
        if self.num_copies(wanted) + additional > available:
            before = self.snapshot()
            with pytest.raises(CacheFull, match=f"and {available} of {PAGES} are free"):
                self.begin_step(form, some, counts)
            assert self.snapshot() == before
            return multiple()
        real = self.begin_step(form, some, counts)
        for step in superseded:
            step.refusal = f"sequence {next(s for s in step.new if s in wanted)} has had another step"
        for sequence in some:
            self.end_steps_of(sequence, "has had another step")
        new = {sequence: [next(self.numbers) for _ in range(count)] for sequence, count in wanted.items()}
        step = ModelStep(real, new, {sequence: self.tokens[sequence] for sequence in some})
        self.model_steps.append(step)
        if whole:
            for layer in range(LAYERS):
                self.attend_with(step, layer)
        return step

    def begin_step(self, form: str, some: list[int], counts: list[int]) -> PagedStep | PagedChunk:
        return self.cache.step(some, counts[0] if counts else 1) if form == "step" else self.cache.chunk(some, counts)

    @rule(step=steps, layer=st.integers(0, LAYERS - 1))
    def attend(self, step: ModelStep, layer: int) -> None:
        """Runs a layer, in any order and repeatedly. A step that has ended stores nothing."""
        self.settle()
        self.attend_with(step, layer)

    def attend_with(self, step: ModelStep, layer: int) -> None:
        if step.real is None or not step.new:
            return
        inputs = [
            [vectors(new, layer, what, dim, heads) for new in step.new.values()]
            for what, dim, heads in (("query", DIM, HEADS), ("key", DIM, KV_HEADS), ("value", VALUE_DIM, KV_HEADS))
        ]
        join = torch.stack if isinstance(step.real, PagedStep) else (lambda rows: torch.cat(rows, 1)[None])
        query, key, value = map(join, inputs)
        if step.refusal is not None:
            before = self.snapshot()
            with pytest.raises(InputError, match=f"can store no more tokens, because {step.refusal}"):
                step.real.attend(layer, query, key, value)
            assert self.snapshot() == before
            return
        out = step.real.attend(layer, query, key, value)
        step.stored.add(layer)
        wanted = join([attention(step.before[s] + new, len(new), layer) for s, new in step.new.items()])
        torch.testing.assert_close(out, wanted)

    @rule(step=steps)
    def commit(self, step: ModelStep) -> None:
        """Writes the tokens to the pages of every layer, as a user's own kernel would, and commits the step."""
        self.settle()
        if step.real is None or not step.new:
            return
        if step.refusal is not None:
            with pytest.raises(InputError, match=f"can store no more tokens, because {step.refusal}"):
                step.real.commit()
            return
        tokens = [token for new in step.new.values() for token in new]
        places = [
            table[at // PAGE_SIZE] * PAGE_SIZE + at % PAGE_SIZE
            for table, (sequence, new) in zip(step.real.block_table.tolist(), step.new.items(), strict=True)
            for at in range(len(step.before[sequence]), len(step.before[sequence]) + len(new))
        ]
        for layer in range(LAYERS):
            key, value = (
                vectors(tokens, layer, *what).transpose(0, 1) for what in (("key", DIM), ("value", VALUE_DIM))
            )
            fastattn.append_to_cache(key, value, *self.cache.pools(layer), torch.tensor(places, dtype=torch.int64))
        step.real.commit()
        step.stored.update(range(LAYERS))

    @rule(step=steps)
    def cancel(self, step: ModelStep) -> None:
        self.settle()
        if step.real is not None:
            step.real.cancel()
            if step.is_open:
                step.refusal = "it was cancelled"

    @rule(step=consumes(steps))
    def drop(self, step: ModelStep) -> None:
        step.real = None

    # --- Invariants ---------------------------------------------------------------------------------------------------

    @invariant()
    def the_cache_holds_what_the_lists_hold(self) -> None:
        self.settle()
        assert self.cache.sequences == list(self.tokens)
        assert self.cache.num_free_pages == self.num_free()
        for sequence, tokens in self.tokens.items():
            pages = self.cache.pages(sequence)
            assert self.cache.length(sequence) == len(tokens)
            assert len(pages) == pages_for(len(tokens)) and len(set(pages)) == len(pages)
            for layer in range(LAYERS):
                for pool, what in zip(self.cache.pools(layer), (("key", DIM), ("value", VALUE_DIM)), strict=True):
                    held = pool[pages].transpose(0, 1).flatten(1, 2)[:, : len(tokens)]
                    assert torch.equal(held, vectors(tokens, layer, *what))

    @invariant()
    def sequences_share_only_what_they_have_in_common(self) -> None:
        for one, other in itertools.combinations(self.tokens, 2):
            first, second = self.cache.pages(one), self.cache.pages(other)
            for at, page in enumerate(first):
                if page in second:
                    assert second[at] == page
                    here = slice(at * PAGE_SIZE, (at + 1) * PAGE_SIZE)
                    short, long = sorted((self.tokens[one][here], self.tokens[other][here]), key=len)
                    assert long[: len(short)] == short

    def teardown(self) -> None:
        self.model_steps.clear()
        self.cache.reset()
        assert self.cache.num_free_pages == PAGES


@pytest.fixture(autouse=True, scope="module")
def _on_the_torch_path() -> Iterator[None]:
    with fastattn.use_backend("torch"):
        yield


TestPagedKVCache = pytest.mark.quick(CacheMachine.TestCase)
TestPagedKVCache.settings = settings(
    max_examples=MORE or 40,
    stateful_step_count=40,
    derandomize=not MORE,
    database=None,
    deadline=None,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large],
)
