"""Methods that tests call inside the workers of a running server, over its development endpoint `/collective_rpc`."""

from __future__ import annotations

import gc
from typing import Any


class FaultInjection:
    """Mixed into vLLM's worker class (`--worker-extension-cls`)."""

    def canary_pages(self) -> dict[str, Any]:
        """Sealed pages with a fingerprint, and the layers of this rank."""
        from engine import sealed_pages

        guard = _guard()
        return {"rank": guard._rank, "pages": sealed_pages(guard), "layers": [b.layer for b in _buffers(guard)]}

    def canary_report(self, pages: int) -> dict[str, Any]:
        """What has been verified and found, when at least so many pages have been verified."""
        from engine import real_incidents, told, verify_at_least

        guard = _guard()
        snapshot = verify_at_least(guard, pages)
        counters = snapshot.groups[0].counters
        return {
            "verified": counters.verified_pages,
            "claims": counters.claims,
            "incidents": [told(one) for one in real_incidents(guard)],
        }

    def canary_wait(self, known: int) -> list[dict[str, Any]]:
        """Incidents behind the first `known`, as soon as there is one."""
        from engine import told, wait_for_incident

        return [told(one) for one in wait_for_incident(_guard(), known)]

    def canary_flip(self, rank: int, page: int, layer: int, byte: int, mask: int) -> bool:
        """Flips bits of one byte of a page on one rank."""
        from engine import flip, nobody_reading

        guard = _guard()
        if guard._rank != rank:
            return False
        buffer = next(one for one in _buffers(guard) if one.layer == layer)
        with nobody_reading(guard):
            for bit in range(8):
                if mask >> bit & 1:
                    flip(buffer, page, byte, bit)
        return True

    def canary_spoil(self, rank: int, page: int) -> bool:
        """Makes every number of a page's first layer far too big on one rank."""
        from engine import flip, nobody_reading

        guard = _guard()
        if guard._rank != rank:
            return False
        buffer = _buffers(guard)[0]
        with nobody_reading(guard):
            for byte in range(1, buffer.run_bytes, 2):
                flip(buffer, page, byte, bit=6)
        return True


def _guard() -> Any:
    from kv_canary_vllm.worker import WorkerGuard

    return next(found for found in gc.get_objects() if isinstance(found, WorkerGuard))


def _buffers(guard: Any) -> list[Any]:
    from engine import buffers_of

    return buffers_of(guard, "full")
