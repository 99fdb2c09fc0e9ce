"""Transfers: pages that leave for a tier or a peer, and pages that come back. Used by the canary thread alone.

What leaves. A manifest is filled from the baseline: the fingerprints that were taken when the page was complete, for
the generation that it had at the export. The bytes need not be there any more by then; engines export a page because
they want to give it away at once. Pages that are still there are read again on the way out (by the worker), so that
damage is not carried off unnoticed.

What comes back. The page is read under the same rules as in every verification (`verifier`): only while it has the
generation that it was admitted with, looked at before and after, and a difference is read a second time. Right: what
was read becomes the baseline. Wrong: what left becomes the baseline, so that a wrong page is never blessed, and the
sweeps go on to see it. A page that cannot be compared (nothing was known of it when it left, or the two sides cut their
pages in different ways) is *skipped*: it becomes a page like any other that is complete, with what it holds now.

Evidence for a tensor that the copy did not bring costs nothing: the fingerprints of what the page held before are still
in the table, and a buffer that is wrong and equals them was not written at all.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, fields
from time import perf_counter
from typing import Any

import numpy as np
import numpy.typing as npt

from kv_canary.findings import Finding, Reading, Transfer
from kv_canary.fingerprint.table import NEVER, FingerprintArray, PageArray
from kv_canary.ledger import CopyLayout, PageCopy
from kv_canary.ledger.manifest import Copies
from kv_canary.snapshot import Persistence, StripeFinding
from kv_canary.verifier import Verifier

logger = logging.getLogger("kv_canary")

Mask = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Arrivals:
    """Pages that came back, and what is to be in them. One entry, or one row, a page.

    `stripes` and `buffers` are what left; a mask says where that is known. `left_out` marks buffers that the copy does
    not hold. What the pages were known to hold last, whenever that was, is `before`; zeros if nothing ever was.
    """

    pages: PageArray
    generations: PageArray
    told: PageArray
    compared: Mask
    identities: PageArray
    stripes: FingerprintArray
    stripes_known: Mask
    buffers: FingerprintArray
    buffers_known: Mask
    left_out: Mask
    before_stripes: FingerprintArray
    before_buffers: FingerprintArray

    def rows(self, chosen: npt.NDArray[Any]) -> _Arrivals:
        return _Arrivals(**{one.name: getattr(self, one.name)[chosen] for one in fields(self)})


class Transfers:
    """The copies of one group: `describe` those that leave, `judge` those that come back."""

    def __init__(self, verifier: Verifier, *, timer: Callable[[], float] = perf_counter) -> None:
        self._verifier = verifier
        self._timer = timer
        self._said: set[str] = set()
        group = verifier.group
        self._layout = CopyLayout(
            group=group.name,
            signature=group.layout_signature,
            stripes=tuple(stripe.name for stripe in group.stripes),
            buffers=tuple(buffer.name for buffer in group.buffers),
        )
        self._one_each = all(len(stripe.buffers) == 1 for stripe in group.stripes)
        self._stripe_of = [index for index, stripe in enumerate(group.stripes) for _ in stripe.buffers]

    # What leaves

    def describe(self, pages: PageArray, generations: PageArray, identities: PageArray) -> Copies:
        """What is known of pages that had these generations when they left; None where nothing is."""
        known = (generations != NEVER) & (self._verifier.kept_for(pages) == generations)
        kept = self._verifier.kept(pages)
        buffers = kept.stripes if self._one_each else kept.buffers
        return tuple(
            PageCopy(
                layout=self._layout,
                generation=int(generations[row]),
                identity=int(identities[row]),
                stripes=tuple(kept.stripes[row].tolist()),
                buffers=() if buffers is None else tuple(buffers[row].tolist()),
            )
            if known[row]
            else None
            for row in range(len(pages))
        )

    # What comes back

    def judge(self, pages: PageArray, generations: PageArray, copies: Copies, told: PageArray) -> list[Finding]:
        """Holds admitted pages against their copies. `told` are the identities that the engine gave, 0 for none."""
        verifier, watch = self._verifier, self._verifier.watch()
        rows = np.flatnonzero((generations != NEVER) & (verifier.ledger.generations(pages) == generations))
        verifier.counters.superseded += len(pages) - len(rows)
        rows = rows[np.unique(pages[rows], return_index=True)[1]]  # a page that is named twice is one page
        if watch is None or not len(rows) or not verifier.group.stripes:
            return []
        came = self._arrivals(pages[rows], generations[rows], tuple(copies[row] for row in rows), told[rows])
        found, stable = self._read(came, watch, "transfer")
        wrong = self._differs(came, found)
        other = (came.told != 0) & (came.identities != 0) & (came.told != came.identities)
        lacking = came.left_out.any(axis=1)
        keeps = stable & ~wrong  # the bytes are what left, or there is nothing to hold them against
        verifier.keep(came.pages[keeps], came.generations[keeps], found.rows(keeps))
        suspicious = stable & (wrong | other | lacking)
        transfers = verifier.counters.transfers
        transfers["verified"] += int((stable & came.compared & ~suspicious).sum())
        transfers["skipped"] += int((stable & ~came.compared).sum())
        verifier.counters.verified_pages += int((stable & came.compared).sum())
        if not suspicious.any():
            return []
        return self._confirm(came.rows(suspicious), found.rows(suspicious), watch)

    def _confirm(self, came: _Arrivals, first: Reading, watch: int) -> list[Finding]:
        second, stable = self._read(came, watch, "confirm")
        findings = []
        for row in np.flatnonzero(stable):
            early, late = self._wrong_parts(came, first, row), self._wrong_parts(came, second, row)
            persistence: Persistence = "persistent" if early == late else "changing" if late else "transient"
            parts, reading = (late, second) if late else (early, first)
            stripes = tuple(sorted({part.stripe for part in parts}))
            findings.append(
                Finding(
                    page=int(came.pages[row]),
                    generation=int(came.generations[row]),
                    free=False,
                    stripes=stripes,
                    expected=tuple(int(came.stripes[row, stripe]) for stripe in stripes),
                    found=tuple(int(reading.stripes[row, stripe]) for stripe in stripes),
                    persistence=persistence,
                    last_good=None,
                    transfer=self._verdict(came, reading, row, parts),
                )
            )
        held = stable & self._differs(came, first)
        self._hold_to_what_left(came.rows(held), second.rows(held))
        self._verifier.counters.transfers["mismatch"] += len(findings)
        return findings

    def _arrivals(self, pages: PageArray, generations: PageArray, copies: Copies, told: PageArray) -> _Arrivals:
        kept, names = self._verifier.kept(pages), self._layout.buffers
        count, stripes, buffers = len(pages), len(self._layout.stripes), len(names)
        came = _Arrivals(
            pages=pages,
            generations=generations,
            told=told,
            compared=np.zeros(count, np.bool_),
            identities=np.zeros(count, np.int64),
            stripes=np.zeros((count, stripes), np.uint64),
            stripes_known=np.zeros((count, stripes), np.bool_),
            buffers=np.zeros((count, buffers), np.uint64),
            buffers_known=np.zeros((count, buffers), np.bool_),
            left_out=np.zeros((count, buffers), np.bool_),
            before_stripes=kept.stripes,
            before_buffers=self._by_buffer(kept, count),
        )
        for row, copy in enumerate(copies):
            if copy is None or not self._is_comparable(copy):
                continue
            came.compared[row], came.identities[row] = True, copy.identity
            came.stripes[row], came.stripes_known[row] = copy.stripes, True
            if copy.buffers:
                came.buffers[row], came.buffers_known[row] = copy.buffers, self._one_each or kept.buffers is not None
            for index in (index for index, name in enumerate(names) if name in copy.left_out):
                came.left_out[row, index], came.buffers_known[row, index] = True, False
                came.stripes_known[row, self._stripe_of[index]] = False
        return came

    def _is_comparable(self, copy: PageCopy) -> bool:
        theirs, ours = copy.layout, self._layout
        if theirs.signature == ours.signature:
            return len(copy.stripes) == len(ours.stripes) and len(copy.buffers) in (0, len(ours.buffers))
        if theirs.signature not in self._said:
            self._said.add(theirs.signature)
            logger.warning(
                "group %s: pages that left group %s are not compared: the layout there is %s, here it is %s",
                *(ours.group, theirs.group, theirs.signature, ours.signature),
            )
        return False

    def _read(self, came: _Arrivals, watch: int, purpose: Any) -> tuple[Reading, Mask]:
        """What the pages hold, and of which that means something: no legitimate writer existed meanwhile."""
        verifier, started = self._verifier, self._timer()
        reading = verifier.read(came.pages)
        verifier.counters.read(purpose, len(came.pages) * verifier.group.bytes_per_page, self._timer() - started)
        stable: Mask = verifier.ledger.generations(came.pages) == came.generations
        if verifier.watch() != watch:
            stable[:] = False
        verifier.counters.superseded += int((~stable).sum())
        return reading, stable

    def _by_buffer(self, reading: Reading, count: int) -> FingerprintArray:
        """Fingerprints of each buffer; zeros where none are taken, and then no copy's are compared either."""
        if self._one_each:
            return reading.stripes
        return np.zeros((count, len(self._layout.buffers)), np.uint64) if reading.buffers is None else reading.buffers

    def _differs(self, came: _Arrivals, found: Reading) -> Mask:
        stripes = came.stripes_known & (found.stripes != came.stripes)
        buffers = came.buffers_known & (self._by_buffer(found, len(came.pages)) != came.buffers)
        differs: Mask = stripes.any(axis=1) | buffers.any(axis=1)
        return differs

    def _wrong_parts(self, came: _Arrivals, found: Reading, row: Any) -> tuple[StripeFinding, ...]:
        """The buffers that differ; stripes, where that is all that is known, or all that differed at that moment."""
        group, now = self._verifier.group, self._by_buffer(found, len(came.pages))[row]
        buffers = tuple(
            _part(self._stripe_of[index], group.buffers[index].name, (group.buffers[index].layer,), was, now[index])
            for index, was in enumerate(came.buffers[row])
            if came.buffers_known[row, index] and now[index] != was
        )
        return buffers or tuple(
            _part(index, group.stripes[index].name, group.stripes[index].layers, was, found.stripes[row, index])
            for index, was in enumerate(came.stripes[row])
            if came.stripes_known[row, index] and found.stripes[row, index] != was
        )

    def _verdict(self, came: _Arrivals, found: Reading, row: Any, parts: tuple[StripeFinding, ...]) -> Transfer:
        now, names = self._by_buffer(found, len(came.pages))[row], self._layout.buffers
        unwritten = [
            name
            for index, name in enumerate(names)
            if came.buffers_known[row, index]
            and now[index] != came.buffers[row, index]
            and now[index] == came.before_buffers[row, index]
        ]
        left_out = [name for index, name in enumerate(names) if came.left_out[row, index]]
        told, identity = int(came.told[row]), int(came.identities[row])
        return Transfer(
            parts=parts,
            missing=(*left_out, *unwritten),
            nothing_arrived=len(unwritten) == len(names),
            other_tokens=bool(told and identity and told != identity),
        )

    def _hold_to_what_left(self, came: _Arrivals, now: Reading) -> None:
        """What left is the baseline of a page that came back wrong; where that is not known, what is there."""
        if not len(came.pages):
            return
        buffers = None if now.buffers is None else np.where(came.buffers_known, came.buffers, now.buffers)
        stripes = np.where(came.stripes_known, came.stripes, now.stripes)
        self._verifier.keep(came.pages, came.generations, Reading(stripes=stripes, buffers=buffers))


def _part(stripe: int, name: str, layers: tuple[int, ...], expected: Any, found: Any) -> StripeFinding:
    return StripeFinding(
        stripe=stripe, name=name, layers=layers, expected=f"{int(expected):016x}", found=f"{int(found):016x}"
    )
