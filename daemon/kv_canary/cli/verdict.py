"""What a status document means: is something wrong, how bad is it, and what is to be done first.

The exit status of the command line and the headline of the status screen come from here, so they cannot disagree.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from kv_canary.cli.client import Document
from kv_canary.cli.render import Tone, count, duration, rate

STALE_TICK_SECONDS = 15.0  # the canary thread ticks many times a second, also when everything is off


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """Something that is not as it should be, and the first thing to do about it."""

    tone: Tone
    what: str
    first: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The one-line answer and what it rests on, the most urgent first."""

    tone: Tone
    word: str
    sentence: str
    findings: tuple[Finding, ...]


def real_mismatches(group: Document) -> Counter[tuple[str, str]]:
    """Real mismatches of a group by check and persistence; drills are left out."""
    totals: Counter[tuple[str, str]] = Counter()
    for entry in (group.get("counters") or {}).get("mismatches") or ():
        if entry.get("source") == "real" and entry.get("count"):
            totals[entry.get("check", "?"), entry.get("persistence", "?")] += entry["count"]
    return totals


def is_real(incident: Document | None) -> bool:
    return incident is not None and incident.get("source") == "real"


def mismatch_found(status: Document) -> bool:
    """Whether this server has had a real mismatch since the canary attached."""
    return is_real(status.get("last_incident")) or any(real_mismatches(group) for group in status.get("groups") or ())


def judge(status: Document, now: float) -> Verdict:
    """Reads a status document. `now` is in seconds since 1970 by the server's clock."""
    groups = status.get("groups") or []
    findings = (
        *_mismatches(status),
        *_sidecar(status, now),
        *_proof(status),
        *(finding for group in groups for finding in _group(group, status)),
        *_troubles(status),
    )
    tone, word, sentence = _headline(status, findings)
    return Verdict(tone=tone, word=word, sentence=sentence, findings=findings)


def _headline(status: Document, findings: tuple[Finding, ...]) -> tuple[Tone, str, str]:
    groups = status.get("groups") or []
    active = sum(1 for group in groups if group.get("enabled"))
    guarding = f"{active} of {len(groups)} group{'s' * (len(groups) != 1)} on"
    state, enabled = status.get("state"), status.get("enabled")
    if mismatch_found(status):
        return "bad", "MISMATCH", "The KV cache of this server was found wrong."
    if state in ("failed", "stopped"):
        return "bad", str(state).upper(), "Nothing is guarded; the engine goes on without the canary."
    if not enabled or state == "disabled":
        return "warn", "OFF", "Nothing is guarded."
    if state == "waiting":
        return "warn", "WAITING", "Nothing is guarded yet: no KV pool is attached."
    if not active:
        return "warn", "OFF", f"Nothing is guarded: {guarding}."
    if findings:
        tone: Tone = "bad" if any(finding.tone == "bad" for finding in findings) else "warn"
        return tone, "ATTENTION", f"No mismatch, but see below; {guarding}."
    return "good", "CLEAN", f"No mismatch; {guarding}."


def _mismatches(status: Document) -> list[Finding]:
    found = []
    for group in status.get("groups") or ():
        if totals := real_mismatches(group):
            kinds = ", ".join(f"{number} {check} ({persistence})" for (check, persistence), number in totals.items())
            total = sum(totals.values())
            what = f"group {group.get('name')}: {count(total)} real mismatch{'es' * (total != 1)}: {kinds}"
            found.append(Finding(tone="bad", what=what, first="kv-canary incidents"))
    if not found and is_real(status.get("last_incident")):
        found.append(Finding(tone="bad", what="the last incident is a real one", first="kv-canary incidents"))
    return found


def _sidecar(status: Document, now: float) -> list[Finding]:
    state, reason = status.get("state"), status.get("reason")
    because = f": {reason}" if reason else ""
    found = []
    if state in ("failed", "stopped"):
        first = "read the server's log; guarding begins again with a restart of the server"
        found.append(Finding(tone="bad", what=f"the sidecar has {state}{because}", first=first))
    elif not status.get("enabled") or state == "disabled":
        found.append(Finding(tone="warn", what=f"the canary is switched off{because}", first="kv-canary enable"))
    elif state == "waiting":
        first = "" if reason else "wait until the server has loaded its model"
        found.append(Finding(tone="warn", what=f"waiting for a KV pool{because}", first=first))
    silence = now - status.get("tick_at", now)
    if state not in ("failed", "stopped") and silence > STALE_TICK_SECONDS:
        what = f"the canary thread has not ticked for {duration(silence)}: what is shown here is old"
        found.append(Finding(tone="bad", what=what, first="check whether the server's process hangs; read its log"))
    return found


def _proof(status: Document) -> list[Finding]:
    found = []
    for entry in status.get("drills_total") or ():
        if entry.get("result") == "missed" and (number := entry.get("count")):
            what = f"{count(number)} {entry.get('kind')} drill{'s' * (number != 1)} missed: so may be a real fault"
            found.append(Finding(tone="bad", what=what, first="kv-canary drill fingerprint --wait"))
    return found


def _group(group: Document, status: Document) -> list[Finding]:
    name, sweep, settings = group.get("name"), group.get("sweep") or {}, status.get("settings") or {}
    if not group.get("enabled"):
        if not status.get("enabled"):
            return []  # said once for all of them
        reason = group.get("disabled_reason")
        what = f"group {name} is off" + (f": {reason}" if reason else "")
        return [Finding(tone="warn", what=what, first=f"kv-canary enable {name}")]
    if sweep.get("deadline_met") is False and settings.get("budget") != "off":
        budget = f"{settings.get('budget')} is {rate(status.get('budget_bytes_per_second'))}"
        what = (
            f"group {name}: a sweep takes longer than sweep_deadline ({duration(settings.get('sweep_deadline'))}); "
            f"the budget of {budget}"
        )
        return [Finding(tone="warn", what=what, first="kv-canary settings budget=... or sweep_deadline=...")]
    return []


def _troubles(status: Document) -> list[Finding]:
    errors = {name: number for name, number in (status.get("errors") or {}).items() if number}
    found = [Finding(tone="warn", what=str(warning)) for warning in status.get("warnings") or ()]
    if errors:
        last = (status.get("last_errors") or [""])[-1]
        what = "errors inside the canary: " + ", ".join(f"{name} {count(number)}" for name, number in errors.items())
        what += f"; last: {last}" if last else ""
        found.append(Finding(tone="warn", what=what, first="read the server's log"))
    if (status.get("settings") or {}).get("budget") == "off" and status.get("enabled"):
        what = "budget is off: no background sweep runs"
        found.append(Finding(tone="warn", what=what, first="kv-canary settings budget=1%"))
    return found
