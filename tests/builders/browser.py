"""A real Chromium, driven over its debugging pipe: no driver, no port and no package is needed for that."""

from __future__ import annotations

import base64
import fcntl
import json
import os
import select
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from builders.live import ended, wait_until

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
ANSWER_SECONDS = 60.0  # a busy machine paints slowly
FLAGS = (
    *("--headless=new", "--remote-debugging-pipe", "--no-first-run", "--no-default-browser-check", "--mute-audio"),
    *("--disable-gpu", "--disable-dev-shm-usage", "--disable-background-networking", "--disable-component-update"),
    *("--disable-sync", "--disable-extensions", "--disable-features=OptimizationHints,MediaRouter,Translate"),
    *("--force-color-profile=srgb", "--host-resolver-rules=MAP * ~NOTFOUND , EXCLUDE 127.0.0.1"),
    *(["--no-sandbox"] if os.geteuid() == 0 else []),
)


class Browser:
    """One Chromium; commands and events of the DevTools protocol, each a JSON text that ends with a zero byte."""

    def __init__(self, commands: int, answers: int) -> None:
        self._commands, self._answers = commands, answers
        self._received = b""
        self._number = 0
        self.events: list[dict[str, Any]] = []

    def call(self, method: str, session: str | None = None, **parameters: Any) -> dict[str, Any]:
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        os.write(self._commands, json.dumps(message | ({"sessionId": session} if session else {})).encode() + b"\0")
        deadline = time.monotonic() + ANSWER_SECONDS
        while True:
            answer = self._next(deadline - time.monotonic())
            assert answer is not None, f"Chromium did not answer {method}"
            if answer.get("id") == self._number:
                assert "error" not in answer, (method, answer["error"])
                return dict(answer["result"])
            if "method" in answer:
                self.events.append(answer)

    def collect(self) -> list[dict[str, Any]]:
        """All events so far."""
        while (event := self._next(0)) is not None:
            self.events.append(event)
        return self.events

    def _next(self, seconds: float) -> dict[str, Any] | None:
        deadline = time.monotonic() + seconds
        while b"\0" not in self._received:
            ready, _, _ = select.select([self._answers], [], [], max(0.0, deadline - time.monotonic()))
            if not ready:
                return None
            read = os.read(self._answers, 1 << 20)
            assert read, "Chromium has ended"
            self._received += read
        message, _, self._received = self._received.partition(b"\0")
        return dict(json.loads(message))


class Tab:
    """One page of a browser."""

    def __init__(self, browser: Browser, url: str, *, width: int = 1280, height: int = 900, dark: bool = False) -> None:
        self.browser = browser
        self.target = browser.call("Target.createTarget", url="about:blank")["targetId"]
        self.session = browser.call("Target.attachToTarget", targetId=self.target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")
        self.resize(width, height)
        self.prefer(dark)
        self.call("Page.navigate", url=url)
        self.wait(f"location.href === {json.dumps(url)} && document.readyState === 'complete'")

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        return self.browser.call(method, self.session, **parameters)

    def resize(self, width: int, height: int = 900) -> None:
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600
        )

    def prefer(self, dark: bool) -> None:
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])

    def run(self, script: str) -> Any:
        """The value of an expression; a promise is waited for."""
        answer = self.call("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def wait(self, script: str, seconds: float = 30.0) -> Any:
        return wait_until(lambda: self.run(script), seconds, script)

    def text(self, selector: str) -> str:
        return str(self.run(f"document.querySelector({json.dumps(selector)}).innerText"))

    def click(self, selector: str) -> None:
        """A real click of the mouse, in the middle of the element."""
        where = f"document.querySelector({json.dumps(selector)})"
        self.wait(f"{where} !== null && !{where}.disabled")
        self.run(f"{where}.scrollIntoView({{block: 'center'}})")
        box = self.run(
            f"(({{x, y, width, height}}) => [x + width / 2, y + height / 2])({where}.getBoundingClientRect())"
        )
        self.click_at(*box)

    def click_at(self, x: float, y: float) -> None:
        self.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)
        for kind in ("mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def press(self, key: str) -> None:
        text = {"Enter": "\r", " ": " "}.get(key, key if len(key) == 1 else "")
        code = {"Enter": 13, "Tab": 9, " ": 32, "ArrowRight": 39, "ArrowDown": 40, "End": 35, "Home": 36}.get(key, 0)
        for kind in ("keyDown", "keyUp"):
            self.call("Input.dispatchKeyEvent", type=kind, key=key, text=text, windowsVirtualKeyCode=code)

    def type(self, text: str) -> None:
        self.call("Input.insertText", text=text)

    def screenshot(self, path: Path, *, whole: bool = True) -> None:
        picture = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=whole)["data"]
        path.write_bytes(base64.b64decode(picture))

    def complaints(self) -> list[str]:
        """Errors of scripts, on the console, and of what the content policy refused."""
        found = []
        for event in self._events():
            kind, what = event["method"], event["params"]
            if kind == "Runtime.exceptionThrown":
                found.append(json.dumps(what["exceptionDetails"]))
            elif kind == "Runtime.consoleAPICalled" and what["type"] in ("error", "warning", "assert"):
                found.append(json.dumps(what["args"]))
            elif kind == "Log.entryAdded" and what["entry"]["level"] in ("error", "warning"):
                found.append(f"{what['entry']['text']} {what['entry'].get('url', '')}")
        return found

    def requested(self) -> list[str]:
        """URLs of all requests that this page made."""
        return [
            event["params"]["request"]["url"]
            for event in self._events()
            if event["method"] == "Network.requestWillBeSent"
        ]

    def _events(self) -> list[dict[str, Any]]:
        return [event for event in self.browser.collect() if event.get("sessionId") == self.session]

    def close(self) -> None:
        self.browser.call("Target.closeTarget", targetId=self.target)


@contextmanager
def running_browser(folder: Path) -> Iterator[Browser]:
    """A Chromium with a profile of its own in `folder`, which cannot find any host but 127.0.0.1."""
    assert CHROMIUM is not None
    command_read, command_write = _pipe()
    answer_read, answer_write = _pipe()
    # Chromium takes commands from descriptor 3 and answers on 4.
    plumbing = f'exec "$@" 3<&{command_read} 4>&{answer_write} {command_read}<&- {answer_write}>&-'
    with (folder / "chromium.log").open("wb") as log:
        process = subprocess.Popen(
            ["bash", "-c", plumbing, "bash", CHROMIUM, *FLAGS, f"--user-data-dir={folder / 'profile'}", "about:blank"],
            pass_fds=(command_read, answer_write),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
        )
    os.close(command_read)
    os.close(answer_write)
    try:
        with ended(process):
            yield Browser(command_write, answer_read)
    finally:
        os.close(command_write)
        os.close(answer_read)


def _pipe() -> tuple[int, int]:
    """Both ends above 4, so that neither is in the way of the other when they are moved there."""
    read, write = os.pipe()
    moved = fcntl.fcntl(read, fcntl.F_DUPFD_CLOEXEC, 10), fcntl.fcntl(write, fcntl.F_DUPFD_CLOEXEC, 10)
    os.close(read)
    os.close(write)
    return moved
