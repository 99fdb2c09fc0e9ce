"""The status page at `/`: one document, put together from the sources beside this file.

Its script and style are part of it and named by their hashes in the content policy: nothing else runs, nothing is
loaded from elsewhere, and the page may talk to its own server only. The script may not turn text into markup either
(`require-trusted-types-for`), whatever a request's name says.
"""

from __future__ import annotations

from base64 import b64encode
from dataclasses import dataclass
from functools import cache
from hashlib import sha256
from importlib.resources import files

STYLES = ("page.css",)
SCRIPTS = ("words.js", "server.js", "map.js", "pages.js", "incidents.js", "groups.js", "drills.js", "page.js")


@dataclass(frozen=True, slots=True, kw_only=True)
class StatusPage:
    """The document, and the headers that it must come with."""

    html: str
    headers: dict[str, str]


@cache
def status_page() -> StatusPage:
    """Reads the sources once; what they show comes later, from the API."""
    style, script = _joined(STYLES), _joined(SCRIPTS)
    html = _source("index.html").replace("{{style}}", style).replace("{{script}}", script)
    policy = {
        "default-src": "'none'",
        "script-src": _hash(script),
        "style-src": _hash(style),
        "img-src": "data:",  # the icon
        "connect-src": "'self'",
        "base-uri": "'none'",
        "form-action": "'none'",
        "frame-ancestors": "'none'",
        "require-trusted-types-for": "'script'",
        "trusted-types": "'none'",
    }
    return StatusPage(
        html=html,
        headers={
            "Content-Security-Policy": "; ".join(f"{name} {value}" for name, value in policy.items()),
            "Referrer-Policy": "no-referrer",
        },
    )


def _source(name: str) -> str:
    return files(__name__).joinpath(name).read_text(encoding="utf-8")


def _joined(names: tuple[str, ...]) -> str:
    return "\n".join(_source(name) for name in names)


def _hash(text: str) -> str:
    return f"'sha256-{b64encode(sha256(text.encode()).digest()).decode()}'"
