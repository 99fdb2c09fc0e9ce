"""Targets: the sidecars of all local ranks of one server, found through small files in a folder of this user's.

Every sidecar writes one file and removes it when it stops; files of processes that are gone are passed over and removed
by whoever meets them. Ranks of one server share a session id. A folder that cannot be had is no error: a sidecar then
knows itself.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import tempfile
from pathlib import Path

logger = logging.getLogger("kv_canary")


def default_folder() -> Path:
    """`$XDG_RUNTIME_DIR/kv-canary`, or a folder of this user's under the temporary folder."""
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    if runtime and os.access(runtime, os.W_OK):
        return Path(runtime) / "kv-canary"
    return Path(tempfile.gettempdir()) / f"kv-canary-{os.getuid()}"


class LocalTargets:
    """This sidecar's entry, and the list of all of them. `listed` reads files: not for the event loop."""

    def __init__(self, target: str, rank: int, *, folder: Path | None = None) -> None:
        self._target = target
        self._session = os.getsid(0)
        self._file: Path | None = None
        folder = folder or default_folder()
        try:
            folder.mkdir(mode=0o700, exist_ok=True)
            if folder.stat().st_uid != os.getuid() or folder.is_symlink():
                raise PermissionError(f"{folder} belongs to somebody else")
            file = folder / f"{os.getpid()}-{target.rsplit(':', 1)[1]}.json"
            draft = file.with_suffix(".part")
            entry = {"target": target, "rank": rank, "pid": os.getpid(), "session": self._session}
            draft.write_text(json.dumps(entry))
            draft.replace(file)
            self._file = file
        except OSError as error:
            logger.warning("/v1/targets lists this rank only: %s", error)

    def listed(self) -> list[str]:
        """`host:port` of every living sidecar of this session, by rank; this one among them in any case."""
        found = {self._target: -1} if self._file is None else {}
        for file in sorted(self._file.parent.glob("*.json")) if self._file is not None else ():
            with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
                entry = json.loads(file.read_text())
                if not _is_alive(int(entry["pid"])):
                    file.unlink(missing_ok=True)
                elif entry["session"] == self._session:
                    found[str(entry["target"])] = int(entry["rank"])
        found.setdefault(self._target, -1)
        return sorted(found, key=lambda target: (found[target], target))

    def remove(self) -> None:
        if self._file is not None:
            with contextlib.suppress(OSError):
                self._file.unlink(missing_ok=True)


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
