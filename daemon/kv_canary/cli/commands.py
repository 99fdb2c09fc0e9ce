"""The subcommands that ask a running sidecar: each takes the parsed arguments and a session, and gives an `Outcome`."""

from __future__ import annotations

import math
from argparse import Namespace
from urllib.parse import quote

from kv_canary.cli.client import Document
from kv_canary.cli.records import drill_line, incident_screen, incidents_screen, settings_screen, sweep_line
from kv_canary.cli.render import count, paragraph
from kv_canary.cli.screens import groups_screen, status_screen
from kv_canary.cli.session import CLEAN, MISMATCH, TROUBLE, Outcome, Session, wait_until_done
from kv_canary.cli.verdict import is_real, mismatch_found, real_mismatches
from kv_canary.errors import KVCanaryError

DRILL_WAIT_SECONDS = 120.0
INCIDENT_PAGE = 1000  # the most that the API gives at once


def status(arguments: Namespace, session: Session) -> Outcome:
    document = session.read_status()
    lines = status_screen(document, session.style, session.now(), url=session.client.url)
    return Outcome(status=MISMATCH if mismatch_found(document) else CLEAN, document=document, lines=lines)


def groups(arguments: Namespace, session: Session) -> Outcome:
    document = session.client.get("/v1/groups")
    found = any(real_mismatches(group) for group in document["groups"])
    lines = groups_screen(document["groups"], session.style, session.now())
    return Outcome(status=MISMATCH if found else CLEAN, document=document, lines=lines)


def enable(arguments: Namespace, session: Session) -> Outcome:
    return _switch(arguments.group, True, session)


def disable(arguments: Namespace, session: Session) -> Outcome:
    return _switch(arguments.group, False, session)


def _switch(group: str | None, enabled: bool, session: Session) -> Outcome:
    if group is not None:
        document = session.client.patch(f"/v1/groups/{quote(group, safe='')}", {"enabled": enabled})
        subject, undo = f"Group {group}", f"kv-canary enable {group}"
    else:
        document = session.client.put("/v1/canary", {"enabled": enabled})
        subject, undo = "The canary", "kv-canary enable"
    if enabled:
        text = f"{subject} is on. What was written while it was off is guarded once it is adopted or written anew."
    else:
        text = f"{subject} is off: its pages are not guarded. Back on with: {undo}"
    return Outcome(status=CLEAN, document=document, lines=paragraph(text))


def sweep(arguments: Namespace, session: Session) -> Outcome:
    document = session.client.post("/v1/sweeps", {"group": arguments.group})
    if not arguments.wait:
        lines = paragraph(f"Sweep {sweep_line(document)}. Follow it with: kv-canary watch")
        return Outcome(status=CLEAN, document=document, lines=lines)
    document = wait_until_done(
        session,
        f"/v1/sweeps/{quote(str(document['id']), safe='')}",
        document,
        is_done=lambda sweep: sweep.get("state") != "running",
        limit_seconds=arguments.timeout,
    )
    lines = paragraph(f"Sweep {sweep_line(document)}.")
    if document.get("mismatches"):
        return Outcome(status=MISMATCH, document=document, lines=[*lines, "first: kv-canary incidents"])
    if _already_wrong(document, session):
        lines += paragraph("Nothing new, but these groups had real mismatches before. first: kv-canary incidents")
        return Outcome(status=MISMATCH, document=document, lines=lines)
    if document.get("state") != "finished":
        lines += paragraph("It did not get to the end, so it proves nothing. first: kv-canary status")
        return Outcome(status=TROUBLE, document=document, lines=lines)
    return Outcome(status=CLEAN, document=document, lines=lines)


def _already_wrong(sweep: Document, session: Session) -> bool:
    """A clean pass over pages that were wrong before is no clean bill: what was served from them stays served."""
    groups = session.client.get("/v1/groups")["groups"]
    return any(real_mismatches(group) for group in groups if group.get("name") in (sweep.get("groups") or ()))


def incidents(arguments: Namespace, session: Session) -> Outcome:
    if arguments.id is not None:
        document = session.client.get(f"/v1/incidents/{quote(arguments.id, safe='')}")
        lines = incident_screen(document, session.style, session.now())
        return Outcome(status=MISMATCH if is_real(document) else CLEAN, document=document, lines=lines)
    document = _incident_pages(arguments.after, arguments.limit, session)
    found, total = document["incidents"], document.get("total")
    lines = incidents_screen(found, document.get("next"), session.style, session.now())
    if arguments.after is None and not document.get("next") and total is not None and total > len(found):
        lines += paragraph(f"{count(total - len(found))} older ones are no longer kept (incident_capacity)")
    return Outcome(status=MISMATCH if any(is_real(one) for one in found) else CLEAN, document=document, lines=lines)


def _incident_pages(after: str | None, limit: int | None, session: Session) -> Document:
    """One page if there is a limit; else all: the API gives the oldest first, and the only real one may be the last."""
    query: dict[str, str | int] = {"limit": INCIDENT_PAGE if limit is None else limit}
    if after is not None:
        query["after"] = after
    document = session.client.get("/v1/incidents", query)
    while limit is None and document.get("next"):
        page = session.client.get("/v1/incidents", query | {"after": document["next"]})
        document = page | {"incidents": document["incidents"] + page["incidents"]}
    return document


def drill(arguments: Namespace, session: Session) -> Outcome:
    body = {"kind": arguments.kind, "group": arguments.group, "alert": arguments.alert}
    document = session.client.post("/v1/drills", body)
    if arguments.wait:
        document = wait_until_done(
            session,
            f"/v1/drills/{quote(str(document['id']), safe='')}",
            document,
            is_done=lambda drill: drill.get("result") != "running",
            limit_seconds=DRILL_WAIT_SECONDS if arguments.timeout is None else arguments.timeout,
        )
    lines = paragraph(drill_line(document, session.now()))
    result = document.get("result")
    if result == "running":
        lines += paragraph("Its result will be in: kv-canary status (or wait for it with --wait)")
    elif result == "missed":
        lines += paragraph("The fault was not found: do not trust this canary. first: kv-canary status")
    elif result == "superseded":
        lines += paragraph("The engine took the page meanwhile, so nothing is proven. first: run the drill again")
    exits = {"detected": CLEAN, "running": CLEAN, "missed": MISMATCH}
    return Outcome(status=exits.get(str(result), TROUBLE), document=document, lines=lines)


def settings(arguments: Namespace, session: Session) -> Outcome:
    changes: Document = {}
    for assignment in arguments.changes:
        key, equals, value = assignment.partition("=")
        if not equals or not key:
            raise KVCanaryError(
                f"{assignment!r} is not of the form KEY=VALUE\nfor example: kv-canary settings budget=2%"
            )
        if key in changes:
            raise KVCanaryError(f"{key} is given twice: {changes[key]!r} and {value!r}\nleave one of them out")
        changes[key] = _json_value(value)
    client = session.client
    document = client.patch("/v1/settings", changes) if changes else client.get("/v1/settings")
    return Outcome(status=CLEAN, document=document, lines=settings_screen(document, session.style))


def _json_value(text: str) -> str | float | int:
    """Numbers as numbers; the server checks everything else, since it alone knows its settings."""
    for read in (int, float):
        try:
            number = read(text)
        except ValueError:
            continue
        return number if math.isfinite(number) else text
    return text
