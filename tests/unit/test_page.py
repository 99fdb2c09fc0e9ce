"""The status page as a document: one file, nothing from elsewhere, and no way for a text to become markup."""

from __future__ import annotations

import re
from base64 import b64encode
from hashlib import sha256
from html.parser import HTMLParser
from pathlib import Path

import pytest

from builders.control import FakeControl
from builders.requests import call
from builders.snapshots import make_snapshot
from kv_canary.http import page
from kv_canary.http.api import build_app
from kv_canary.settings import Settings

SOURCES = Path(page.__file__).parent
SCRIPT = "\n".join((SOURCES / name).read_text() for name in page.SCRIPTS)


class Elements(HTMLParser):
    """Every element with its attributes, and the text of scripts and styles."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.inline: list[tuple[str, str]] = []
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        if self.found[-1:] and self.found[-1][0] in ("script", "style") and data.strip():
            self.inline.append((self.found[-1][0], data))


@pytest.fixture
def answer():
    return call(build_app(FakeControl(), settings=Settings()), "GET", "/")


@pytest.fixture
def policy(answer) -> dict[str, str]:
    directives = answer.headers["content-security-policy"].split("; ")
    return dict(directive.split(" ", 1) for directive in directives)


def test_the_content_policy_allows_this_script_and_style_and_nothing_else(policy: dict[str, str], answer) -> None:
    """The hashes are those of what is in the document, so that it works, and no other source is named."""
    inline = Elements(answer.text).inline
    hashes = {kind: f"'sha256-{b64encode(sha256(text.encode()).digest()).decode()}'" for kind, text in inline}
    assert len(inline) == 2
    assert policy == {
        "default-src": "'none'",
        "script-src": hashes["script"],
        "style-src": hashes["style"],
        "img-src": "data:",
        "connect-src": "'self'",
        "base-uri": "'none'",
        "form-action": "'none'",
        "frame-ancestors": "'none'",
        "require-trusted-types-for": "'script'",
        "trusted-types": "'none'",
    }
    assert answer.headers["referrer-policy"] == "no-referrer"


def test_the_page_asks_nobody_else_for_anything(answer) -> None:
    """No element loads, and no address in script or style leaves the server."""
    for tag, attributes in Elements(answer.text).found:
        assert tag not in ("img", "iframe", "object", "embed", "audio", "video", "base"), tag
        assert "src" not in attributes, tag
        if tag == "link":
            assert (attributes["href"] or "").startswith("data:")
        elif "href" in attributes:
            assert (attributes["href"] or "")[0] in "/#"
    assert re.findall(r"https?://[a-z]", SCRIPT) == []
    assert not re.search(r"url\(|@import", (SOURCES / "page.css").read_text())


def test_no_element_carries_a_script_or_a_style_of_its_own(answer) -> None:
    """The policy would refuse them."""
    for tag, attributes in Elements(answer.text).found:
        assert not [name for name in attributes if name.startswith("on") or name == "style"], tag


@pytest.mark.parametrize(
    "way",
    ["innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "srcdoc", "DOMParser", "eval(", "new Function",
     "createContextualFragment", "setHTML", "javascript:", "localStorage", "sessionStorage", "document.cookie"],
)  # fmt: skip
def test_the_script_has_no_way_to_make_markup_of_a_text_nor_to_keep_the_token(way: str) -> None:
    """An owner's name comes from a request; `textContent` is the only way in. The token is the tab's alone."""
    assert way not in SCRIPT


def test_the_page_is_the_same_whatever_the_server_s_names_are() -> None:
    """What it shows comes from the API, as JSON."""
    evil = FakeControl(make_snapshot(engine="<script>alert(1)</script>"))
    one, other = (call(build_app(control, settings=Settings()), "GET", "/") for control in (FakeControl(), evil))
    assert one.text == other.text
    assert one.headers["content-type"] == "text/html; charset=utf-8"


def test_every_element_that_the_script_asks_for_is_there_once(answer) -> None:
    ids = [attributes["id"] for _, attributes in Elements(answer.text).found if "id" in attributes]
    assert len(ids) == len(set(ids))
    assert set(re.findall(r'byId\("([^"]+)"\)', SCRIPT)) <= set(ids)


def test_every_field_has_a_label_and_every_section_a_heading(answer) -> None:
    """For whoever does not see it."""
    elements = Elements(answer.text).found
    ids = {attributes.get("id") for _, attributes in elements}
    for tag, attributes in elements:
        if tag in ("section", "dialog"):
            assert attributes["aria-labelledby"] in ids
    for field in re.findall(r"<(?:input|select)[^>]*>", answer.text.partition("<script>")[0]):
        before = answer.text[: answer.text.index(field)]
        assert before.rindex("<label") > before.rfind("</label>"), field
    assert '<html lang="en">' in answer.text
    assert 'role="switch"' in answer.text


def test_every_colour_of_the_map_is_there_in_light_and_dark() -> None:
    style = (SOURCES / "page.css").read_text()
    light, dark = style.split("@media (prefers-color-scheme: dark)", 1)
    names = [f"{state}-{age}" for state in ("sealed", "free") for age in (0, 1, 2, 3, 4, 7)]
    for name in (*names, "open", "loading", "unknown", "elsewhere", "mismatch", "drill"):
        for theme in (light, dark.partition("}\n}")[0]):
            assert re.search(rf"--{name}: #[0-9a-f]{{6}};", theme), name
