"""Pages that leave for a tier and come back: what is verified, what is wrong and named, what is skipped."""

from __future__ import annotations

import json
import logging
from typing import Any

import pytest
import torch

from builders.harness import ManualClock
from builders.tiers import Shop
from kv_canary.ledger import Manifest, Reason
from kv_canary.snapshot import Incident

PAGE = 3


def came_back(shop: Shop, page: int = PAGE, **options: Any) -> int:
    """A sealed page goes to the tier, is given up, and comes back into another page; returns that one."""
    shop.seal(page, identity=70)
    shop.offload(page)
    shop.free(page)
    return shop.restore(page, 7, **options)


def only(shop: Shop) -> Incident:
    (incident,) = shop.canary.snapshot.incidents
    return incident


def totals(shop: Shop) -> dict[str, int]:
    return dict(shop.counters.transfers)


def test_what_comes_back_as_it_left_is_verified_and_sealed() -> None:
    shop = Shop()
    page = came_back(shop)
    assert totals(shop) == {"verified": 1, "mismatch": 0, "skipped": 0}
    assert shop.canary.snapshot.incidents == ()
    row = shop.ledger.row(page)
    assert (row.identity, row.state) == (70, 2)
    assert shop.verifier.is_valid(page)
    shop.claim(page, identity=70)
    assert shop.settle().incidents == ()


@pytest.mark.parametrize("buffer", ["layer.0.kv", "layer.0.index", "layer.1.kv", "layer.1.index"])
def test_a_byte_that_changed_in_the_tier_is_a_transfer_that_names_its_buffer(buffer: str) -> None:
    shop = Shop()
    shop.seal(PAGE, identity=70)
    shop.offload(PAGE)
    shop.tier[PAGE][shop.place_of(buffer)] ^= 4
    page = shop.restore(PAGE, 7)
    incident = only(shop)
    assert (incident.check, incident.page, incident.persistence) == ("transfer", page, "persistent")
    assert [part.name for part in incident.stripes] == [buffer]
    assert incident.layers == (int(buffer.split(".")[1]),)
    assert "missing" not in incident.cause
    assert totals(shop) == {"verified": 0, "mismatch": 1, "skipped": 0}
    assert shop.counters.mismatches == {("transfer", "persistent", "real"): 1}


def test_a_wrong_page_is_reported_once_and_never_blessed() -> None:
    shop = Shop()
    shop.seal(PAGE, identity=70)
    shop.offload(PAGE)
    shop.tier[PAGE][0] ^= 4
    page = shop.restore(PAGE, 7)
    for _ in range(2):
        shop.sweep()
    assert shop.counters.mismatches == {("transfer", "persistent", "real"): 1}
    assert [finding.page for finding in shop.findings()] == [page]
    shop.memory[page, 0] ^= 4  # now it is what left: nothing to say any more
    assert shop.findings() == []


@pytest.mark.parametrize("missing", [["layer.1.index"], ["layer.0.index", "layer.1.index"], ["layer.0.kv"]])
def test_a_tensor_that_the_copy_did_not_bring_is_named(missing: list[str]) -> None:
    shop = Shop()
    shop.seal(7, identity=5)
    shop.free(7)
    came_back(shop, leave_out=missing)
    incident = only(shop)
    assert incident.check == "transfer"
    assert incident.cause == f"missing tensor: {', '.join(missing)}"
    assert [part.name for part in incident.stripes] == missing


def test_nothing_arrived() -> None:
    shop = Shop()
    shop.seal(7, identity=5)
    shop.free(7)
    came_back(shop, leave_out=list(shop.names))
    assert only(shop).cause == "nothing arrived: the page holds what it held before the load"


def test_without_a_fingerprint_from_before_nothing_is_called_missing() -> None:
    shop = Shop()
    came_back(shop, leave_out=["layer.0.kv"])
    assert only(shop).check == "transfer"
    assert "missing" not in only(shop).cause


def test_a_tensor_that_the_copy_does_not_hold_is_missing_whatever_the_bytes_say() -> None:
    shop = Shop()
    shop.seal(PAGE, identity=70)
    shop.offload(PAGE)
    shop.manifests[PAGE] = shop.manifests[PAGE].without("layer.1.index")
    shop.restore(PAGE, 7)
    assert only(shop).check == "transfer"
    assert only(shop).cause == "missing tensor: layer.1.index"


def test_a_copy_of_other_tokens_is_an_identity_mismatch() -> None:
    shop = Shop()
    came_back(shop, identity=71)
    assert (only(shop).check, only(shop).cause) == ("identity", "the copy that was loaded is of other tokens")


def test_a_copy_that_was_made_too_early_is_a_transfer() -> None:
    """The manifest says what the page was when it was complete; a copy from before that is another one."""
    shop = Shop()
    shop.seal(PAGE, identity=70)
    shop.offload(PAGE)
    shop.tier[PAGE] = torch.zeros_like(shop.tier[PAGE])
    came = shop.restore(PAGE, 7)
    assert (only(shop).check, only(shop).page, only(shop).cause) == ("transfer", came, "all zero")


def test_pages_that_are_given_away_before_anybody_looked_are_known_all_the_same() -> None:
    """An engine exports because it wants the page back: by the time of the canary's turn it may hold other tokens."""
    shop = Shop()
    shop.seal(PAGE, identity=70)
    manifest = shop.ledger.export([PAGE])
    shop.tier[PAGE] = shop.memory[PAGE].clone()
    shop.manifests[PAGE] = manifest
    shop.ledger.release([PAGE], "a")
    shop.ledger.free([PAGE])
    shop.ledger.allocate([PAGE], "b")
    shop.fill(PAGE)
    shop.ledger.seal([PAGE], 90)
    shop.settle()
    assert not manifest.pending
    shop.restore(PAGE, 7)
    assert totals(shop) == {"verified": 1, "mismatch": 0, "skipped": 0}


def test_a_page_that_was_never_complete_is_skipped_when_it_comes_back() -> None:
    shop = Shop()
    shop.ledger.allocate([PAGE], "a")
    shop.offload(PAGE)
    shop.memory[7] = 1
    page = shop.restore(PAGE, 7)
    assert totals(shop) == {"verified": 0, "mismatch": 0, "skipped": 1}
    assert shop.verifier.is_valid(page), "from here on it is a page like any other"
    assert shop.canary.snapshot.incidents == ()


def test_another_layout_is_skipped_and_said_once(caplog: pytest.LogCaptureFixture) -> None:
    shop, other = Shop(), Shop(names=("layer.0.kv", "layer.0.index", "layer.1.kv", "layer.1.scales"))
    other.seal(PAGE, identity=70)
    other.offload(PAGE)
    document = json.dumps(other.manifests[PAGE].to_json())
    with caplog.at_level(logging.WARNING, "kv_canary"):
        for target in (7, 8):
            shop.tier[PAGE], shop.manifests[PAGE] = other.tier[PAGE] ^ 1, Manifest.from_json(document)
            shop.restore(PAGE, target)
    assert totals(shop) == {"verified": 0, "mismatch": 0, "skipped": 2}
    assert shop.canary.snapshot.incidents == ()
    assert [record.message for record in caplog.records if "not compared" in record.message] == [
        f"group full: pages that left group full are not compared: the layout there is "
        f"{other.group.layout_signature}, here it is {shop.group.layout_signature}"
    ]


def test_another_packing_of_as_many_bytes_under_the_same_signature_is_seen_in_the_bytes() -> None:
    shop = Shop()
    shop.seal(PAGE, identity=70)
    shop.offload(PAGE)
    shop.tier[PAGE] = shop.tier[PAGE].reshape(2, -1).t().reshape(-1).contiguous()
    shop.restore(PAGE, 7)
    assert only(shop).check == "transfer"


def test_a_manifest_travels_to_another_process() -> None:
    shop, peer = Shop(), Shop(seed=1)
    shop.seal(PAGE, identity=70)
    shop.offload(PAGE)
    for byte, result in ((0, "verified"), (1, "mismatch")):
        peer.tier[PAGE] = shop.tier[PAGE].clone()
        peer.tier[PAGE][9] ^= byte
        peer.manifests[PAGE] = Manifest.from_json(json.dumps(shop.manifests[PAGE].to_json()))
        peer.restore(PAGE, 7 + byte)
        assert totals(peer)[result] == 1
    assert peer.ledger.row(7).identity == 70


def test_an_admit_waits_for_a_manifest_that_is_not_filled_yet_and_holds_up_nothing() -> None:
    shop = Shop()
    shop.seal(PAGE, identity=70)
    shop.offload(PAGE)
    (copy,) = shop.manifests[PAGE].copies
    late = shop.manifests[PAGE] = Manifest(1)
    page = shop.restore(PAGE, 7)
    shop.seal(5, identity=50)
    assert not shop.verifier.is_valid(page)
    assert shop.verifier.is_valid(5)
    late.fill((copy,))
    shop.settle()
    assert totals(shop)["verified"] == 1
    assert shop.verifier.is_valid(page)


def test_a_manifest_that_is_never_filled_is_not_waited_for_for_ever() -> None:
    shop = Shop()
    shop.seal(PAGE, identity=70)
    shop.offload(PAGE)
    shop.manifests[PAGE] = Manifest(1)
    page = shop.restore(PAGE, 7)
    shop.clock.now += 11
    shop.settle()
    assert totals(shop) == {"verified": 0, "mismatch": 0, "skipped": 1}
    assert shop.verifier.is_valid(page)


def test_a_page_that_moves_on_before_it_was_held_against_its_copy_says_nothing() -> None:
    shop = Shop()
    shop.seal(PAGE, identity=70)
    shop.offload(PAGE)
    shop.tier[PAGE][0] ^= 1
    shop.restore(PAGE, 7, settled=False)
    shop.ledger.reopen([7])
    assert shop.settle().incidents == ()
    assert sum(totals(shop).values()) == 0
    assert shop.counters.superseded == 1


class ReopensAfter:
    """Reads like the table, and has the engine reopen a page after the n-th reading."""

    def __init__(self, shop: Shop, page: int, reading: int) -> None:
        self._table, self._shop, self._page, self._left = shop.verifier.table, shop, page, reading
        shop.verifier.table = self  # type: ignore[assignment]

    def read(self, pages: Any) -> Any:
        found = self._table.read(pages)
        self._left -= 1
        if not self._left:
            self._shop.ledger.reopen([self._page])
        return found

    def __getattr__(self, name: str) -> Any:
        return getattr(self._table, name)


@pytest.mark.parametrize("reading", [1, 2])
@pytest.mark.parametrize("spoiled", [True, False])
def test_a_page_that_moves_on_while_it_is_read_says_nothing(reading: int, spoiled: bool) -> None:
    shop = Shop()
    shop.seal(PAGE, identity=70)
    shop.offload(PAGE)
    shop.tier[PAGE][0] ^= spoiled
    ReopensAfter(shop, 7, reading)
    shop.restore(PAGE, 7)
    assert shop.settle().incidents == ()
    moved_on = spoiled or reading == 1  # what is right is read once
    assert totals(shop)["verified"] == (not moved_on)
    assert totals(shop)["mismatch"] == 0
    assert shop.counters.superseded == moved_on
    assert not shop.verifier.is_valid(7) or not moved_on


@pytest.mark.parametrize("between", ["stripes", "buffers"])
def test_a_page_that_is_right_at_the_second_reading_is_transient(between: str) -> None:
    """The copy was not through when the fence said so."""
    shop = Shop()
    shop.seal(PAGE, identity=70)
    shop.offload(PAGE)
    shop.tier[PAGE][0] ^= 1
    table = shop.verifier.table if between == "stripes" else shop.verifier.buffers
    assert table is not None
    read = table.read

    def read_and_let_it_arrive(pages: Any) -> Any:
        found = read(pages)
        shop.memory[7, 0] = shop.memory[PAGE, 0]
        return found

    table.read = read_and_let_it_arrive  # type: ignore[method-assign]
    shop.restore(PAGE, 7)
    assert (only(shop).check, only(shop).persistence) == ("transfer", "transient")
    assert "right again" in only(shop).cause


def test_a_copy_on_write_carries_the_fingerprints_of_its_buffers_along() -> None:
    shop = Shop()
    shop.seal(PAGE, identity=70)
    shop.seal(5, identity=50)
    shop.free(5)
    shop.ledger.allocate([5], "c")
    shop.memory[5] = shop.memory[PAGE]
    shop.ledger.move([PAGE], [5], "c")
    shop.settle()
    shop.offload(5)
    shop.restore(5, 7)
    assert totals(shop) == {"verified": 1, "mismatch": 0, "skipped": 0}


def test_an_admit_waits_for_the_copy() -> None:
    """Before the fence is there the bytes are those from before."""

    class Fence:
        there = False

        def ready(self) -> bool:
            return self.there

    shop, fence = Shop(), Fence()
    shop.seal(PAGE, identity=70)
    shop.offload(PAGE)
    shop.ledger.allocate([7], "b")
    shop.ledger.load([7], "b")
    shop.ledger.admit([7], shop.manifests[PAGE], fence=fence)
    shop.settle()
    assert sum(totals(shop).values()) == 0
    shop.memory[7] = shop.tier[PAGE]
    fence.there = True
    shop.settle()
    assert totals(shop)["verified"] == 1


def test_a_copy_of_an_open_page_is_not_fingerprinted_before_its_own_seal() -> None:
    """The seal has been told, the step that completes the page has not run: the copy's fence says nothing of that."""

    class Fence:
        there = False

        def ready(self) -> bool:
            return self.there

    shop, fence = Shop(), Fence()
    shop.ledger.allocate([1, 2], "a")
    shop.ledger.move([1], [2], "a")
    shop.ledger.seal([2], 70, fence=fence)
    shop.settle()
    assert not shop.verifier.is_valid(2)
    shop.fill(2)
    fence.there = True
    shop.settle()
    assert shop.verifier.is_valid(2)
    assert shop.findings() == []


def test_damage_is_found_on_the_way_out_and_the_manifest_says_what_was_right() -> None:
    shop = Shop()
    shop.seal(PAGE, identity=70)
    shop.memory[PAGE, 0] ^= 1
    shop.offload(PAGE)
    incident = only(shop)
    assert (incident.check, incident.page) == ("content", PAGE)
    shop.restore(PAGE, 7)
    assert [one.check for one in shop.canary.snapshot.incidents] == ["content", "transfer"]
    assert shop.counters.read_bytes["transfer"] > 0


def test_a_claim_while_the_copy_is_under_way_is_caught() -> None:
    shop = Shop()
    shop.ledger.allocate([7], "b")
    shop.ledger.load([7], "b")
    shop.claim(7, identity=70)
    shop.settle()
    assert only(shop).cause == Reason.CLAIM_OF_LOADING.name.lower().replace("_", " ")
    assert only(shop).check == "transfer"


def test_a_group_that_does_not_travel_names_stripes() -> None:
    shop = Shop(travels=False)
    assert shop.verifier.buffers is None
    shop.seal(PAGE, identity=70)
    shop.offload(PAGE)
    shop.tier[PAGE][shop.place_of("layer.1.index")] ^= 1
    shop.restore(PAGE, 7)
    assert [part.name for part in only(shop).stripes] == [shop.group.stripes[0].name]


def test_settled_means_that_nothing_is_left_however_long_it_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A slice of time is up in the middle of what has to be done in order: there is more to do."""

    class Hurried(ManualClock):
        def monotonic(self) -> float:
            self.now += 0.004
            return self.now

    shop = Shop(clock=Hurried())
    monkeypatch.setattr("kv_canary.worker.SpaceWorker._pages_a_launch", lambda self: 1)
    manifests = []
    for page in range(1, 13, 2):
        shop.ledger.allocate([page, page + 1], "a")
        shop.ledger.seal([page, page + 1], page)
        manifests.append(shop.ledger.export([page, page + 1]))
    shop.settle()
    assert not any(manifest.pending for manifest in manifests)
    assert all(shop.verifier.is_valid(page) for page in range(1, 13))


def test_while_nothing_is_read_exports_and_admits_wait() -> None:
    shop = Shop()
    shop.seal(PAGE, identity=70)
    assert shop.canary.suspension.suspend("sleep", 1.0)
    manifest = shop.ledger.export([PAGE])
    shop.settle()
    assert manifest.pending
    shop.canary.suspension.resume("sleep")
    shop.settle()
    assert not manifest.pending


def test_pages_that_were_judged_before_reading_was_suspended_are_not_judged_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One page a launch; the engine takes its memory away after the first of three."""
    shop = Shop()
    monkeypatch.setattr("kv_canary.worker.SpaceWorker._pages_a_launch", lambda self: 1)
    for page in (1, 2, 3):
        shop.seal(page, identity=page)
    manifest = shop.ledger.export([1, 2, 3])
    shop.settle()
    shop.ledger.allocate([7, 8, 9], "b")
    shop.ledger.load([7, 8, 9], "b")
    shop.memory[7:10] = shop.memory[1:4]
    shop.memory[7, 3] ^= 1
    shop.memory[9, 3] ^= 1
    judge, judged = shop.canary._guards[0].transfers.judge, []

    def judge_and_suspend(pages: Any, *rest: Any) -> Any:
        judged.extend(pages.tolist())
        if judged == [7]:
            shop.canary.suspension._reasons.add("capture")  # as another thread would; here it would wait for us
        return judge(pages, *rest)

    shop.canary._guards[0].transfers.judge = judge_and_suspend  # type: ignore[method-assign]
    shop.ledger.admit([7, 8, 9], manifest, [1, 2, 3])
    shop.settle()
    assert judged == [7]
    shop.canary.suspension.resume("capture")
    shop.settle()
    assert judged == [7, 8, 9]
    assert totals(shop) == {"verified": 1, "mismatch": 2, "skipped": 0}


def test_more_identities_than_pages_are_none() -> None:
    shop = Shop()
    shop.seal(PAGE, identity=70)
    shop.offload(PAGE)
    shop.ledger.allocate([7], "b")
    shop.memory[7] = shop.tier[PAGE]
    shop.ledger.admit([7], shop.manifests[PAGE], [1, 2, 3])
    assert shop.settle().errors == {}
    assert totals(shop)["verified"] == 1


def test_while_its_group_is_off_a_manifest_says_nothing_and_keeps_nobody_waiting() -> None:
    from kv_canary.commands import SetGroupEnabled

    shop = Shop()
    shop.seal(PAGE, identity=70)
    shop.canary.obey(SetGroupEnabled(group="full", enabled=False))
    manifest = shop.ledger.export([PAGE])
    shop.settle()
    assert manifest.copies == (None,)
