"""What the verifier reads and finds: values, made by the canary thread."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy.typing as npt

from kv_canary.fingerprint.table import FingerprintArray
from kv_canary.snapshot import Persistence, StripeFinding


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """Fingerprints of some pages: uint64 [pages, stripes], and [pages, buffers] where those are taken as well."""

    stripes: FingerprintArray
    buffers: FingerprintArray | None

    def rows(self, chosen: npt.NDArray[Any]) -> Reading:
        return Reading(stripes=self.stripes[chosen], buffers=None if self.buffers is None else self.buffers[chosen])


@dataclass(frozen=True, slots=True, kw_only=True)
class Transfer:
    """What is wrong with a page that came back from a tier. `parts` differ from what left; one entry a buffer, or a
    stripe where that is all that is known. `missing`: buffers that the copy did not bring. `nothing_arrived`: the page
    holds what it held before. `other_tokens`: the engine took it for other tokens than those that left.
    """

    parts: tuple[StripeFinding, ...]
    missing: tuple[str, ...] = ()
    nothing_arrived: bool = False
    other_tokens: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """A confirmed difference on one page. `expected` and `found` have one entry for each of `stripes`."""

    page: int
    generation: int
    free: bool
    stripes: tuple[int, ...]
    expected: tuple[int, ...]
    found: tuple[int, ...]
    persistence: Persistence
    last_good: float | None
    transfer: Transfer | None = None
