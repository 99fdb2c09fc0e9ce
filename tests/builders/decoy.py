"""The canary's HTTP server over a prepared snapshot, in a process of its own: what clients cost a machine when they
attack somebody else.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def decoy() -> Iterator[int]:
    """The port that it answers on."""
    process = subprocess.Popen(
        [sys.executable, "-m", "builders.decoy"],
        cwd=Path(__file__).parents[1],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    try:
        assert process.stdout is not None
        yield int(process.stdout.readline())
    finally:
        process.kill()
        process.communicate()


def main() -> None:
    from builders.control import FakeControl
    from kv_canary.http.api import build_app
    from kv_canary.http.server import HttpServer, bind_socket
    from kv_canary.settings import Settings

    sock, _ = bind_socket("127.0.0.1", 0)
    server = HttpServer(build_app(FakeControl(), settings=Settings()), sock)
    server.start()
    print(server.port, flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    main()
