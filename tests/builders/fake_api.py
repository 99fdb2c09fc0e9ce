"""A control API that answers what a test tells it to, over a real socket, and remembers what it was asked."""

from __future__ import annotations

import json
import threading
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any

NOW = 1_790_000_000.0  # what the fake's Date header says, so that ages in the output are the same every time


class FakeApi:
    """Answers `routes[(method, path)]`: a document, a `(status, document)` pair, or a list of them used up to the last.

    Everything else is a 404 problem. `requests` holds `(method, path with query, body)`, `tokens` the Authorization
    headers, in the order in which they came.
    """

    def __init__(self, routes: dict[tuple[str, str], Any]) -> None:
        self.routes = routes
        self.requests: list[tuple[str, str, Any]] = []
        self.tokens: list[str | None] = []
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.01})
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"

    def __enter__(self) -> FakeApi:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def _answer(self, method: str, path: str) -> tuple[int, Any]:
        answer = self.routes.get((method, path), problem(404, "Not Found", f"there is no {path} here"))
        if isinstance(answer, list):
            answer = answer.pop(0) if len(answer) > 1 else answer[0]
        return answer if isinstance(answer, tuple) else (200, answer)

    def _handler(api) -> type[BaseHTTPRequestHandler]:
        class Handler(BaseHTTPRequestHandler):
            def _serve(self) -> None:
                length = int(self.headers.get("Content-Length") or 0)
                body = json.loads(self.rfile.read(length)) if length else None
                api.requests.append((self.command, self.path, body))
                api.tokens.append(self.headers.get("Authorization"))
                status, document = api._answer(self.command, self.path.partition("?")[0])
                is_problem = status >= 400 and isinstance(document, dict) and "title" in document
                self.send_response(status)
                self.send_header("Content-Type", "application/problem+json" if is_problem else "application/json")
                self.end_headers()
                self.wfile.write(document if isinstance(document, bytes) else json.dumps(document).encode())

            do_GET = do_PUT = do_PATCH = do_POST = _serve

            def date_time_string(self, timestamp: float | None = None) -> str:
                return formatdate(NOW, usegmt=True)

            def log_message(self, format: str, *args: object) -> None:
                """Quiet."""

        return Handler


def problem(status: int, title: str, detail: str) -> tuple[int, dict[str, Any]]:
    return status, {"type": "about:blank", "title": title, "status": status, "detail": detail}


def mismatches(number: int, *, source: str = "real") -> list[dict[str, Any]]:
    return [{"check": "content", "persistence": "persistent", "source": source, "count": number}]


def group_document(name: str = "full", **changes: Any) -> dict[str, Any]:
    """A clean group, half way through its sweep; `counters` in `changes` are merged into the group's own."""
    counters = {
        "mismatches": [],
        "read_bytes": {
            "seal": 300_000_000,
            "sweep": 2_000_000_000,
            "confirm": 0,
            "claim": 0,
            "transfer": 0,
            "drill": 786_432,
        },
        "verified_pages": 91_204,
        "sealed_pages": 4_311,
        "claims": 812,
        "claims_not_covered": 3,
        "superseded": 17,
        "sweeps": {"clean": 12, "mismatch": 0, "interrupted": 1},
        "transfers": {"verified": 0, "mismatch": 0, "skipped": 0},
    }
    return {
        "name": name,
        "kind": "full",
        "enabled": True,
        "disabled_reason": None,
        "total_pages": 4096,
        "pages": {"unknown": 0, "open": 3, "sealed": 1204, "free": 2889, "loading": 0},
        "bytes_per_page": 786_432,
        "buffers": 48,
        "stripes": 48,
        "coverage": "all",
        "uncovered": [],
        "layout_signature": "5f2b9c11d07e43aa",
        "kv_token_id_vs_position_offset": 0,
        "sweep": {
            "position": 2048,
            "total": 4096,
            "started_at": NOW - 20,
            "eta_seconds": 21.5,
            "last_finished_at": NOW - 20,
            "last_duration_seconds": 41.2,
            "deadline_met": True,
        },
        "oldest_verification_age_seconds": 41.7,
        "counters": counters | changes.pop("counters", {}),
    } | changes


def status_document(**changes: Any) -> dict[str, Any]:
    """A server on which nothing is wrong."""
    return {
        "version": "0.1.0",
        "engine": "transformers",
        "engine_version": "5.24.0",
        "device": "cpu",
        "pid": 4242,
        "rank": 0,
        "url": "http://127.0.0.1:10470",
        "started_at": NOW - 11_520,
        "tick_at": NOW,
        "state": "running",
        "reason": None,
        "enabled": True,
        "settings": settings_document(),
        "engine_step": 90_211,
        "groups": [group_document()],
        "uncovered": [],
        "last_incident": None,
        "incidents_total": 0,
        "sweeps": [],
        "drills": [drill_document("d-7", automatic=True, result="detected", seconds=0.021)],
        "drills_total": [{"kind": "fingerprint", "result": "detected", "count": 19}],
        "errors": {"scrubber": 0},
        "last_errors": [],
        "kernel_seconds": {"verify": 1.5},
        "hook_seconds": {"seal": 0.2},
        "memory_bytes": {"fingerprints": 1_572_864, "ledger": 262_144},
        "budget_bytes_per_second": 111_000_000.0,
        "read_bandwidth_bytes_per_second": 11_100_000_000.0,
        "warnings": [],
    } | changes


def settings_document(**changes: Any) -> dict[str, Any]:
    return {
        "enabled": True,
        "host": "127.0.0.1",
        "port": 10470,
        "token_file": None,
        "allowed_hosts": "",
        "budget": "1%",
        "sweep_deadline": 60.0,
        "drill_interval": 600.0,
        "on_mismatch": "log",
        "coverage": "all",
        "allow_content_drills": False,
    } | changes


def incident_document(identifier: str = "i-1", **changes: Any) -> dict[str, Any]:
    return {
        "id": identifier,
        "source": "real",
        "group": "full",
        "page": 812,
        "check": "content",
        "persistence": "persistent",
        "stripes": [
            {
                "stripe": 3,
                "name": "layers.1.keys",
                "layers": [1],
                "expected": "9c01aa7754d1e0f2",
                "found": "1b44c0de5566a1f3",
            },
            {
                "stripe": 4,
                "name": "layers.2.keys",
                "layers": [2],
                "expected": "0d94aa7754d1e011",
                "found": "77aac0de5566a122",
            },
        ],
        "layers": [1, 2],
        "page_state": "sealed",
        "owner": "req-118",
        "previous_owner": "req-90",
        "owners": 1,
        "last_good_at": NOW - 95,
        "found_at": NOW - 62,
        "engine_step": 88_020,
        "changed_step": 87_440,
        "cause": "now equals page 77 of group full (misdirected copy)",
        "summary": "page 812 of group full changed in layers 1-2 while sealed",
        "reaction": "log",
        "drill": None,
        "counted": True,
        "neighbours": [],
        "pages_total": 1,
    } | changes


def sweep_document(identifier: str = "s-1", **changes: Any) -> dict[str, Any]:
    return {
        "id": identifier,
        "groups": ["full"],
        "state": "running",
        "started_at": NOW,
        "finished_at": None,
        "scanned_pages": 301,
        "verified_pages": 290,
        "total_pages": 1204,
        "mismatches": 0,
        "progress": 0.25,
    } | changes


def finished_sweep(**changes: Any) -> dict[str, Any]:
    return sweep_document(
        state="finished", finished_at=NOW + 3.4, scanned_pages=1204, verified_pages=1190, progress=1.0, **changes
    )


def drill_document(identifier: str = "d-1", **changes: Any) -> dict[str, Any]:
    return {
        "id": identifier,
        "kind": "fingerprint",
        "group": "full",
        "automatic": False,
        "alert": False,
        "result": "running",
        "started_at": NOW - 180,
        "page": 55,
        "stripe": 2,
        "seconds": None,
        "incident": None,
        "detail": "",
    } | changes
