"""A soak on a real continuous-batching engine: `python -m kv_canary_transformers.soak`. See `kv_canary.faults.soak`."""

from __future__ import annotations

import random
import sys
import threading
from contextlib import AbstractContextManager
from typing import Any

import torch

from kv_canary.faults.soak import main
from kv_canary.faults.soaked import Spoiled
from kv_canary.settings import Budget, Settings
from kv_canary.sidecar import Sidecar
from kv_canary_transformers.demo.engine import build_model
from kv_canary_transformers.demo.traffic import Traffic
from kv_canary_transformers.faults import Guarded

PAGES = 64


class EngineRig:
    """A manager on a pool that is too small, with traffic from a thread of its own."""

    name = "transformers"

    def __init__(self, seed: int) -> None:
        torch.set_num_threads(1)
        settings = Settings(enabled=True, budget=Budget(share=0.5), drill_interval=30.0)
        self._engine = Guarded(build_model(seed=seed), pages=PAGES, seed=seed, settings=settings)
        assert self._engine.sidecar is not None
        self.sidecar: Sidecar = self._engine.sidecar
        self._traffic = Traffic(self._engine.manager, pages=PAGES, seed=seed)
        self._stopping = threading.Event()
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="traffic", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            while not self._stopping.is_set():
                self._traffic.pump()
        except BaseException as error:  # noqa: BLE001 - handed to whoever stops it
            self._failure = error

    def paused(self) -> AbstractContextManager[object]:
        return self._engine.paused()

    def spoil(self, choose: random.Random) -> Spoiled | None:
        free = choose.random() < 0.5
        blocks = self._engine.free if free else self._engine.cached
        if not blocks:
            return None
        block, memory = choose.choice(blocks), self._engine.blocks
        start, mask = choose.randrange(memory.shape[1] - 8), choose.randrange(1, 256)
        size = choose.choice((1, 8))

        def change() -> None:
            memory[block, start : start + size] ^= mask

        change()
        return Spoiled(page=block, check="free_page" if free else "content", mend=change)

    def work_done(self) -> dict[str, int]:
        return {
            "requests_finished": self._traffic.requests_finished,
            "tokens_generated": self._traffic.tokens_generated,
        }

    def stop(self) -> None:
        self._stopping.set()
        self._thread.join()
        status: Any = self._engine.manager.background_thread_status
        failure = self._failure or status.fatal_error
        if self._engine.manager.is_running():
            self._engine.manager.stop(block=True, timeout=30, hard_stop=True, keep_for_next_session=False)
        if failure is not None:
            raise failure


if __name__ == "__main__":
    sys.exit(main(make_rig=EngineRig))
