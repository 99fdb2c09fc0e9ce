"""The status page in a real Chromium: on a real guarded engine, and on prepared servers for what is seldom seen."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from builders.browser import CHROMIUM, Browser, Tab, running_browser
from builders.control import FakeControl
from builders.live import Server, running, stays, wait_until
from builders.snapshots import make_drill, make_finding, make_group, make_incident, make_snapshot, make_uncovered
from kv_canary.clock import SystemClock
from kv_canary.commands import Command, LookAtPage, MapPages
from kv_canary.http.api import build_app
from kv_canary.http.server import HttpServer, bind_socket
from kv_canary.page_map import AGE_SHARES, MAP_STATES, MISMATCHED, NO_AGE
from kv_canary.settings import Settings
from kv_canary.snapshot import PageDetails, PageMap

pytestmark = [
    pytest.mark.stack,
    pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed; make test-stack installs it"),
]
CORRUPTED = Path(__file__).with_name("corrupted_server.py")
PICTURES = os.environ.get("PAGE_PICTURES")  # a folder: the pictures of a run are left there to be looked at
RUNNING = "document.querySelector('#state').textContent === 'running'"
SEALED, OPEN, FREE = (MAP_STATES.index(state) << 3 for state in ("sealed", "open", "free"))


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with running_browser(tmp_path_factory.mktemp("browser")) as one:
        yield one


@contextmanager
def looking(browser: Browser, url: str, **options: Any) -> Iterator[Tab]:
    """The page at `url`, and at the end: no script failed, nothing was refused, nobody else was asked for anything."""
    tab = Tab(browser, url + "/", **options)
    try:
        yield tab
        assert tab.complaints() == []
        assert [one for one in tab.requested() if not one.startswith((url + "/", "data:"))] == []
    finally:
        tab.close()


def picture(tab: Tab, name: str) -> None:
    if PICTURES:
        tab.run("new Promise((painted) => setTimeout(painted, 400))")
        tab.screenshot(Path(PICTURES) / f"{name}.png")


def pixels(tab: Tab) -> list[list[int]]:
    """The colours of the map's canvas, each once: [red, green, blue, alpha, count]."""
    script = """(() => {
        const map = document.querySelector('#map'), copy = document.createElement('canvas'), seen = new Map();
        [copy.width, copy.height] = [map.width, map.height];
        const context = copy.getContext('2d', {willReadFrequently: true});
        context.drawImage(map, 0, 0);
        const data = context.getImageData(0, 0, map.width, map.height).data;
        for (let at = 0; at < data.length; at += 4) {
            const colour = data.slice(at, at + 4).join(); seen.set(colour, (seen.get(colour) || 0) + 1);
        }
        return [...seen].map(([colour, count]) => [...colour.split(',').map(Number), count]);
    })()"""
    return list(tab.run(script))


def reds(tab: Tab) -> int:
    """Pixels of the colour of a mismatch, light and dark alike: much red and little else."""
    return sum(count for red, green, blue, _, count in pixels(tab) if red > 200 and green < 90 and blue < 110)


# A real engine


def test_a_person_switches_it_off_and_on(browser: Browser, demo: Server) -> None:
    """By mouse and by keyboard, as a whole and one group; the page says so, and so does the API."""
    with looking(browser, demo.url) as tab:
        tab.wait(RUNNING)
        tab.click("#master")
        tab.wait("document.querySelector('#state').textContent === 'disabled'")
        assert demo.document("/v1/canary")["enabled"] is False
        assert "switched off" in tab.text("#uncovered")
        tab.wait("!document.querySelector('#master').disabled")
        tab.run("document.querySelector('#master').focus()")
        tab.press(" ")
        tab.wait(RUNNING)
        assert demo.document("/v1/canary")["enabled"] is True

        tab.click(".group [role=switch]")
        tab.wait("document.querySelector('.group [role=switch]').getAttribute('aria-checked') === 'false'")
        assert demo.document("/v1/groups/full")["enabled"] is False
        tab.wait("document.querySelector('#groups').textContent.includes('switched off by a person')")
        tab.click(".group [role=switch]")
        tab.wait("document.querySelector('.group [role=switch]').getAttribute('aria-checked') === 'true'")
        wait_until(lambda: demo.total("kv_canary_pages", state="unknown") == 0, 30, "every page is covered again")


def test_a_person_drills_and_sees_the_incident_appear(browser: Browser, demo: Server) -> None:
    """A real byte of the cache, counted as a drill's mismatch; the incident says all, and the map shows the page."""
    with looking(browser, demo.url) as tab:
        tab.wait(RUNNING)
        before = tab.run("document.querySelectorAll('.incident').length")
        tab.click("#alert")
        tab.click(".drill[data-kind=content]")
        tab.wait("document.querySelector('#drill-result').textContent.includes('The fault was found')")
        tab.wait(f"document.querySelectorAll('.incident').length > {before}")
        assert tab.run("document.querySelector('#announce').textContent").startswith("New incident: page ")
        tab.click(".incident summary")
        assert tab.run("document.querySelector('.incident').open")
        newest = demo.document("/v1/incidents?newest=true&limit=1")["incidents"][0]
        shown = tab.text(".incident .facts")
        for fact in (newest["id"], newest["drill"], newest["stripes"][0]["expected"], "as a mismatch"):
            assert fact in shown
        tab.wait("/drilled [1-9]/.test(document.querySelector('#legend').textContent)")
        assert tab.text("#mismatches") == "0"


def test_the_map_is_painted_and_a_page_is_found_by_mouse_and_keyboard(browser: Browser, demo: Server) -> None:
    with looking(browser, demo.url) as tab:
        tab.wait(RUNNING)
        tab.wait("document.querySelector('#legend').textContent.includes('complete')")
        green = [0x0A, 0x7D, 0x5F]  # sealed, seen good just now
        assert sum(count for *colour, alpha, count in pixels(tab) if colour == green and alpha == 255) > 1000
        assert reds(tab) == 0
        first = demo.document("/v1/groups/full/pages")["first_page"]
        tab.run("document.querySelector('#map').focus()")
        tab.press("Home")
        assert tab.text("#cell").startswith(f"Page {first}: ")
        tab.press("ArrowRight")
        assert tab.text("#cell").startswith(f"Page {first + 1}: ")
        tab.press("End")
        assert tab.text("#cell").startswith(f"Page {first + 95}: ")
        tab.press("Enter")
        tab.wait(f"document.querySelector('#page').innerText.includes('{first + 95} of group full')")
        tab.click("#map")
        tab.wait(f"!document.querySelector('#page').innerText.includes('{first + 95} of group full')")
        tab.run("document.querySelector('#find-page').focus()")
        tab.type("7")
        tab.press("Enter")
        tab.wait("document.querySelector('#page').innerText.includes('7 of group full')")
        rows = tab.run("[...document.querySelectorAll('#counts tbody tr')].map((row) => row.innerText)")
        assert len(rows) == len(MAP_STATES)


@pytest.mark.parametrize("width", [1280, 360])
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_it_fits_the_screen(browser: Browser, demo: Server, width: int, dark: bool) -> None:
    """Nothing sticks out sideways, and the map takes the width that there is."""
    with looking(browser, demo.url, width=width, dark=dark) as tab:
        tab.wait(RUNNING)
        tab.wait("document.querySelector('#legend').textContent.includes('complete')")
        assert tab.run("document.documentElement.scrollWidth <= innerWidth")
        assert tab.run("document.querySelector('#map').clientWidth") > 0.7 * width
        picture(tab, f"demo-{'dark' if dark else 'light'}-{width}")


def test_a_real_corruption_turns_the_page_red(browser: Browser, tmp_path: Path) -> None:
    """From one wrong bit in a live cache to red on the map, without a reload."""
    with (
        running(tmp_path, [sys.executable, str(CORRUPTED), str(tmp_path)]) as server,
        looking(browser, server.url) as tab,
    ):
        tab.wait(RUNNING)
        assert tab.text("#mismatches") == "0"
        server.process.send_signal(signal.SIGUSR1)
        tab.wait("document.querySelector('#mismatches').textContent === '1'")
        tab.wait("document.querySelectorAll('.incident').length === 1")
        assert tab.run("!document.querySelector('#verdict').hidden")
        tab.wait("document.querySelector('#legend').textContent.includes('mismatch 1')")
        assert reds(tab) > 20
        tab.run("document.querySelector('#map').focus()")
        tab.press("m")
        assert "MISMATCH" in tab.text("#cell")
        tab.run("document.querySelector('.incident').open = true")
        picture(tab, "corrupted-light-1280")


# Prepared servers


@contextmanager
def serving(control: FakeControl, **settings: Any) -> Iterator[str]:
    sock, _ = bind_socket("127.0.0.1", 0)
    server = HttpServer(build_app(control, settings=Settings(**settings)), sock)
    server.start()
    try:
        yield f"http://127.0.0.1:{server.port}"
    finally:
        server.stop()


def prepared(cells: bytes, *, pages: int | None = None, owner: str = "a", **snapshot: Any) -> FakeControl:
    """A running sidecar whose one group looks like `cells`."""
    pages = pages or len(cells)
    looks = np.frombuffer(cells, np.uint8)
    table = np.bincount(looks & 63, minlength=64).reshape(8, 8)
    page_map = PageMap(
        group="full",
        built_at=0.0,
        first_page=0,
        pages=pages,
        pages_per_cell=-(-pages // len(cells)),
        states=MAP_STATES,
        age_bounds_seconds=tuple(60.0 * share for share in AGE_SHARES),
        counts={
            state: tuple(int(table[place, age]) for age in (0, 1, 2, 3, 4, NO_AGE))
            for place, state in enumerate(MAP_STATES)
        },
        mismatched_pages=int((looks >= MISMATCHED).sum()),
        drilled_pages=0,
        cells=cells,
    )

    def answer(command: Command) -> Any:
        if isinstance(command, MapPages):
            return page_map
        if isinstance(command, LookAtPage):
            return PageDetails(
                group="full", page=command.page, state="sealed", generation=3, owner=owner, previous_owner=None,
                owners=1, changed_step=7, age_seconds=1.5,
            )  # fmt: skip
        return control._carry_out(command)

    now = SystemClock().time()
    values = {"tick_at": now, "groups": (make_group(total_pages=pages),)} | snapshot
    control = FakeControl(make_snapshot(**values), answer=answer)
    return control


def ticking(control: FakeControl) -> Callable[[], Any]:
    """Keeps a prepared sidecar's tick fresh: the page calls it stale otherwise."""
    read = control.snapshot

    def snapshot() -> Any:
        control.publish(tick_at=SystemClock().time())
        return read()

    control.snapshot = snapshot  # type: ignore[method-assign]
    return snapshot


def test_a_million_pages_fit_on_the_map(browser: Browser) -> None:
    """As cells of 16 pages; three wrong ones are seen, and found with a key."""
    looks = np.random.default_rng(0).choice([SEALED, SEALED | 1, SEALED | 2, FREE, OPEN | NO_AGE], 62_500)
    looks = looks.astype(np.uint8)
    looks[[100, 30_000, 62_000]] |= MISMATCHED
    control = prepared(looks.tobytes(), pages=1_000_000)
    ticking(control)
    with serving(control) as url, looking(browser, url) as tab:
        tab.wait("document.querySelector('#map-note').textContent.startsWith('1,000,000 pages, 16 a cell')")
        assert reds(tab) > 3 * 20
        tab.run("document.querySelector('#map').focus()")
        tab.press("m")
        assert tab.text("#cell").startswith("Pages 1600 to 1615, at worst: ")
        picture(tab, "million-light-1280")
        tab.resize(360)
        picture(tab, "million-light-360")
        assert tab.run("document.documentElement.scrollWidth <= innerWidth")


EVIL = "<img src=x onerror=\"document.title='owned'\"><script>document.title='owned'</script>\"'&"


def test_what_a_request_is_called_never_becomes_markup(browser: Browser) -> None:
    """Names, reasons and causes from outside are shown letter for letter, everywhere."""
    incident = make_incident(
        owner=EVIL, previous_owner=EVIL, cause=EVIL, summary=EVIL, reaction=EVIL, page=1,
        stripes=(make_finding(name=EVIL),),
    )  # fmt: skip
    group = make_group(total_pages=4, uncovered=(make_uncovered(name=EVIL, reason=EVIL),), disabled_reason=EVIL)
    control = prepared(
        bytes([SEALED, SEALED | MISMATCHED, OPEN | NO_AGE, FREE]),
        owner=EVIL,
        engine=EVIL,
        groups=(group,),
        uncovered=(make_uncovered(name=EVIL, reason=EVIL),),
        incidents=(incident,),
        drills=(make_drill(result="detected", detail=EVIL),),
        warnings=(EVIL,),
        last_errors=(EVIL,),
    )
    ticking(control)
    with serving(control) as url, looking(browser, url) as tab:
        tab.wait("document.querySelector('.incident') !== null")
        tab.run("document.querySelector('.incident').open = true")
        tab.run("document.querySelector('#find-page').value = 1")
        tab.click("#find button")
        tab.wait("document.querySelector('#page').innerText.includes('of group full')")
        for selector in ("#subject", ".incident", "#uncovered", "#warnings", "#page"):
            assert EVIL in tab.text(selector), selector
        assert tab.run("document.querySelectorAll('img, main script, [onerror]').length") == 0
        assert "owned" not in tab.run("document.title").replace(EVIL, "")
        picture(tab, "names-light-1280")


def test_a_missing_token_is_asked_for_once_and_kept_by_the_tab_alone(browser: Browser, tmp_path: Path) -> None:
    """A wrong one is asked for again; Escape gives up; nothing is stored."""
    file = tmp_path / "token"
    file.write_text("correct-horse")
    control = prepared(bytes([SEALED]))
    ticking(control)
    with serving(control, token_file=file) as url:
        tab = Tab(browser, url + "/")  # a refused request is an error on the console: looked at here, not in `looking`
        tab.wait(RUNNING)
        tab.click("#master")
        tab.wait("document.querySelector('#token-dialog').open")
        tab.type("wrong")
        tab.press("Enter")
        tab.wait("document.querySelector('#token-why').textContent.includes('not valid')")
        picture(tab, "token-light-1280")
        assert control.current.enabled
        tab.type("correct-horse")
        tab.press("Enter")
        tab.wait("document.querySelector('#state').textContent === 'disabled'")
        tab.click("#master")
        tab.wait(RUNNING)
        assert not tab.run("document.querySelector('#token-dialog').open")
        stored = tab.run("[localStorage.length, sessionStorage.length, document.cookie, location.href]")
        assert stored == [0, 0, "", url + "/"]
        assert all("401" in one for one in tab.complaints())
        tab.close()


def test_a_server_that_stopped_and_one_that_does_not_answer_are_told_apart(browser: Browser) -> None:
    control = prepared(bytes([SEALED]))
    with serving(control) as url:
        tab = Tab(browser, url + "/")
        tab.wait(RUNNING)
        control.publish(tick_at=SystemClock().time() - 100)
        tab.wait("document.querySelector('#state').textContent === 'stale'")
        control.publish(tick_at=SystemClock().time(), reason="suspended: cuda graph capture")
        tab.wait("document.querySelector('#state').textContent === 'suspended'")
        control.publish(tick_at=SystemClock().time(), state="failed", reason="gave up")
        tab.wait("document.querySelector('#problem').textContent.includes('gave up')")
    tab.wait("document.querySelector('#state').textContent === 'unreachable'")
    tab.close()


def test_the_other_ranks_are_linked(browser: Browser) -> None:
    control = prepared(bytes([SEALED]))
    ticking(control)
    sock, _ = bind_socket("127.0.0.1", 0)
    port = sock.getsockname()[1]
    targets = [f"127.0.0.1:{port}", "127.0.0.1:1"]
    server = HttpServer(build_app(control, settings=Settings(), targets=lambda: targets), sock)
    server.start()
    try:
        with looking(browser, f"http://127.0.0.1:{port}") as tab:
            tab.wait("document.querySelectorAll('#ranks a').length === 2")
            assert tab.run("document.querySelector('#ranks [aria-current]').textContent").endswith(str(port))
            assert tab.run("document.querySelectorAll('#ranks a')[1].href") == "http://127.0.0.1:1/"
    finally:
        server.stop()


def test_a_hidden_tab_asks_for_nothing(browser: Browser) -> None:
    """Sixteen forgotten tabs must not keep the streams of one that somebody looks at."""
    control = prepared(bytes([SEALED]))
    ticking(control)
    with serving(control) as url, looking(browser, url) as tab:
        tab.wait(RUNNING)
        hide = "Object.defineProperty(document, 'hidden', {value: %s, configurable: true});"
        tab.run(hide % "true" + "document.dispatchEvent(new Event('visibilitychange'))")
        tab.wait("!polling && stream.source === null")
        before = len(tab.requested())
        assert stays(lambda: len(tab.requested()), 2.5) == before
        tab.run(hide % "false" + "document.dispatchEvent(new Event('visibilitychange'))")
        wait_until(lambda: len(tab.requested()) > before, 10, "it asks again")


def test_the_icon_is_part_of_the_page() -> None:
    """Or a browser asks for /favicon.ico, and says on its console that there is none."""
    from kv_canary.http.page import status_page

    assert 'rel="icon" href="data:' in status_page().html
