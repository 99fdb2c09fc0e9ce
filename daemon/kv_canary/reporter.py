"""Reporter: turns findings and violations into incidents, counts them, logs them, and asks for the reaction.

Used by the canary thread alone.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import replace

from kv_canary.cause import guess_cause
from kv_canary.guard import GroupGuard, Space
from kv_canary.incidents import IncidentLog
from kv_canary.ledger import LedgerRow, Violation
from kv_canary.settings import Settings
from kv_canary.snapshot import PAGE_STATES, Check, Drill, Incident, Source, StripeFinding
from kv_canary.verifier import Finding

logger = logging.getLogger("kv_canary")

_REMEMBERED_VIOLATIONS = 4096


class Reporter:
    """Every incident goes through here."""

    def __init__(
        self,
        incidents: IncidentLog,
        *,
        settings: Callable[[], Settings],
        time: Callable[[], float],
        monotonic: Callable[[], float],
    ) -> None:
        self._incidents = incidents
        self._settings = settings
        self._time = time
        self._monotonic = monotonic
        self._violations: OrderedDict[tuple[object, ...], None] = OrderedDict()

    def finding(self, guard: GroupGuard, finding: Finding) -> bool:
        """A confirmed difference. True: it is a mismatch (one that was reported before is not reported again)."""
        if guard.verifier.is_news(finding):
            incident = self._from_finding(guard, finding, "real", None)
            guard.verifier.counters.mismatch(incident.check, incident.persistence, "real")
            self._publish(guard, incident)
        return True

    def drill(self, guard: GroupGuard, finding: Finding, drill: Drill) -> str | None:
        """A detected drill. Automatic ones leave no incident; only an alert rehearsal counts as a mismatch."""
        if drill.automatic:
            return None
        incident = replace(self._from_finding(guard, finding, "drill", drill.id), counted=drill.alert)
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
        self._publish(guard, incident)

    def _publish(self, guard: GroupGuard, incident: Incident) -> None:
        reaction = self._settings().on_mismatch
        if reaction == "quarantine":
            guard.gate.quarantine(guard.ledger.name, incident.page, incident.id)
        elif reaction == "raise":
            guard.gate.raise_at_next_step(f"{incident.id}: {incident.summary}")
        words = {"log": "logged", "quarantine": "quarantine asked for", "raise": "the engine's next step raises"}[
            reaction
        ]
        self._incidents.add(replace(incident, reaction=words))
        logger.error("MISMATCH %s: %s", incident.id, incident.summary)

    def _from_finding(self, guard: GroupGuard, finding: Finding, source: Source, drill: str | None) -> Incident:
        group, row = guard.group, guard.ledger.row(finding.page)
        check: Check = "free_page" if finding.free else "content"
        found_at = self._time()
        last_good = None if finding.last_good is None else found_at - (self._monotonic() - finding.last_good)
        stripes = tuple(
            StripeFinding(
                stripe=stripe,
                name=group.stripes[stripe].name,
                layers=group.stripes[stripe].layers,
                expected=f"{expected:016x}",
                found=f"{found:016x}",
            )
            for stripe, expected, found in zip(finding.stripes, finding.expected, finding.found, strict=True)
        )
        layers = tuple(sorted({layer for stripe in stripes for layer in stripe.layers}))
        step = guard.ledger.engine_step
        cause = "a drill" if drill else guess_cause(finding, guard.verifier, row, step)
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
            cause=cause,
            summary=(
                f"page {finding.page} of group {group.name}: {finding.persistence} wrong bytes in "
                f"{', '.join(stripe.name for stripe in stripes[:4])}{' and more' if len(stripes) > 4 else ''} "
                f"({'free' if finding.free else 'sealed'}, owner {owner}{window}); cause: {cause}"
            ),
            reaction="",
            drill=drill,
        )


def _held_by(row: LedgerRow) -> str:
    if row.owner and row.owners > 1:
        return f"{row.owner} and {row.owners - 1} more"
    if row.owner:
        return row.owner
    last = f", last {row.previous_owner}" if row.previous_owner else ""
    return f"{row.owners} requests that share it{last}" if row.owners else f"nobody{last}"
