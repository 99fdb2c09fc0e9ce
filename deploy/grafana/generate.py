"""Writes the dashboards beside this file: `python deploy/grafana/generate.py`, with `--check` only compares.

Needs `pip install grafana-foundation-sdk==0.0.21` (part of the `dev` extra).
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from fleet import fleet
from grafana_foundation_sdk.builders.dashboard import Dashboard
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from instance import instance

FOLDER = Path(__file__).with_name("dashboards")
DASHBOARDS = {"kv-canary-fleet.json": fleet, "kv-canary-instance.json": instance}


def as_text(built: Dashboard) -> str:
    """The dashboard's JSON. Its panels are numbered, or Grafana would do it and no link would last."""
    model = built.build()
    for number, panel in enumerate(model.panels or (), start=1):
        panel.id_val = number
    return json.dumps(model, cls=JSONEncoder, indent=2, sort_keys=True) + "\n"


def main(arguments: list[str]) -> int:
    if arguments not in ([], ["--check"]):
        print(f"usage: {Path(sys.argv[0]).name} [--check]", file=sys.stderr)
        return 2
    stale = []
    for name, build in DASHBOARDS.items():
        file, text = FOLDER / name, as_text(build())
        if not arguments:
            file.write_text(text, encoding="utf-8")
        elif not file.exists() or file.read_text(encoding="utf-8") != text:
            stale.append(str(file))
    if stale:
        print(f"not what generate.py makes: {', '.join(stale)}; run it without --check", file=sys.stderr)
    return 1 if stale else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
