"""Manifests: what pages held when they left for a tier or a peer, to be held against what comes back.

A tier keeps the manifest beside its copy. The engine's thread makes it, empty, at the `export`; the canary thread fills
it once, by one assignment, when the work of that event is done; from then on it never changes, and anybody may read it
or send it somewhere as JSON. Whoever looks before sees that it is `pending`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from kv_canary.errors import ManifestError

VERSION = 1

_MASK = (1 << 64) - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyLayout:
    """How the exporting group cut its pages; fingerprints mean nothing to a group with another `signature`."""

    group: str
    signature: str
    stripes: tuple[str, ...]
    buffers: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PageCopy:
    """One page as it was: unsigned fingerprints of each stripe, and of each buffer where those were taken (else empty).

    `left_out` names buffers that the copy does not hold.
    """

    layout: CopyLayout
    generation: int
    identity: int
    stripes: tuple[int, ...]
    buffers: tuple[int, ...] = ()
    left_out: frozenset[str] = frozenset()


Copies = tuple[PageCopy | None, ...]
"""One entry a page; None is a page of which nothing was known when it left."""


class _Sheet:
    """What all parts of one manifest share. `copies` is written once, by the canary thread of the exporting ledger."""

    __slots__ = ("copies", "identities")

    def __init__(self) -> None:
        self.copies: Copies | None = None
        self.identities: Any = None  # int64 [pages], where the exporting ledger's page numbers live; None: not known


class Manifest:
    """What `export` gives and `admit` takes: one entry for each exported page, in the order of the call."""

    __slots__ = ("_left_out", "_rows", "_sheet")

    def __init__(self, pages: int) -> None:
        self._sheet = _Sheet()
        self._rows: Sequence[int] = range(pages)
        self._left_out: frozenset[str] = frozenset()

    def __len__(self) -> int:
        return len(self._rows)

    # Any thread

    @property
    def pending(self) -> bool:
        """The canary thread has not come round to it yet."""
        return self._sheet.copies is None

    @property
    def copies(self) -> Copies:
        """Raises `ManifestError` while it is pending."""
        copies = self._sheet.copies
        if copies is None:
            raise ManifestError(
                "the manifest is not filled yet: ask `pending` first, the canary takes some milliseconds"
            )
        taken = (copies[row] for row in self._rows)
        if not self._left_out:
            return tuple(taken)
        return tuple(copy and replace(copy, left_out=copy.left_out | self._left_out) for copy in taken)

    def part(self, rows: Iterable[int]) -> Manifest:
        """The manifest of some of its pages, pending or not: a tier keeps pages one by one and loads them anyhow."""
        part = Manifest(0)
        part._sheet, part._left_out = self._sheet, self._left_out
        part._rows = [self._rows[row] for row in rows]
        return part

    def without(self, *buffers: str) -> Manifest:
        """The manifest of a copy that does not hold these buffers."""
        part = self.part(range(len(self)))
        part._left_out = self._left_out | frozenset(buffers)
        return part

    def to_json(self) -> dict[str, Any]:
        """A document that `from_json` takes, in this process or another. Raises `ManifestError` while it is pending."""
        copies = self.copies
        layouts = {copy.layout.signature: copy.layout for copy in copies if copy is not None}
        return {
            "version": VERSION,
            "layouts": {
                signature: {"group": layout.group, "stripes": list(layout.stripes), "buffers": list(layout.buffers)}
                for signature, layout in layouts.items()
            },
            "pages": [None if copy is None else _page_json(copy) for copy in copies],
        }

    @classmethod
    def from_json(cls, document: Mapping[str, Any] | str | bytes) -> Manifest:
        """Raises `ManifestError` for what is no such document. What it says is what a peer claims, no more."""
        try:
            given = json.loads(document) if isinstance(document, str | bytes) else document
            if given["version"] != VERSION:
                raise ManifestError(f"a manifest of version {given['version']!r}; this KV Canary reads {VERSION}")
            layouts = {
                str(signature): CopyLayout(
                    group=str(layout["group"]),
                    signature=str(signature),
                    stripes=tuple(map(str, layout["stripes"])),
                    buffers=tuple(map(str, layout["buffers"])),
                )
                for signature, layout in given["layouts"].items()
            }
            copies = tuple(None if page is None else _page_from(page, layouts) for page in given["pages"])
        except ManifestError:
            raise
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
            raise ManifestError(f"not a manifest ({type(error).__name__}: {error}); make one with to_json()") from error
        manifest = cls(len(copies))
        manifest.fill(copies)
        return manifest

    # The exporting ledger, and its canary thread

    @property
    def identities(self) -> Any:
        """What the pages held, int64, as soon as the ledger knows it: an array, a tensor, or None."""
        identities = self._sheet.identities
        if identities is None or isinstance(self._rows, range):
            return identities
        return identities[list(self._rows)]

    def identify(self, identities: Any) -> None:
        """Before it is filled: what the pages hold, in event order."""
        self._sheet.identities = identities

    def fill(self, copies: Copies) -> None:
        """Once: what was known of the pages when they left. A manifest that is filled stays as it is."""
        if self._sheet.copies is None:
            held: npt.NDArray[np.int64] = np.array(
                [0 if copy is None else copy.identity for copy in copies], np.int64
            ).reshape(-1)
            self._sheet.identities = held
            self._sheet.copies = copies

    def abandon(self) -> None:
        """Nobody will fill it any more: nothing is known of its pages, and nobody waits for it."""
        self.fill((None,) * len(self))


def _page_json(copy: PageCopy) -> dict[str, Any]:
    page: dict[str, Any] = {
        "layout": copy.layout.signature,
        "generation": copy.generation,
        "identity": _hexadecimal(copy.identity),
        "stripes": [_hexadecimal(one) for one in copy.stripes],
        "buffers": [_hexadecimal(one) for one in copy.buffers],
    }
    return page | ({"left_out": sorted(copy.left_out)} if copy.left_out else {})


def _page_from(page: Mapping[str, Any], layouts: Mapping[str, CopyLayout]) -> PageCopy:
    layout = layouts[page["layout"]]
    identity = int(page["identity"], 16)
    copy = PageCopy(
        layout=layout,
        generation=int(page["generation"]),
        identity=identity - (1 << 64) if identity >> 63 else identity,
        stripes=tuple(int(one, 16) for one in page["stripes"]),
        buffers=tuple(int(one, 16) for one in page["buffers"]),
        left_out=frozenset(map(str, page.get("left_out", ()))),
    )
    if len(copy.stripes) != len(layout.stripes) or len(copy.buffers) not in (0, len(layout.buffers)):
        raise ManifestError(
            f"a page has not as many fingerprints as its layout {layout.signature} has stripes, buffers"
        )
    if not all(0 <= one <= _MASK for one in (identity, *copy.stripes, *copy.buffers)):
        raise ManifestError("a fingerprint or an identity is not of 64 bits")
    return copy


def _hexadecimal(value: int) -> str:
    return f"{value & _MASK:016x}"
