"""Every event as one kernel, bit for bit against the reference in torch operations: columns, flags and work.

Where there is no GPU the kernel is interpreted. A block holds fewer places than a call has, so a page that occurs twice
is met in one block and in two.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from builders.ledgers import DEVICE
from kv_canary.ledger import SEALED, Reason, TensorLedger

PAGES = 8
EVENTS = (
    *("allocate", "write", "seal", "claim", "reopen", "load", "adopt", "release", "free", "move", "hold", "forget"),
    *("export", "admit", "step"),
)
ONE_EACH = {"allocate": 1, "write": 1, "seal": 1, "claim": 2, "load": 1, "adopt": 2, "release": 1, "move": 1, "hold": 1}

Event = tuple[str, list[Any], dict[str, Any]]


def pair(**options: int) -> tuple[TensorLedger, TensorLedger]:
    """The reference, on the CPU, and the kernel."""
    reference = TensorLedger("full", PAGES, torch.device("cpu"), kernels=False)
    return reference, TensorLedger("full", PAGES, DEVICE, kernels=True, **{"block": 4, **options})


def do(ledger: TensorLedger, event: Event) -> None:
    name, arguments, options = event
    place = lambda value: torch.tensor(value, device=ledger.device) if isinstance(value, list) else value  # noqa: E731
    if name == "admit":  # of what left the same pages a moment before
        arguments = [arguments[0], ledger.export(place(arguments[0]))]
    getattr(ledger, name)(*map(place, arguments), **{key: place(value) for key, value in options.items()})


def everything(ledger: TensorLedger) -> dict[str, list[int]]:
    """All that is held of the pages, but for the marks, which mean nothing between two calls."""
    table = ledger._table
    columns = {
        name: getattr(table, name)
        for name in (
            "state",
            "generation",
            "owners",
            "owner",
            "previous_owner",
            "identity",
            "claim_identity",
            "written_step",
            "changed_step",
            "claims_not_covered",
        )
    }
    flags = {"counted": ledger._violations, "reason": ledger._reason[:PAGES]}
    if DEVICE.type == "cpu":  # on a device it is open which of several culprits stays
        flags["culprit"] = ledger._culprit[:PAGES]
    return {name: column.tolist() for name, column in {**columns, **flags}.items()}


def work(ledger: TensorLedger) -> list[tuple[Any, ...]]:
    if ledger.device.type == "cuda":
        torch.cuda.synchronize(ledger.device)
    taken = []
    while (one := ledger.take_work()) is not None:
        sources = [] if one.sources is None else [one.sources.tolist(), one.source_generations.tolist()]
        left = [] if one.kind != "export" else [torch.as_tensor(one.manifest.identities).tolist()]
        taken.append((one.kind, one.pages.tolist(), one.generations.tolist(), *sources, *left))
    return taken


@st.composite
def events(draw: st.DrawFn) -> Event:
    name = draw(st.sampled_from(EVENTS))
    if name == "step":
        return name, [], {}
    count = draw(st.integers(1, 7))
    pages = st.lists(st.integers(0, PAGES - 1), min_size=count, max_size=count)
    arguments: list[Any] = [draw(pages) for _ in range(2 if name == "move" else 1)]
    values = st.sampled_from([0, 1, 2, 2**62, -(2**63) + 1])
    for _ in range(ONE_EACH.get(name, 0)):
        arguments.append(draw(values | st.lists(values, min_size=count, max_size=count)))
    options = {}
    if name == "adopt":
        holders = st.integers(0, 2)
        options["owners"] = draw(holders | st.lists(holders, min_size=count, max_size=count))
    return name, arguments, options


@settings(max_examples=40, deadline=None)
@given(history=st.lists(events(), min_size=1, max_size=12))
def test_every_history_leaves_the_same_bits(history: list[Event]) -> None:
    reference, kernel = pair()
    for event in history:
        for ledger in (reference, kernel):
            do(ledger, event)
        assert everything(kernel) == everything(reference), event
    assert work(kernel) == work(reference)


@pytest.mark.parametrize("name", [name for name in EVENTS if name != "step"])
def test_a_call_with_one_page_many_times_is_one_event_for_it(name: str) -> None:
    """Ten places in blocks of four: its generation is raised once, its owners are counted ten times."""
    reference, kernel = pair()
    pages = [1, 2, 1, 1, 3, 1, 2, 1, 1, 1]
    arguments: list[Any] = [pages] * (2 if name == "move" else 1) + [list(range(10))] * ONE_EACH.get(name, 0)
    before: list[Event] = [("adopt", [[1, 2], 5, 7], {}), ("free", [[3]], {}), ("allocate", [[4], 9], {})]
    for event in (*before, (name, arguments, {})):
        for ledger in (reference, kernel):
            do(ledger, event)
    assert everything(kernel) == everything(reference)
    assert work(kernel) == work(reference)


def test_a_move_reads_its_sources_before_it_writes_its_targets() -> None:
    """1 -> 2 -> 3 -> 4 -> 5 -> 6 in one call, in more than one block: every page gets what its source had before."""
    reference, kernel = pair()
    for event in (
        ("adopt", [[1, 2, 4, 5], [10, 20, 40, 50], 0], {}),
        ("move", [[1, 2, 3, 4, 5], [2, 3, 4, 5, 6], 0], {}),
    ):
        for ledger in (reference, kernel):
            do(ledger, event)
    assert everything(kernel) == everything(reference)
    assert kernel._table.identity.tolist() == [0, 10, 10, 20, 40, 40, 50, 0]


def test_a_large_call_is_left_to_the_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    def launched(*_: object) -> None:
        raise AssertionError("a kernel was launched")

    reference, kernel = pair(large=3)
    monkeypatch.setattr(kernel._table, "_run", launched)
    pages = torch.tensor([1, 2, 3, 4], device=DEVICE)
    for ledger in (reference, kernel):
        ledger.allocate(pages.to(ledger.device), 7)
    kernel.seal(pages, 9)
    reference.seal([1, 2, 3, 4], 9)
    pages[:] = 5
    assert everything(kernel) == everything(reference)
    assert work(kernel) == work(reference)


def test_numbers_that_are_no_page_are_left_out() -> None:
    """Padding of a page table: a kernel cannot refuse it, and must not follow it."""
    _, kernel = pair()
    before = everything(kernel)
    for event in (
        ("allocate", [[-1, PAGES, 2**40], 7], {}),
        ("move", [[-1], [1], 0], {}),
        ("move", [[1], [PAGES], 0], {}),
    ):
        do(kernel, event)
    after = everything(kernel)
    after["changed_step"][1] = 0  # the target of a move from nowhere: nothing travelled
    assert after == before
    do(kernel, ("seal", [[-1, 3, PAGES], 9], {}))
    ((_, generations),) = kernel._table.left(None)
    assert generations.tolist() == [-1, 0, -1]
    assert [state for state in everything(kernel)["state"] if state] == [SEALED]
    assert [one[1:3] for one in work(kernel)] == [([], []), ([], []), ([3], [0])]


def test_a_number_of_values_that_fits_no_page_is_refused() -> None:
    _, kernel = pair()
    with pytest.raises(ValueError, match="2 values for 3 pages"):
        do(kernel, ("allocate", [[1, 2, 3], [7, 8]], {}))


def test_of_two_reasons_of_a_move_the_second_stays_wherever_the_page_occurs() -> None:
    """Six places in blocks of four: all of them move onto a page in use, the first brings another identity as well."""
    reference, kernel = pair()
    for event in (
        ("adopt", [[1], 70, 0], {}),
        ("allocate", [[2], 5], {}),
        ("claim", [[2], 71, 6], {}),
        ("move", [[1, 3, 3, 3, 3, 3], [2] * 6, 9], {}),
    ):
        for ledger in (reference, kernel):
            do(ledger, event)
    assert everything(kernel) == everything(reference)
    assert [violation.reason for violation in kernel.take_violations()] == [Reason.CLAIM_IDENTITY]


@pytest.mark.parametrize("name", ["write", "load"])
@pytest.mark.parametrize("owners", [[5, 6, 7, 0, 8], [5, 6, 0, 7, 0], [0, 0, 0, 0, 0]])
def test_of_several_first_writers_of_a_nameless_page_the_last_place_names_it(name: str, owners: list[int]) -> None:
    """Five places in blocks of four; none of them is a stranger, for nobody was named before this call."""
    reference, kernel = pair()
    for event in (("allocate", [[1, 2], 0], {}), (name, [[1, 2, 1, 2, 1], owners], {})):
        for ledger in (reference, kernel):
            do(ledger, event)
    assert everything(kernel) == everything(reference)
    assert kernel._table.owner.tolist()[1:3] == [owners[4], owners[3]]
    assert kernel.take_violations() == []
