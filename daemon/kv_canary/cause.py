"""A guess at what happened to a page, from evidence only. Used by the canary thread."""

from __future__ import annotations

from kv_canary.fingerprint.spec import zero_fingerprint
from kv_canary.ledger import LedgerRow
from kv_canary.verifier import Finding, Verifier


def guess_cause(finding: Finding, verifier: Verifier, row: LedgerRow, engine_step: int) -> str:
    """One phrase; `unknown` when nothing speaks for anything.

    Fingerprints are enough for two common causes: a page of zeros has a known one, and a misdirected copy has the one
    of the page it was copied from.
    """
    if finding.persistence == "transient":
        return "a reading that did not repeat: the bytes are right again"
    stripes = verifier.group.stripes
    if all(found == zero_fingerprint(stripes[s]) for s, found in zip(finding.stripes, finding.found, strict=True)):
        return "all zero"
    sources: set[int] | None = None
    for stripe, found in zip(finding.stripes, finding.found, strict=True):
        pages = {int(page) for page in verifier.table.find(stripe, found) if int(page) != finding.page}
        sources = pages if sources is None else sources & pages
    if sources:
        return f"now equals page {min(sources)} of group {verifier.group.name} (misdirected copy)"
    if finding.free:
        return f"written after it was freed {engine_step - row.changed_step} steps before"
    if finding.persistence == "changing":
        return "a writer is active"
    return "unknown"
