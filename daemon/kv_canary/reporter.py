"""Reporter: turns findings and violations into incidents, counts them, logs them, and asks for the reaction.

Used by the canary thread alone. Pages that went bad together are one incident (`merging`), counters count pages. A
flood of incidents is bounded: the ring keeps the newest, the log gets some lines and then one that sums up, and beyond
those lines fewer and fewer causes are looked for, so that the thread goes on to read.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import replace

from kv_canary.cause import UNKNOWN, Cause, guess_cause
from kv_canary.findings import Finding, Transfer
from kv_canary.guard import GroupGuard, Space
from kv_canary.incidents import IncidentLog
from kv_canary.ledger import LedgerRow, Violation
from kv_canary.merging import LineLimit, Merger, page_ranges
from kv_canary.settings import Settings
from kv_canary.snapshot import PAGE_STATES, Check, Drill, Incident, Source, StripeFinding

logger = logging.getLogger("kv_canary")

_REMEMBERED_VIOLATIONS = 4096
LISTED_NEIGHBOURS = 256
LOOKS = 200  # for causes, in ten seconds: a look takes a millisecond or less


class Reporter:
    """Every incident goes through here."""

    def __init__(
        self,
        incidents: IncidentLog,
        *,
        settings: Callable[[], Settings],
        time: Callable[[], float],
        monotonic: Callable[[], float],
        guards: Sequence[GroupGuard] = (),
        breathe: Callable[[], None] = lambda: None,
    ) -> None:
        """`guards` are all that there are: a page may have been copied from another group."""
        self._incidents = incidents
        self._settings = settings
        self._time = time
        self._monotonic = monotonic
        self._guards = guards
        self._breathe = breathe
        self._violations: OrderedDict[tuple[object, ...], None] = OrderedDict()
        self._merger = Merger()
        self._lines = LineLimit()
        self._looks = LineLimit(lines=LOOKS)

    def tick(self) -> None:
        """Now and then: says what the log was spared, and has the file hear of pages that joined their incidents."""
        if held_back := self._lines.due(self._monotonic()):
            logger.error(
                "MISMATCH: %d more wrong pages that got no line of their own; %d incidents so far, see /v1/incidents",
                *(held_back, self._incidents.total),
            )
        self._incidents.settle()

    def finding(self, guard: GroupGuard, finding: Finding) -> bool:
        """A confirmed difference. True: it is a mismatch (one that was reported before is not reported again)."""
        if guard.verifier.is_news(finding):
            cause = self._cause(guard, finding)
            incident = self._from_finding(guard, finding, "real", None, cause)
            guard.verifier.counters.mismatch(incident.check, incident.persistence, "real")
            way = (
                None
                if cause.kind == "bit flip"
                else (guard.group.name, incident.check, finding.persistence, cause.kind)
            )
            self._publish(guard, incident, way, finding.last_good)
        return True

    def _cause(self, guard: GroupGuard, finding: Finding) -> Cause:
        now = self._monotonic()
        self._looks.due(now)
        if not self._looks.allows(now):
            return UNKNOWN
        others = [other.verifier for other in self._guards if other.active]
        row, step = guard.ledger.row(finding.page), guard.ledger.engine_step
        return guess_cause(finding, guard.verifier, row, step, others=others, breathe=self._breathe)

    def drill(self, guard: GroupGuard, finding: Finding, drill: Drill) -> str | None:
        """A detected drill. Automatic ones leave no incident; only an alert rehearsal counts as a mismatch."""
        if drill.automatic:
            return None
        cause = Cause(kind="unknown", text="a drill")
        incident = replace(self._from_finding(guard, finding, "drill", drill.id, cause), counted=drill.alert)
        if drill.alert:
            guard.verifier.counters.mismatch(incident.check, incident.persistence, "drill")
        self._incidents.add(incident)
        logger.warning("drill: %s", incident.summary)
        return incident.id

    def violation(self, space: Space, violation: Violation) -> None:
        """An event that contradicts the ledger: a fact, so it needs no second look."""
        guard = next((guard for guard in space.guards if guard.enabled), None)
        if guard is None:
            return
        key = (space.ledger.name, violation.reason, violation.page, violation.generation, violation.owner)
        if key in self._violations:
            return
        self._violations[key] = None
        while len(self._violations) > _REMEMBERED_VIOLATIONS:
            self._violations.popitem(last=False)
        ledger, reason = space.ledger, violation.reason
        owner, previous = ledger.owner_name(violation.owner), ledger.owner_name(violation.previous_owner)
        who = f" by {owner}" if owner else ""
        whose = f" (held by {previous})" if previous and previous != owner else ""
        row = ledger.row(violation.page)
        incident = Incident(
            id=self._incidents.next_id(),
            source="real",
            group=guard.group.name,
            page=violation.page,
            check=reason.check,
            persistence="persistent",
            stripes=(),
            layers=(),
            page_state=PAGE_STATES[violation.state],
            owner=owner,
            previous_owner=previous,
            owners=violation.owners,
            last_good_at=None,
            found_at=self._time(),
            engine_step=violation.step,
            changed_step=row.changed_step,
            cause=reason.name.lower().replace("_", " "),
            summary=f"page {violation.page} of group {guard.group.name}: {reason.text}{who}{whose}",
            reaction="",
        )
        guard.verifier.counters.mismatch(incident.check, "persistent", "real")
        self._publish(guard, incident, (guard.group.name, reason, violation.owner, violation.step), None)

    def _publish(
        self, guard: GroupGuard, incident: Incident, way: tuple[object, ...] | None, last_good: float | None
    ) -> None:
        """`way` is how it went bad: pages that went the same way may be one incident; None if it stands alone."""
        now, whose = self._monotonic(), incident.owner or incident.previous_owner
        damage = self._merger.find(way, incident.page, whose, last_good, now) if way else None
        before = self._incidents.get(damage.incident) if damage else None
        reaction = self._settings().on_mismatch
        if reaction == "quarantine":
            guard.gate.quarantine(guard.ledger.name, incident.page, before.id if before else incident.id)
        elif reaction == "raise":
            guard.gate.raise_at_next_step(f"{incident.id}: {incident.summary}")
        if damage is not None and before is not None:
            others = damage.pages - {before.page}
            listed = tuple(sorted(others)[:LISTED_NEIGHBOURS])
            more = f"{page_ranges(listed)}{', ...' if len(others) > len(listed) else ''}"
            self._incidents.update(
                replace(
                    before,
                    neighbours=listed,
                    pages_total=len(damage.pages),
                    layers=tuple(sorted({*before.layers, *incident.layers})),
                    summary=f"{damage.summary}; {len(others)} more page{'s' * (len(others) != 1)} alike: {more}",
                )
            )
            self._lines.hold_back()
            return
        words = {"log": "logged", "quarantine": "quarantine asked for", "raise": "the engine's next step raises"}[
            reaction
        ]
        self._incidents.add(replace(incident, reaction=words))
        if way:
            self._merger.begin(way, incident.id, incident.summary, incident.page, whose, now)
        if self._lines.allows(now):
            logger.error("MISMATCH %s: %s", incident.id, incident.summary)

    def _from_finding(
        self, guard: GroupGuard, finding: Finding, source: Source, drill: str | None, cause: Cause
    ) -> Incident:
        group, row = guard.group, guard.ledger.row(finding.page)
        transfer = finding.transfer
        check: Check = "free_page" if finding.free else "content"
        if transfer is not None:
            check = "transfer" if transfer.parts or transfer.missing else "identity"
        found_at = self._time()
        last_good = None if finding.last_good is None else found_at - (self._monotonic() - finding.last_good)
        stripes = (
            transfer.parts
            if transfer is not None
            else tuple(
                StripeFinding(
                    stripe=stripe,
                    name=group.stripes[stripe].name,
                    layers=group.stripes[stripe].layers,
                    expected=f"{expected:016x}",
                    found=f"{found:016x}",
                )
                for stripe, expected, found in zip(finding.stripes, finding.expected, finding.found, strict=True)
            )
        )
        layers = tuple(sorted({layer for stripe in stripes for layer in stripe.layers}))
        step = guard.ledger.engine_step
        window = "" if last_good is None else f", good {found_at - last_good:.1f} s before"
        owner = _held_by(row)
        return Incident(
            id=self._incidents.next_id(),
            source=source,
            group=group.name,
            page=finding.page,
            check=check,
            persistence=finding.persistence,
            stripes=stripes,
            layers=layers,
            page_state=PAGE_STATES[row.state],
            owner=row.owner,
            previous_owner=row.previous_owner,
            owners=row.owners,
            last_good_at=last_good,
            found_at=found_at,
            engine_step=step,
            changed_step=row.changed_step,
            cause=cause.text,
            summary=(
                f"page {finding.page} of group {group.name}: {finding.persistence} {_what(transfer, stripes)} "
                f"({'free' if finding.free else 'sealed'}, owner {owner}{window}); cause: {cause.text}"
            ),
            reaction="",
            drill=drill,
        )


def _what(transfer: Transfer | None, stripes: tuple[StripeFinding, ...]) -> str:
    names = f"{', '.join(stripe.name for stripe in stripes[:4])}{' and more' if len(stripes) > 4 else ''}"
    if transfer is None:
        return f"wrong bytes in {names}"
    return f"wrong bytes from a tier in {names}" if stripes else "copy from a tier"


def _held_by(row: LedgerRow) -> str:
    if row.owner and row.owners > 1:
        return f"{row.owner} and {row.owners - 1} more"
    if row.owner:
        return row.owner
    last = f", last {row.previous_owner}" if row.previous_owner else ""
    return f"{row.owners} requests that share it{last}" if row.owners else f"nobody{last}"
