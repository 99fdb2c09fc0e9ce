"""Stands for a pager in the compose file: takes Alertmanager's webhooks, says in one line each what arrived, and lists
everything at `GET /` as JSON. Needs nothing but Python.
"""

from __future__ import annotations

import json
import signal
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

PORT = 9095
KEPT = 1000
arrived: list[dict[str, Any]] = []


class Receiver(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        message = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        for alert in message["alerts"]:
            text = alert["annotations"].get("summary") or alert["labels"]["alertname"]
            print(f"{self.path[1:]:10} {alert['status']:9} {text}", flush=True)
            arrived.append({"receiver": self.path[1:], **alert})
        del arrived[:-KEPT]
        self._answer([])

    def do_GET(self) -> None:
        self._answer(arrived)

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing: what arrives is said above."""

    def _answer(self, document: Any) -> None:
        body = json.dumps(document, indent=2).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))  # as PID 1 it would be ignored
    print("alerts arrive here", flush=True)
    ThreadingHTTPServer(("", PORT), Receiver).serve_forever()
