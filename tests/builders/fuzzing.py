"""schemathesis against a running server, in a process of its own: what it asks costs the server's process nothing but
the answers.
"""

from __future__ import annotations

import re
import subprocess
import sysconfig
from dataclasses import dataclass
from pathlib import Path

SCHEMATHESIS = str(Path(sysconfig.get_path("scripts")) / "schemathesis")
CHECKS = (
    "not_a_server_error",
    "status_code_conformance",
    "content_type_conformance",
    "response_headers_conformance",
    "response_schema_conformance",
    "unsupported_method",
    "allow_header_conformance",
)
# A probe that is not content answers 503: that is what it is there for. A stream does not end.
# (Checks belong in here: named on the command line, they apply to every operation.)
CONFIG = """
[checks]
enabled = false
{checks}

[[operations]]
include-path = "/readyz"
checks.not_a_server_error.expected-statuses = ["2xx", "4xx", "503"]

[[operations]]
include-path = "/v1/incidents/stream"
enabled = false
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fuzzed:
    """What came of a run. `cases` are requests that were made up; some take more than one."""

    cases: int
    failures: str


def fuzz(url: str, folder: Path, *, seed: int, examples: int, phases: str) -> Fuzzed:
    """Every operation of the document, `examples` times at most."""
    config = folder / "schemathesis.toml"
    config.write_text(CONFIG.format(checks="\n".join(f"{check}.enabled = true" for check in CHECKS)))
    command = [SCHEMATHESIS, "--config-file", str(config), "run", f"{url}/openapi.json", "--no-color"]
    command += ["--seed", str(seed), "--max-examples", str(examples), "--phases", phases]
    command += ["--generation-database", "none", "--warnings", "off", "--continue-on-failure"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=folder, check=False)
    found = re.search(r"(\d+) generated", done.stdout)
    return Fuzzed(
        cases=int(found[1]) if found else 0, failures=done.stdout + done.stderr if done.returncode or not found else ""
    )
