"""Incidents, sweeps, drills and settings as text for a person."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields

from kv_canary.cli.client import Document
from kv_canary.cli.render import (
    GAP,
    Cell,
    Painted,
    Style,
    Tone,
    age,
    count,
    duration,
    facts,
    moment,
    percent,
    plain,
    table,
)
from kv_canary.cli.verdict import is_real
from kv_canary.settings import Settings

# What the check means and where people have found the fault; the incident's own `cause` comes before it.
MEANINGS: Mapping[str, str] = {
    "content": "bytes changed after the page was complete; suspect a late or misdirected write into it",
    "free_page": "a freed page was written; suspect work that outlived its request, or a copy into a stale page",
    "identity": "a prefix hit gave a page of other tokens; suspect the prefix cache's keys (salt, adapter, positions)",
    "ownership": "a page has two owners, or none where one was due; suspect the allocator's reference counts",
    "transfer": "a page came back changed from a tier or a peer; suspect that copy (tensors left out, read too early)",
    "layout": "two sides disagree on how a page lies in memory; compare their versions, dtypes and layouts",
}


def incidents_screen(incidents: Sequence[Document], next_id: str | None, style: Style, now: float) -> list[str]:
    """A table, then what to do next."""
    if not incidents:
        return ["No incidents."]
    rows: list[list[Cell]] = [
        [
            str(incident.get("id", "?")),
            age(incident.get("found_at"), now),
            Painted(str(incident.get("source", "?")), "bad" if is_real(incident) else "dim"),
            str(incident.get("group", "?")),
            _page(incident),
            str(incident.get("check", "?")),
            str(incident.get("persistence", "?")),
            str(incident.get("cause") or "-"),
        ]
        for incident in incidents
    ]
    lines = table(("id", "found", "source", "group", "page", "check", "persistence", "cause"), rows, style, flexible=7)
    real = [incident for incident in incidents if is_real(incident)]
    if real:
        lines += ["", f"first: kv-canary incidents {plain(real[-1].get('id'))}"]
    if next_id is not None:
        lines += [f"more:  kv-canary incidents --after {plain(next_id)}"]
    return lines


def incident_screen(incident: Document, style: Style, now: float) -> list[str]:
    """One incident in full: what, where, in which window, whose page, and what to suspect."""
    check, found_at, last_good = str(incident["check"]), incident.get("found_at"), incident.get("last_good_at")
    tone: Tone = "bad" if is_real(incident) else "dim"
    source = "real" if is_real(incident) else f"drill {incident.get('drill') or ''}".rstrip()
    title = style.paint(f"incident {plain(incident.get('id', '?'))}", "strong") + GAP + style.paint(plain(source), tone)
    window = "" if found_at is None or last_good is None else f" (a window of {duration(found_at - last_good)})"
    changed = count(incident.get("changed_step"))
    layers = _ranges(incident.get("layers") or ())
    owner = f"{incident.get('owner') or 'nobody'}, before that {incident.get('previous_owner') or 'nobody known'}"
    pairs = [
        ("what", str(incident.get("summary", ""))),
        ("cause", str(incident.get("cause") or "not known")),
        ("check", f"{check}, {incident.get('persistence', '?')}: {MEANINGS.get(check, 'unknown to this version')}"),
        ("page", f"{incident.get('page')} of group {incident.get('group')}, {incident.get('page_state')}" + layers),
        *_neighbours(incident),
        ("owner", f"{owner} ({count(incident.get('owners'))} now)"),
        ("last good", "never seen good" if last_good is None else f"{moment(last_good)}, {age(last_good, now)}"),
        ("found", f"{moment(found_at)}, {age(found_at, now)}{window}"),
        ("engine step", f"found at {count(incident.get('engine_step'))}, page last changed state at {changed}"),
        ("reaction", str(incident.get("reaction") or "none")),
    ]
    lines = [title, *facts(pairs, style)]
    if stripes := incident.get("stripes"):
        rows: list[list[Cell]] = [
            [
                str(stripe.get("stripe", "?")),
                str(stripe.get("name", "?")),
                str(stripe.get("expected", "?")),
                str(stripe.get("found", "?")),
            ]
            for stripe in stripes
        ]
        lines += ["", *table(("stripe", "name", "expected", "found"), rows, style, flexible=1)]
    if is_real(incident):
        lines += [
            "",
            f"first: keep this record: kv-canary incidents {plain(incident.get('id', 'ID'))} --json",
            "then:  take bad pages out of the prefix cache: kv-canary settings on_mismatch=quarantine",
        ]
    return lines


def _page(incident: Document) -> str:
    """`5`, or `5 +3` where three more went bad with it."""
    more = (incident.get("pages_total") or 1) - 1
    return f"{incident.get('page', '?')}" + (f" +{count(more)}" if more > 0 else "")


def _neighbours(incident: Document) -> list[tuple[str, str]]:
    """The pages that went bad with the first one."""
    listed, total = incident.get("neighbours") or (), incident.get("pages_total") or 1
    if total < 2:
        return []
    more = ", ..." if total - 1 > len(listed) else ""
    return [("alike", f"{_runs(listed)}{more} ({count(total)} pages in all)")]


def _ranges(layers: Sequence[int]) -> str:
    """` layers 0-3, 7`."""
    text = _runs(layers)
    return f", layer{'s' * (len(layers) != 1)} {text}" if text else ""


def _runs(numbers: Sequence[int]) -> str:
    """`0-3, 7`."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ", ".join(f"{low}-{high}" if high > low else str(low) for low, high in runs)


def sweep_line(sweep: Document) -> str:
    """One sweep that somebody asked for."""
    verified, total = sweep.get("verified_pages"), count(sweep.get("total_pages"))
    head = f"{sweep.get('id')} over {', '.join(sweep.get('groups') or ()) or 'no group'}"
    if sweep.get("state") == "running":
        scanned = count(sweep.get("scanned_pages", verified))
        return f"{head}: {percent(sweep.get('progress'))}, {scanned} of {total} pages"
    began, ended = sweep.get("started_at"), sweep.get("finished_at")
    took = f" in {duration(ended - began)}" if began is not None and ended is not None else ""
    wrong = sweep.get("mismatches") or 0
    # Pages that are being written, or that the canary has not met yet, have nothing to be verified against.
    pages = f"{count(verified)} of {total} pages verified"
    return f"{head}: {sweep.get('state')}{took}, {pages}, {count(wrong)} mismatch{'es' * (wrong != 1)}"


def drill_line(drill: Document, now: float) -> str:
    """One drill and how it ended."""
    automatic = "automatic " if drill.get("automatic") else ""
    page = f", page {drill.get('page')}" if drill.get("page") is not None else ""
    head = f"{automatic}{drill.get('kind')} drill {drill.get('id')} in group {drill.get('group')}{page}"
    seconds = f" in {duration(drill.get('seconds'))}" if drill.get("seconds") is not None else ""
    detail = f" ({drill['detail']})" if drill.get("detail") else ""
    return f"{head}: {drill.get('result')}{seconds}, started {age(drill.get('started_at'), now)}{detail}"


def settings_screen(settings: Document, style: Style) -> list[str]:
    """All settings; those that can change while the server runs are marked."""
    known = {item.name: (bool(item.metadata["live"]), str(item.metadata["help"])) for item in fields(Settings)}
    rows: list[list[Cell]] = []
    for name, value in settings.items():
        live, meaning = known.get(name, (False, "not known to this version of the command"))
        rows.append([name, _spelled(value), Painted("live", "good") if live else Painted("restart", "dim"), meaning])
    lines = table(("setting", "value", "change", "what it is"), rows, style, flexible=3)
    return [*lines, "", "change a live one: kv-canary settings budget=2% sweep_deadline=30"]


def _spelled(value: object) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, float):
        return f"{value:g}"
    return "-" if value is None or value == "" else str(value)
