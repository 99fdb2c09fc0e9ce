"""The ledgers against a plain model, through any sequence of legal and illegal events.

The model is written from the event table of the design and the ledger's docstrings, with dicts and sets, one page at a
time; it shares nothing with `transitions.py`.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from builders.ledgers import Driver
from kv_canary.ledger import Reason, Work
from kv_canary.snapshot import PAGE_STATES

PAGES = 6
OWNERS = ("", "a", "b", "c")  # "" is an owner that the engine does not name


@dataclass
class Page:
    state: str = "unknown"
    generation: int = 0
    holders: int = 0
    owner: str = ""  # one of the holders, if one is known by name
    previous: str = ""
    identity: int = 0
    promised: int = 0  # the identity that a reader was told before the page was sealed
    in_flight: bool = False  # this step may write it, so its seal is pending

    def leave(self) -> None:
        self.previous = self.owner or self.previous
        self.owner = ""

    def open(self) -> None:
        self.state, self.identity, self.in_flight = "open", 0, True
        self.generation += 1


class Model:
    """What a careful reader of the protocol would write down."""

    def __init__(self) -> None:
        self.pages = [Page() for _ in range(PAGES)]
        self.wrong: set[tuple[Reason, int]] = set()
        self.claims = self.not_covered = 0

    def flag(self, reason: Reason, number: int, condition: bool = True) -> None:
        if condition:
            self.wrong.add((reason, number))

    def step(self) -> None:
        for page in self.pages:
            page.in_flight = False

    def allocate(self, numbers: list[int], owner: str) -> None:
        for number, times in Counter(numbers).items():
            page = self.pages[number]
            self.flag(Reason.CLAIMED_NEVER_SEALED, number, page.promised != 0)
            self.flag(Reason.TWO_OWNERS, number, page.holders + times > 1)
            page.leave()
            page.open()
            page.holders += times
            page.owner, page.promised = owner, 0

    def write(self, numbers: list[int], owner: str) -> None:
        for number in set(numbers):
            self.judge_writer(number, owner)
            self.pages[number].in_flight = True

    def judge_writer(self, number: int, owner: str) -> None:
        page = self.pages[number]
        self.flag(Reason.WRITE_TO_SEALED, number, page.state == "sealed")
        self.flag(Reason.WRITE_TO_FREE, number, page.state == "free")
        if page.state == "open":
            self.flag(Reason.WRITE_TO_FOREIGN, number, _differ(page.owner, owner))
            page.owner = page.owner or owner

    def load(self, numbers: list[int], owner: str) -> None:
        for number in set(numbers):
            self.judge_writer(number, owner)
            page = self.pages[number]
            page.state, page.identity, page.in_flight = "loading", 0, True
            page.generation += 1

    def held_now(self, numbers: list[int]) -> list[int]:
        """What leaves with an export: the identities of complete pages."""
        pages = (self.pages[number] for number in numbers)
        return [page.identity if page.state in ("sealed", "free") else 0 for page in pages]

    def seal(self, numbers: list[int], identity: int) -> None:
        for number in set(numbers):
            page = self.pages[number]
            if page.state == "free":
                self.flag(Reason.SEAL_OF_FREE, number)
            else:
                self.complete(number, identity)
            page.identity = identity

    def complete(self, number: int, identity: int) -> None:
        page = self.pages[number]
        self.flag(Reason.CLAIM_IDENTITY, number, _differ(page.promised, identity))
        page.promised, page.state, page.identity = 0, "sealed", identity

    def claim(self, numbers: list[int], identity: int, owner: str) -> None:
        self.claims += len(numbers)
        for number, times in Counter(numbers).items():
            page = self.pages[number]
            if page.state == "open" and page.in_flight:
                self.flag(Reason.CLAIM_IDENTITY, number, _differ(page.promised, identity))
                page.promised = page.promised or identity
            elif page.state == "open":
                self.flag(Reason.CLAIM_OF_OPEN, number)
            elif page.state == "free":
                self.flag(Reason.CLAIM_OF_FREE, number)
            elif page.state == "loading":
                self.flag(Reason.CLAIM_OF_LOADING, number)
            elif page.state == "unknown" or not (page.identity and identity):
                self.not_covered += times
            else:
                self.flag(Reason.CLAIM_IDENTITY, number, page.identity != identity)
            if not page.holders:
                page.owner = owner
            page.holders += times

    def reopen(self, numbers: list[int]) -> None:
        for number in set(numbers):
            self.flag(Reason.WRITE_TO_FREE, number, self.pages[number].state == "free")
            self.pages[number].open()

    def adopt(self, numbers: list[int], identity: int, owner: str, holders: int) -> None:
        for number in numbers:
            page = self.pages[number]
            page.state, page.identity, page.promised = "sealed", identity, 0
            page.owner, page.holders = owner, holders

    def release(self, numbers: list[int], owner: str) -> None:
        for number, times in Counter(numbers).items():
            page = self.pages[number]
            self.flag(Reason.RELEASE_WITHOUT_OWNER, number, page.holders < times and page.state != "unknown")
            page.holders = max(0, page.holders - times)
            if not page.holders or page.owner == owner:
                page.leave()

    def free(self, numbers: list[int]) -> None:
        for number, times in Counter(numbers).items():
            page = self.pages[number]
            self.flag(Reason.FREE_TWICE, number, page.state == "free" or times > 1)
            self.flag(Reason.FREE_WHILE_OWNED, number, page.holders > 0)
            self.flag(Reason.CLAIMED_NEVER_SEALED, number, page.promised != 0)
            page.leave()
            page.state, page.holders, page.promised = "free", 0, 0

    def move(self, source: int, target: int, owner: str) -> None:
        page, origin = self.pages[target], self.pages[source]
        another = bool(owner and page.owner) and owner != page.owner
        self.flag(Reason.MOVE_ONTO_USED, target, page.state in ("sealed", "free") or another)
        page.in_flight = True
        if origin.state == "sealed":
            self.complete(target, origin.identity)

    def forget(self, numbers: list[int]) -> None:
        for number in set(numbers):
            page = self.pages[number]
            self.pages[number] = Page(generation=page.generation + 1, previous=page.previous, in_flight=page.in_flight)

    def reset(self) -> None:
        self.pages = [Page(generation=page.generation + 1) for page in self.pages]


def _differ(left: int | str, right: int | str) -> bool:
    return bool(left and right) and left != right


pages = st.lists(st.integers(0, PAGES - 1), min_size=1, max_size=3)
distinct = st.lists(st.integers(0, PAGES - 1), min_size=1, max_size=3, unique=True)
page = st.integers(0, PAGES - 1)
owners = st.sampled_from(OWNERS)
identities = st.sampled_from([0, 70, -(2**63) + 1])


def _carried(work: Work) -> list[int] | None:
    return np.asarray(work.identities).tolist() if work.kind == "export" else None


def _handed_on(work: Work) -> list[int] | None:
    return work.source_generations.tolist() if work.kind == "move" else None


def _told(work: Work) -> int | None:
    return None if work.kind != "admit" or work.identities is None else int(np.asarray(work.identities).reshape(-1)[0])


class Ledgers(RuleBasedStateMachine):
    """Every event goes to the model and to all ledgers; then all must say the same."""

    kinds: tuple[str, ...] = ("host", "tensor")

    def __init__(self) -> None:
        super().__init__()
        self.model = Model()
        self.drivers = [Driver(kind, pages=PAGES) for kind in self.kinds]

    def do(self, event: str, *arguments: object) -> None:
        for driver in self.drivers:
            driver.do(event, *arguments)

    @rule()
    def step(self) -> None:
        self.model.step()
        self.do("step")

    @rule(numbers=pages, owner=owners)
    def allocate(self, numbers: list[int], owner: str) -> None:
        self.model.allocate(numbers, owner)
        self.do("allocate", numbers, owner)

    @rule(numbers=pages, owner=owners)
    def write(self, numbers: list[int], owner: str) -> None:
        self.model.write(numbers, owner)
        self.do("write", numbers, owner)

    @rule(numbers=pages, identity=identities)
    def seal(self, numbers: list[int], identity: int) -> None:
        self.model.seal(numbers, identity)
        self.do("seal", numbers, identity)

    @rule(numbers=pages, identity=identities, owner=owners, one_each=st.booleans())
    def claim(self, numbers: list[int], identity: int, owner: str, one_each: bool) -> None:
        self.model.claim(numbers, identity, owner)
        self.do("claim", numbers, [identity] * len(numbers) if one_each else identity, owner)

    @rule(numbers=pages)
    def reopen(self, numbers: list[int]) -> None:
        self.model.reopen(numbers)
        self.do("reopen", numbers)

    @rule(numbers=pages, owner=owners)
    def load(self, numbers: list[int], owner: str) -> None:
        self.model.load(numbers, owner)
        self.do("load", numbers, owner)

    @rule(sources=distinct, onto=distinct, told=identities, loads=st.booleans())
    def travels(self, sources: list[int], onto: list[int], told: int, loads: bool) -> None:
        """Pages leave for a tier; some of them, in another order, come back, loaded as they should be or not."""
        rows = [row % len(sources) for row in range(len(onto))][::-1]
        left = self.model.held_now(sources)
        manifests = [driver.ledger.export(driver.array(sources)).part(rows) for driver in self.drivers]
        if loads:
            self.load(onto, "")
        for row, number in zip(rows, onto, strict=True):
            self.model.seal([number], told or left[row])
        for driver, manifest in zip(self.drivers, manifests, strict=True):
            driver.ledger.admit(driver.array(onto), manifest, told)

    @rule(numbers=pages, identity=identities, owner=owners, holders=st.integers(0, 2))
    def adopt(self, numbers: list[int], identity: int, owner: str, holders: int) -> None:
        owner = owner if holders else ""
        self.model.adopt(numbers, identity, owner, holders)
        for driver in self.drivers:
            driver.do("adopt", numbers, identity, owner, owners=holders)

    @rule(numbers=pages, owner=owners)
    def release(self, numbers: list[int], owner: str) -> None:
        self.model.release(numbers, owner)
        self.do("release", numbers, owner)

    @rule(numbers=pages)
    def free(self, numbers: list[int]) -> None:
        self.model.free(numbers)
        self.do("free", numbers)

    @rule(source=page, onto=page, owner=owners)
    def move(self, source: int, onto: int, owner: str) -> None:
        self.model.move(source, onto, owner)
        self.do("move", [source], [onto], owner)

    @rule(numbers=pages)
    def forget(self, numbers: list[int]) -> None:
        self.model.forget(numbers)
        self.do("forget", numbers)

    @rule()
    def reset(self) -> None:
        self.model.reset()
        self.do("reset")

    # Whole turns of a request, so that long legal histories are common

    @rule(number=page, owner=st.sampled_from(OWNERS[1:]), identity=identities)
    def lives_legally(self, number: int, owner: str, identity: int) -> None:
        if self.model.pages[number].state == "free" and not self.model.pages[number].holders:
            self.allocate([number], owner)
            self.write([number], owner)
            self.step()
            self.seal([number], identity)
            assert not self.model.wrong

    @rule(number=page, owner=st.sampled_from(OWNERS[1:]), identity=identities, copied=st.booleans())
    def is_claimed_before_its_seal(self, number: int, owner: str, identity: int, copied: bool) -> None:
        if self.model.pages[number].state in ("free", "unknown") and not self.model.pages[number].holders:
            self.allocate([number], owner)
            self.claim([number], identity, "c", one_each=False)
            assert not self.model.wrong
            sources = [source for source, page in enumerate(self.model.pages) if page.state == "sealed"]
            if copied and sources:
                self.move(sources[0], number, owner)

    @rule(number=page)
    def ends_legally(self, number: int) -> None:
        page = self.model.pages[number]
        if page.state == "sealed":
            for _ in range(page.holders):
                self.release([number], page.owner)
            self.free([number])
            assert not self.model.wrong

    @invariant()
    def all_agree(self) -> None:
        expected = [
            (page.state, page.generation, page.holders, page.owner or None, page.previous or None, page.identity)
            for page in self.model.pages
        ]
        for driver in self.drivers:
            rows = [driver.row(number) for number in range(PAGES)]
            found = [
                (PAGE_STATES[row.state], row.generation, row.owners, row.owner, row.previous_owner, row.identity)
                for row in rows
            ]
            assert found == expected, driver.kind
            assert driver.states() == [row.state for row in rows]
            assert driver.generations() == [row.generation for row in rows]
            assert (driver.ledger.claims, driver.ledger.claims_not_covered) == (
                self.model.claims,
                self.model.not_covered,
            )
        first, *others = ([driver.row(number) for number in range(PAGES)] for driver in self.drivers)
        assert all(other == first for other in others)

    @invariant()
    def the_same_is_wrong(self) -> None:
        for driver in self.drivers:
            found = driver.violations()
            assert {(violation.reason, violation.page) for violation in found} <= self.model.wrong
            if driver.kind == "host":
                assert {(violation.reason, violation.page) for violation in found} == self.model.wrong
            else:  # reports one reason a page between two looks
                assert sorted(violation.page for violation in found) == sorted({n for _, n in self.model.wrong})
        self.model.wrong.clear()

    @invariant()
    def the_same_work_is_left(self) -> None:
        first, *others = (
            [
                (
                    work.kind,
                    work.pages.tolist(),
                    work.generations.tolist(),
                    _carried(work),
                    _told(work),
                    _handed_on(work),
                )
                for work in driver.work()
            ]
            for driver in self.drivers
        )
        assert all(other == first for other in others)


class KernelLedgers(Ledgers):
    """The same for the ledger whose events are kernels: fewer steps, because interpreting one takes milliseconds."""

    kinds = ("tensor", "kernel")


TestLedgers = Ledgers.TestCase
TestLedgers.settings = settings(max_examples=150, stateful_step_count=30, deadline=None)
TestKernelLedgers = KernelLedgers.TestCase
TestKernelLedgers.settings = settings(max_examples=15, stateful_step_count=20, deadline=None)
