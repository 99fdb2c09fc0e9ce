"""The server as a whole as text for a person: the status screen and the list of groups."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from kv_canary.cli.client import Document
from kv_canary.cli.records import drill_line, sweep_line
from kv_canary.cli.render import (
    GAP,
    Cell,
    Painted,
    Style,
    age,
    bar,
    count,
    duration,
    facts,
    paragraph,
    percent,
    plain,
    rate,
    size,
    table,
)
from kv_canary.cli.verdict import judge, real_mismatches

ReadRates = Mapping[str, float | None]


def status_screen(
    status: Document, style: Style, now: float, *, url: str, read_rates: ReadRates | None = None
) -> list[str]:
    """The whole server on one screen. With `read_rates` (bytes a second by group) the read column shows those."""
    verdict = judge(status, now)
    engine = f"{status.get('engine', '?')} {status.get('engine_version', '')}".rstrip()
    where = f"{status.get('device', '?')}, rank {status.get('rank', '?')}, pid {status.get('pid', '?')}"
    up = f", up {duration(max(0, int(now - status['started_at'])))}" if status.get("started_at") is not None else ""
    lines = paragraph(f"KV Canary {status.get('version', '?')}: {engine} on {where}{up}, {status.get('url') or url}")
    lines += [style.paint(verdict.word, verdict.tone) + GAP + verdict.sentence]
    for finding in verdict.findings:
        lines += [style.paint(line, finding.tone) for line in paragraph(finding.what, first="  ! ", rest="    ")]
        lines += paragraph(finding.first, first="    first: ") if finding.first else []
    if groups := status.get("groups"):
        lines += ["", *_progress_table(groups, style, read_rates, all_off=not status.get("enabled"))]
    return [*lines, "", *facts(_background(status, now), style)]


def _progress_table(
    groups: Sequence[Document], style: Style, read_rates: ReadRates | None, *, all_off: bool
) -> list[str]:
    rows: list[list[Cell]] = []
    for group in groups:
        name, sweep, counters = group.get("name", "?"), group.get("sweep") or {}, group.get("counters") or {}
        total = sweep.get("total") or 0
        fraction = sweep.get("position", 0) / total if total else 0.0
        wrong = sum(real_mismatches(group).values())
        read = size(sum((counters.get("read_bytes") or {}).values()))
        rows.append(
            [
                name,
                group.get("kind", "?"),
                Painted("off", "warn") if all_off else _switch(group),
                f"{count((group.get('pages') or {}).get('sealed'))}/{count(group.get('total_pages'))}",
                f"{bar(fraction, 12)} {percent(fraction):>4}",
                duration(sweep.get("eta_seconds")),
                duration(group.get("oldest_verification_age_seconds")),
                read if read_rates is None else rate(read_rates.get(name)),
                Painted(count(wrong), "bad" if wrong else "good"),
            ]
        )
    headers = ("group", "kind", "is", "sealed", "sweep", "eta", "oldest check", "read", "mismatches")
    return table(headers, rows, style, right=(3, 5, 6, 7, 8))


def _switch(group: Document) -> Painted:
    return Painted("on", "good") if group.get("enabled") else Painted("off", "warn")


def _background(status: Document, now: float) -> list[tuple[str, str]]:
    settings = status.get("settings") or {}
    budget = f"{settings.get('budget', '?')}, now {rate(status.get('budget_bytes_per_second'))}"
    device = rate(status.get("read_bandwidth_bytes_per_second"))
    deadline = duration(settings.get("sweep_deadline"))
    pairs = [("budget", f"{budget}; this device reads {device}; every page again within {deadline}")]
    if (last := status.get("last_incident")) is not None:
        head = f"{last.get('id')} ({last.get('source')}), {age(last.get('found_at'), now)}"
        pairs.append(("last incident", f"{head}: {last.get('summary', '')}"))
    if drills := status.get("drills"):
        pairs.append(("last drill", drill_line(max(drills, key=lambda drill: drill.get("started_at") or 0.0), now)))
    running = [sweep for sweep in status.get("sweeps") or () if sweep.get("state") == "running"]
    pairs += [("sweep asked for", sweep_line(sweep)) for sweep in running]
    if memory := status.get("memory_bytes"):
        parts = ", ".join(f"{kind} {size(number)}" for kind, number in memory.items())
        pairs.append(("memory", f"{size(sum(memory.values()))} ({parts})"))
    missing = [*(status.get("uncovered") or ())]
    for group in status.get("groups") or ():
        missing += [item for item in group.get("uncovered") or () if item not in missing]
    return pairs + [("not covered", f"{item.get('name')}: {item.get('reason')}") for item in missing]


def groups_screen(groups: Sequence[Document], style: Style, now: float) -> list[str]:
    """Everything about each group, one block a group."""
    if not groups:
        return ["No canary group yet: no KV pool is attached.", "first: kv-canary status"]
    blocks = [_group_block(group, style, now) for group in groups]
    return [line for i, block in enumerate(blocks) for line in (["", *block] if i else block)]


def _group_block(group: Document, style: Style, now: float) -> list[str]:
    sweep, counters = group.get("sweep") or {}, group.get("counters") or {}
    switch, reason = _switch(group), group.get("disabled_reason")
    title = style.paint(plain(group.get("name", "?")), "strong") + GAP + style.paint(switch.text, switch.tone)
    states = ", ".join(f"{count(number)} {state}" for state, number in (group.get("pages") or {}).items() if number)
    last = duration(sweep.get("last_duration_seconds"))
    wrong = ", ".join(f"{n} {check} ({persistence})" for (check, persistence), n in real_mismatches(group).items())
    reads = ", ".join(f"{purpose} {size(n)}" for purpose, n in (counters.get("read_bytes") or {}).items() if n)
    pairs = [
        ("off because", str(reason)) if reason else ("", ""),
        ("pages", f"{count(group.get('total_pages'))} of {size(group.get('bytes_per_page'))}: {states or 'none'}"),
        (
            "checks",
            f"{group.get('kind')}, coverage {group.get('coverage')}, {count(group.get('buffers'))} buffers in "
            f"{count(group.get('stripes'))} stripes, layout {group.get('layout_signature')}, "
            f"token offset {group.get('kv_token_id_vs_position_offset', 0)}",
        ),
        ("last sweep", f"{age(sweep.get('last_finished_at'), now)}" + (f", took {last}" if last != "-" else "")),
        ("verified", f"{count(counters.get('verified_pages'))} pages; {count(counters.get('superseded'))} superseded"),
        ("claims", f"{count(counters.get('claims'))}, of them not covered {count(counters.get('claims_not_covered'))}"),
        ("read", reads or "nothing yet"),
        ("wrong", wrong or "nothing"),
        *(("not covered", f"{item.get('name')}: {item.get('reason')}") for item in group.get("uncovered") or ()),
    ]
    return [title, *facts([pair for pair in pairs if pair[0]], style, indent=len(GAP))]
