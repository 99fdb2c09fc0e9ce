"""The seam between the verifier and the devices: a table of expected fingerprints that can re-read its pages.

One table a canary group. It is used by the canary thread alone; page numbers come and fingerprints go as host arrays,
the pages' bytes stay where they are. `open_table` picks the implementation for the group's device; the concrete
backends are imported inside it, so that nothing is compiled or imported for a device that is not there.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from kv_canary.ledger.columns import PageColumns

PageArray = npt.NDArray[np.int64]
FingerprintArray = npt.NDArray[np.uint64]

NEVER = -1  # a generation that no page has


@dataclass(frozen=True, slots=True, kw_only=True)
class Differences:
    """Where `verify` found another fingerprint than the expected one; all arrays have one entry a (page, stripe).

    `rows` are positions in the array of pages that was verified.
    """

    rows: PageArray
    stripes: PageArray
    found: FingerprintArray


@dataclass(frozen=True, slots=True, kw_only=True)
class RangeOutcome:
    """What came out of the pages of a range. Rows are counted from its first page.

    `stands` (bool, one a page) is true for pages that were read, whole, while no legitimate writer existed: only for
    those a difference, or the absence of one, means something. `complete` is false if differences were left out.
    """

    read_pages: int
    stands: npt.NDArray[np.bool_]
    differences: Differences
    complete: bool


class PageRanges(Protocol):
    """Verifies ranges of a table whose ledger lives on the same device: the device picks the pages, by the ledger's
    columns and by the generations that fingerprints were taken for (the baseline), which it is told here.
    """

    @property
    def nbytes(self) -> int:
        """Of device memory that the baseline takes."""

    def keep(self, pages: PageArray, generations: PageArray) -> None:
        """The fingerprints of `pages` hold for these generations."""

    def forget(self) -> None:
        """No fingerprint holds any more."""

    def verify(self, first: int, stop: int) -> RangeOutcome:
        """Re-reads those of the pages `first` .. `stop - 1` whose fingerprint holds."""


class FingerprintTable(Protocol):
    """Expected fingerprints of one group, shape [pages, stripes], uint64, beside the memory they speak of."""

    backend: str

    def read(self, pages: PageArray) -> FingerprintArray:
        """Fingerprints of the bytes that are there now, shape [len(pages), stripes]. Writes nothing."""

    def verify(self, pages: PageArray) -> Differences:
        """Re-reads `pages` and returns only what differs from the table."""

    def expected(self, pages: PageArray) -> FingerprintArray:
        """Rows of the table."""

    def store(self, pages: PageArray, fingerprints: FingerprintArray) -> None:
        """Replaces rows of the table."""

    def words(self, page: int, stripe: int) -> FingerprintArray:
        """The words of a stripe of one page as they are now, its buffers in order: to look for a cause."""

    def synchronize(self) -> None:
        """Waits until nothing that was launched for this table runs any more."""

    def find(self, stripe: int, fingerprint: int) -> PageArray:
        """Pages that the table expects this fingerprint of (for the cause of a misdirected copy)."""

    def ranges(self, columns: PageColumns | None) -> PageRanges | None:
        """The way to verify ranges of pages that the device picks by these columns; None where there is none."""
