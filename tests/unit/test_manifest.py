"""Manifests: filled once, cut in parts, sent as JSON and read again, refused when they are none."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kv_canary.errors import ManifestError
from kv_canary.ledger import CopyLayout, Manifest, PageCopy

LAYOUT = CopyLayout(group="full", signature="00ff00ff00ff00ff", stripes=("a..b",), buffers=("a", "b"))
u64 = st.integers(0, 2**64 - 1)
i64 = st.integers(-(2**63), 2**63 - 1)


def make_copy(**overrides: object) -> PageCopy:
    values = {"layout": LAYOUT, "generation": 3, "identity": -7, "stripes": (1,), "buffers": (2, 2**64 - 1)}
    return PageCopy(**values | overrides)  # type: ignore[arg-type]


def filled(*copies: PageCopy | None) -> Manifest:
    manifest = Manifest(len(copies))
    manifest.fill(copies)
    return manifest


def test_until_it_is_filled_it_says_so() -> None:
    manifest = Manifest(1)
    part = manifest.part([0])
    assert manifest.pending
    for ask in (lambda: manifest.copies, manifest.to_json, lambda: part.copies):
        with pytest.raises(ManifestError, match="not filled yet"):
            ask()
    manifest.fill((make_copy(),))
    assert not part.pending
    assert part.copies == (make_copy(),)


def test_filled_once_it_stays_as_it_is() -> None:
    manifest = filled(make_copy())
    manifest.fill((None,))
    manifest.abandon()
    assert manifest.copies == (make_copy(),)


def test_an_abandoned_one_knows_nothing_and_keeps_nobody_waiting() -> None:
    manifest = Manifest(2)
    manifest.abandon()
    assert manifest.copies == (None, None)
    assert Manifest.from_json(manifest.to_json()).copies == (None, None)


def test_parts_of_parts_are_pages_of_the_whole() -> None:
    manifest = filled(*(make_copy(identity=number) for number in range(5)))
    part = manifest.part([4, 2, 0]).part([0, 2])
    assert len(part) == 2
    assert [copy.identity for copy in part.copies if copy] == [4, 0]
    assert part.identities.tolist() == [4, 0]


def test_a_copy_that_holds_less_says_what_it_left_out() -> None:
    manifest = filled(make_copy(), None).without("b")
    again = Manifest.from_json(json.dumps(manifest.to_json()))
    for one in (manifest, manifest.part([0, 1]), again):
        assert [copy and copy.left_out for copy in one.copies] == [frozenset({"b"}), None]


@given(
    pages=st.lists(
        st.none()
        | st.builds(make_copy, identity=i64, generation=i64, stripes=st.tuples(u64), buffers=st.tuples(u64, u64)),
        max_size=4,
    )
)
def test_what_is_sent_is_what_arrives(pages: list[PageCopy | None]) -> None:
    manifest = filled(*pages)
    again = Manifest.from_json(json.dumps(manifest.to_json()))
    assert again.copies == tuple(pages)
    assert again.identities.tolist() == [0 if page is None else page.identity for page in pages]


def broken(**changes: object) -> dict[str, object]:
    document = filled(make_copy()).to_json()
    page = document["pages"][0] | changes
    return document | {"pages": [page]}


@pytest.mark.parametrize(
    "document",
    [
        "{",
        "[]",
        "3",
        b"\xff",
        {},
        {"version": 2, "layouts": {}, "pages": []},
        {"version": 1, "layouts": {}, "pages": [{"layout": "unheard of"}]},
        {"version": 1, "layouts": [], "pages": 3},
        broken(stripes=["1", "2"]),
        broken(buffers=["1"]),
        broken(stripes=["not a number"]),
        broken(stripes=["1" + "0" * 16]),
        broken(stripes=["-1"]),
        broken(identity="1" + "0" * 16),
        broken(generation=None),
    ],
)
def test_what_is_no_manifest_is_refused(document: object) -> None:
    with pytest.raises(ManifestError):
        Manifest.from_json(document)  # type: ignore[arg-type]
