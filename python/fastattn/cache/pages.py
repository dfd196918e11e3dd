"""Tracks which pages of a pool are free, reserved or held by sequences, on the host only and without tensors.

A step is open until every layer has stored its tokens, or until it is ended. An open step reserves pages for its
tokens. A page's reference count is the number of sequences that hold the page.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from fastattn.checks import check_int, expect
from fastattn.dispatch.users_line import warn_at_users_line
from fastattn.errors import CacheFull, InputError


@dataclass(eq=False)
class PageList:
    """Describes a sequence: ``pages`` hold its ``length`` tokens in order. The last page is not always full."""

    length: int = 0
    pages: list[int] = field(default_factory=list)
    latest: Reservation | None = None  # of the newest step, while that step can still write


@dataclass(eq=False)
class Reservation:
    """Holds the pages that one step is about to fill, and the layers that have filled them.

    A step under ``torch.compile`` reads and writes only ``refusal`` and ``stored``. If its graph depended on the lists
    of the pool, the graph would be valid for one step only.

    Attributes:
        sequences: the sequences that get tokens.
        num_new: the number of tokens that each sequence gets.
        pages: the new pages of each sequence.
        stored: whether each layer has stored the tokens.
        refusal: why the step cannot write any more, or None if it can.
        is_open: whether the pages are still reserved and the tokens do not count yet.
        holder: a weak reference; returns the step, or None once the step has been garbage-collected.
    """

    sequences: list[PageList]
    num_new: list[int]
    pages: list[list[int]]
    stored: list[bool]
    refusal: str | None = None
    is_open: bool = True
    holder: Callable[[], object | None] = object

    def check_current(self) -> None:
        """Raises InputError if the step was ended, because its pages might now belong to another step."""
        if self.refusal is not None:
            raise InputError(
                f"step: it can store no more tokens, because {self.refusal}; make a new one with cache.step()"
            )


class PageCopy(NamedTuple):
    """Describes a copy on write of page ``source`` to page ``target``, which becomes the last page of ``sequence``."""

    sequence: PageList
    source: int
    target: int


@dataclass(frozen=True)
class PageDemand:
    """Holds the pages that a step will take from the pool. Making a demand does not change the pool.

    Attributes:
        names: the numbers of the step's sequences, as `PagePool.add` returns them.
        sequences: their page lists, in the same order.
        num_new: the number of tokens that each gets.
        pages: the new pages that each sequence gets.
        copies: the pages to copy before ``PagePool.reserve``.
        superseded: the open steps of these sequences, which this step ends.
        copies_take_reserved: whether a target of ``copies`` is a page that a superseded step has reserved.
    """

    names: list[int]
    sequences: list[PageList]
    num_new: list[int]
    pages: list[list[int]]
    copies: list[PageCopy]
    superseded: list[Reservation]
    copies_take_reserved: bool

    def tables(self) -> list[list[int]]:
        """Returns all pages that each sequence will have once the step is reserved."""
        last = {id(copy.sequence): [copy.target] for copy in self.copies}
        held = [s.pages[:-1] + last[id(s)] if id(s) in last else s.pages for s in self.sequences]
        return [old + new for old, new in zip(held, self.pages, strict=True)]


class PagePool:
    """Tracks the sequences and the pages that they hold. A method that raises an error changes nothing."""

    def __init__(self, num_pages: int, page_size: int) -> None:
        self.num_pages, self.page_size = num_pages, page_size
        self.references = [0] * num_pages
        self.free_pages = list(range(num_pages - 1, -1, -1))  # a stack: the page that was freed last is taken first
        self.sequences: dict[int, PageList] = {}
        self._open: list[Reservation] = []
        self._next_name = 0

    def find(self, name: int, argument: str = "sequence") -> PageList:
        """Calls `settle`, and returns the sequence whose number is ``name``. Errors name ``argument``."""
        self.settle()
        check_int(argument, name)
        found = self.sequences.get(name)
        if found is None:
            known = f"one of {list(self.sequences)}" if self.sequences else "there are none now"
            freed = ", which was freed" if 0 <= name < self._next_name else ""
            raise InputError(
                f"{argument}: expected the number of a sequence, as add() returns it ({known}), got {name}{freed}"
            )
        return found

    def settle(self) -> None:
        """Counts the tokens that every layer has stored by now, and frees the pages of garbage-collected steps.

        Methods call it before they read pages or lengths. ``attend`` cannot call it, because it may be compiled.
        """
        for reservation in list(self._open):
            if all(reservation.stored):
                self._count(reservation)
            elif reservation.holder() is None:
                self._drop(reservation, "nobody held it any more")

    def add(self) -> int:
        return self._name(PageList())

    def fork(self, name: int, length: int | None) -> int:
        parent = self.find(name)
        length = self._checked_length(name, parent.length if length is None else length)
        self._end_step(parent, f"sequence {name} was forked")
        pages = parent.pages[: self._pages_for(length)]
        for page in pages:
            self.references[page] += 1
        return self._name(PageList(length, pages))

    def truncate(self, name: int, length: int) -> None:
        length, sequence = self._checked_length(name, length), self.find(name)
        self._end_step(sequence, f"sequence {name} was truncated")
        self._cut(sequence, length)

    def free(self, name: int) -> None:
        sequence = self.find(name)
        self._end_step(sequence, f"sequence {name} was freed")
        self._cut(sequence, 0)
        del self.sequences[name]

    def demand(self, names: Sequence[int], num_new: Sequence[int]) -> PageDemand:
        """Returns the pages for a step that appends ``num_new[i]`` tokens to sequence ``names[i]``.

        Raises CacheFull, InputError.
        """
        self.settle()
        sequences = [self.find(name, "sequences") for name in names]
        came = f"{list(names)}; fork() gives a copy a number of its own"
        expect(len(set(names)) == len(sequences), "sequences", "each sequence once", came)
        writers = [s for s, count in zip(sequences, num_new, strict=True) if count]
        to_copy = self._sharing_their_last_page(writers)
        additional = [self._pages_for(s.length + n) - len(s.pages) for s, n in zip(sequences, num_new, strict=True)]
        needed = len(to_copy) + sum(additional)

        latest = (s.latest for s in sequences if s.latest is not None and s.latest.is_open)
        superseded = list({id(reservation): reservation for reservation in latest}.values())
        reserved: list[int] = []
        for reservation in superseded:
            reserved[:0] = _pages_of(reservation)
        available = reserved + self.free_pages if superseded else self.free_pages
        if needed > len(available):
            raise CacheFull(
                f"PagedKVCache: this step needs {needed} more pages of {self.page_size} tokens, and {len(available)} "
                f"of {self.num_pages} are free; free or truncate a sequence, or make the cache with more num_pages"
            )
        taken = available[len(available) - needed :]
        # Copies take their pages first. So they get free pages, not reserved ones, if there are enough free pages.
        copies = [PageCopy(s, s.pages[-1], taken.pop()) for s in to_copy]
        pages = [[taken.pop() for _ in range(count)] for count in additional]
        copies_take_reserved = len(copies) > len(self.free_pages)
        return PageDemand(list(names), sequences, list(num_new), pages, copies, superseded, copies_take_reserved)

    def end_superseded(self, demand: PageDemand) -> None:
        """Ends the open steps that the step of ``demand`` replaces."""
        names = {id(s): name for s, name in zip(demand.sequences, demand.names, strict=True)}
        for reservation in demand.superseded:
            if reservation.is_open:
                again = next(names[id(s)] for s in reservation.sequences if id(s) in names)
                self._drop(reservation, f"sequence {again} has had another step")

    def reserve(self, demand: PageDemand, num_layers: int) -> Reservation:
        """Takes the pages of a demand, after its copies have been made."""
        self.end_superseded(demand)
        for name, sequence in zip(demand.names, demand.sequences, strict=True):
            self._end_step(sequence, f"sequence {name} has had another step")
        needed = len(demand.copies) + sum(map(len, demand.pages))
        del self.free_pages[len(self.free_pages) - needed :]  # exactly the pages that `demand` named
        for sequence, source, target in demand.copies:
            self.references[source] -= 1
            self.references[target] = 1
            sequence.pages[-1] = target
        reservation = Reservation(demand.sequences, demand.num_new, demand.pages, [False] * num_layers)
        for sequence in demand.sequences:
            sequence.latest = reservation
        self._open.append(reservation)
        return reservation

    def cancel(self, reservation: Reservation) -> None:
        """Frees the pages that a step has reserved, unless its tokens count already."""
        self.settle()
        if reservation.is_open:
            self._release(reservation, "it was cancelled")

    def _count(self, reservation: Reservation) -> None:
        self._close(reservation)
        for sequence, num_new, pages in zip(reservation.sequences, reservation.num_new, reservation.pages, strict=True):
            for page in pages:
                self.references[page] = 1
            sequence.pages += pages
            sequence.length += num_new

    def _drop(self, reservation: Reservation, reason: str) -> None:
        """Releases a step that nobody cancelled. Warns if some layers have stored its tokens, because these are
        lost."""
        missing = [layer for layer, is_stored in enumerate(reservation.stored) if not is_stored]
        self._release(reservation, reason)
        num_layers = len(reservation.stored)
        if len(missing) < num_layers:
            warn_at_users_line(
                f"PagedKVCache: the tokens of a step were dropped, because layers {missing} of num_layers={num_layers} "
                "never stored them. If the model has fewer layers, pass their number as num_layers. If an exception "
                "ended the step, call the step's cancel() to drop it without this warning.",
                RuntimeWarning,
            )

    def _release(self, reservation: Reservation, reason: str) -> None:
        self._close(reservation)
        reservation.refusal = reason
        # The pages go to the bottom of the stack, where `demand` expects the pages of a superseded step.
        self.free_pages[:0] = _pages_of(reservation)

    def _close(self, reservation: Reservation) -> None:
        reservation.is_open = False
        self._open = [other for other in self._open if other is not reservation]

    def _end_step(self, sequence: PageList, reason: str) -> None:
        """Ends the latest step of a sequence that is about to change, so that the step cannot write any more."""
        reservation = sequence.latest
        if reservation is None:
            return
        if reservation.is_open:
            self._release(reservation, reason)
        elif reservation.refusal is None:
            reservation.refusal = reason
        sequence.latest = None

    def _cut(self, sequence: PageList, length: int) -> None:
        kept = self._pages_for(length)
        for page in reversed(sequence.pages[kept:]):
            self.references[page] -= 1
            if self.references[page] == 0:
                self.free_pages.append(page)
        del sequence.pages[kept:]
        sequence.length = length

    def _checked_length(self, name: int, length: int) -> int:
        has = self.find(name).length
        check_int("length", length, minimum=0)
        expect(length <= has, "length", f"at most the {has} tokens of sequence {name}", length)
        return length

    def _name(self, sequence: PageList) -> int:
        name, self._next_name = self._next_name, self._next_name + 1
        self.sequences[name] = sequence
        return name

    def _pages_for(self, tokens: int) -> int:
        return -(-tokens // self.page_size)

    def _sharing_their_last_page(self, writers: list[PageList]) -> list[PageList]:
        """Returns the writers that must copy their last page, because it is shared and not full. If all sequences that
        share the page write, one of them keeps it."""
        leaving: dict[int, int] = {}
        copiers = []
        for sequence in writers:
            if sequence.length % self.page_size:
                page = sequence.pages[-1]
                if self.references[page] - leaving.get(page, 0) > 1:
                    leaving[page] = leaving.get(page, 0) + 1
                    copiers.append(sequence)
        return copiers


def _pages_of(reservation: Reservation) -> list[int]:
    return [page for pages in reservation.pages for page in pages]
