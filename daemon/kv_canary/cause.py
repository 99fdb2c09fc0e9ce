"""A guess at what happened to a page, from evidence only. Used by the canary thread.

Fingerprints alone are enough for a page of zeros, which has a known one, and for a misdirected copy, which has that of
the page it was copied from. The page's own bytes show rows of zeros and numbers that are none, and their fingerprint
can prove that one bit is all that changed (`fingerprint.algebra`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from kv_canary.evidence import look_at
from kv_canary.findings import Finding, Transfer
from kv_canary.fingerprint.spec import zero_fingerprint
from kv_canary.geometry import CanaryGroup
from kv_canary.ledger import LedgerRow
from kv_canary.verifier import Verifier

CauseKind = Literal[
    "transient",
    "transfer",
    "zero",
    "copy",
    "bit flip",
    "zero rows",
    "not finite",
    "late write",
    "writer",
    "unknown",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Cause:
    """A phrase for people; pages with causes of one kind may have been damaged by one event."""

    kind: CauseKind
    text: str


UNKNOWN = Cause(kind="unknown", text="unknown")


def guess_cause(
    finding: Finding,
    verifier: Verifier,
    row: LedgerRow,
    engine_step: int,
    *,
    others: Sequence[Verifier] = (),
    breathe: Callable[[], None] = lambda: None,
) -> Cause:
    """`unknown` when nothing speaks for anything. `others` are verifiers of groups that a copy may have come from."""
    if finding.persistence == "transient":
        return Cause(kind="transient", text="a reading that did not repeat: the bytes are right again")
    if finding.transfer is not None and (text := _of_transfer(finding.transfer)):
        return Cause(kind="transfer", text=text)
    stripes = verifier.group.stripes
    if all(found == zero_fingerprint(stripes[s]) for s, found in zip(finding.stripes, finding.found, strict=True)):
        return Cause(kind="zero", text="all zero")
    if (source := _copied_from(finding, verifier, others)) is not None:
        return Cause(kind="copy", text=f"now equals {source} (misdirected copy)")
    evidence = look_at(finding, verifier, breathe)
    if evidence.flip is not None:
        return Cause(kind="bit flip", text=str(evidence.flip))
    late = _late_write(finding, row, engine_step)
    # a page that was freed half full may hold zeros by right
    if evidence.zero_rows and not (finding.free and not row.identity):
        return Cause(kind="zero rows", text=_joined(f"zeros in {', '.join(evidence.zero_rows)}", late))
    if evidence.not_finite:
        return Cause(kind="not finite", text=_joined(f"holds NaN or Inf now: {', '.join(evidence.not_finite)}", late))
    if late:
        return Cause(kind="late write", text=late)
    if finding.persistence == "changing":
        return Cause(kind="writer", text="a writer is active")
    return UNKNOWN


def _of_transfer(transfer: Transfer) -> str:
    if transfer.nothing_arrived:
        return "nothing arrived: the page holds what it held before the load"
    if transfer.missing:
        return f"missing tensor: {', '.join(transfer.missing)}"
    return "" if transfer.parts else "the copy that was loaded is of other tokens"


def _copied_from(finding: Finding, verifier: Verifier, others: Sequence[Verifier]) -> str | None:
    """The page, of this group or of one with pages of the same shape, that holds what is found."""
    shape = _shape(verifier.group)
    for one in (verifier, *(other for other in others if other is not verifier and _shape(other.group) == shape)):
        sources: set[int] | None = None
        for stripe, found in zip(finding.stripes, finding.found, strict=True):
            pages = {int(page) for page in one.table.find(stripe, found)}
            sources = pages if sources is None else sources & pages
            if not sources:
                break
        sources = (sources or set()) - ({finding.page} if one is verifier else set())
        if sources:
            # one whose fingerprint still holds is the likelier source than one that was recycled since
            page = min(sources, key=lambda page: (not one.is_valid(page), page))
            return f"page {page} of group {one.group.name}"
    return None


def _shape(group: CanaryGroup) -> tuple[object, ...]:
    return group.kind, tuple(tuple(buffer.bytes_per_page for buffer in stripe.buffers) for stripe in group.stripes)


def _late_write(finding: Finding, row: LedgerRow, engine_step: int) -> str:
    if not finding.free:
        return ""
    steps = engine_step - row.changed_step
    last = f"; its last owner was {row.previous_owner}" if row.previous_owner else ""
    return f"written after it was freed {steps} step{'s' * (steps != 1)} before{last}"


def _joined(*parts: str) -> str:
    return "; ".join(part for part in parts if part)
