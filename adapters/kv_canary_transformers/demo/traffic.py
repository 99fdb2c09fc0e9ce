"""Traffic: requests that share prefixes, fork, are cancelled, and keep the cache under pressure.

Runs on its caller's thread.
"""

from __future__ import annotations

import random
import time
from dataclasses import dataclass, field
from typing import Any

from kv_canary_transformers.demo.engine import PAGE_TOKENS, VOCABULARY

_PREFIXES = 12
_CONCURRENCY_PER_PAGE = 0.14  # live requests hold about 9 pages each: a bit more than there is


@dataclass(slots=True)
class Traffic:
    """Keeps a manager busy.

    `pump` is called over and over; the same seed asks for the same things in the same order.
    """

    manager: Any
    pages: int
    seed: int = 0
    requests_finished: int = 0
    requests_cancelled: int = 0
    tokens_generated: int = 0
    _live: dict[str, float] = field(default_factory=dict)
    _random: random.Random = field(init=False)
    _prefixes: list[list[int]] = field(init=False)
    _count: int = 0

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)
        self._prefixes = [self._tokens(self._random.randint(2, 8) * PAGE_TOKENS) for _ in range(_PREFIXES)]

    @property
    def concurrency(self) -> int:
        return max(3, min(32, int(self.pages * _CONCURRENCY_PER_PAGE)))

    def pump(self, seconds: float = 0.05) -> None:
        """Tops up the live requests, takes one result if there is one within `seconds`, cancels what is due."""
        while len(self._live) < self.concurrency:
            self._ask()
        result = self.manager.get_result(timeout=seconds)
        if result is not None and result.is_finished():
            self._live.pop(result.request_id, None)
            self.requests_finished += 1
            self.tokens_generated += len(result.generated_tokens)
        now = time.monotonic()
        for request_id in [name for name, due in self._live.items() if due < now]:
            del self._live[request_id]
            self.manager.cancel_request(request_id)
            self.requests_cancelled += 1

    def _ask(self) -> None:
        choose = self._random
        prompt = choose.choice(self._prefixes) + self._tokens(choose.randint(1, 60))
        self._count += 1
        name = f"demo-{self._count}"
        kind = choose.random()
        children = choose.randint(1, 2) if kind < 0.15 else 0
        # a forking request is never cancelled: nobody could tell which of its children will still come
        cancel_at = time.monotonic() + choose.uniform(0.05, 1.0) if kind > 0.9 else float("inf")
        self.manager.num_return_sequences = 1 + children
        if self.manager.add_request(prompt, request_id=name, max_new_tokens=choose.randint(4, 48)) is None:
            raise RuntimeError("the engine takes no more requests")
        self._live[name] = cancel_at
        self._live.update({f"{name}__child#{child}": float("inf") for child in range(children)})

    def _tokens(self, count: int) -> list[int]:
        return [self._random.randrange(3, VOCABULARY) for _ in range(count)]
