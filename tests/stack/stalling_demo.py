"""The demo, until SIGUSR1 makes every round of its canary thread fail: that thread gives up, and the engine goes on."""

from __future__ import annotations

import signal
import sys

from kv_canary.canary import Canary
from kv_canary_transformers.demo import main


def fail(_: Canary) -> float:
    raise RuntimeError("made to fail by SIGUSR1")


signal.signal(signal.SIGUSR1, lambda *_: setattr(Canary, "tick", fail))
sys.exit(main(sys.argv[1:]))
