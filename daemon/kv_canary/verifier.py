"""Verifier: seals, verifies and confirms the pages of one group. Used by the canary thread alone.

The confirm protocol, and why it is right:

1. A page is looked at only while its baseline is valid: the generation for which its fingerprint was taken is the live
   one.
2. The live generations are read, then the bytes, then the live generations again. The engine raises a generation before
   it launches anything that may write the page. So if the second reading equals the first, no legitimate write had been
   launched before the bytes were read, and a difference is nobody's right. If not, the result is dropped and counted as
   superseded.
3. A difference that survives is read a second time under the same rule: the same wrong bytes are `persistent`, the
   right ones `transient`, other wrong ones `changing`. Only then there is a finding.

Sealing follows rule 2 as well: the fingerprint of a page that moved on while it was read is thrown away.

Where ledger and fingerprints live on one device, a sweep goes by ranges: the device follows rule 1 and both halves of
rule 2 itself (`PageRanges`), and the host learns what came out of it.

`watch` is the gate's epoch: it changes whenever the engine's hooks fall silent, and a generation that nobody raises
proves nothing, so results across such a change are dropped too. It is None while they are silent: nothing is read then.
"""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter

import numpy as np
import numpy.typing as npt

from kv_canary.counters import Counters
from kv_canary.findings import Finding, Reading
from kv_canary.fingerprint.table import NEVER, Differences, FingerprintTable
from kv_canary.geometry import CanaryGroup
from kv_canary.ledger import FREE, SEALED, Ledger, Work
from kv_canary.snapshot import Persistence, Purpose

PageArray = npt.NDArray[np.int64]


class Verifier:
    """The baseline (what was sealed, for which generation, when last seen good), and the reads held against it."""

    def __init__(
        self,
        group: CanaryGroup,
        ledger: Ledger,
        table: FingerprintTable,
        *,
        buffers: FingerprintTable | None = None,
        place: int = 0,
        watch: Callable[[], int | None],
        monotonic: Callable[[], float],
        timer: Callable[[], float] = perf_counter,
    ) -> None:
        self.group = group
        self.ledger = ledger
        self.table = table
        self.buffers = buffers  # of a group whose pages travel: the same pages with a fingerprint for each buffer
        self.counters = Counters()
        self.place = place  # of the group among those that share the ledger's page numbers
        self._watch = watch
        self._monotonic = monotonic
        self._timer = timer
        self._sealed_generation = np.full(group.pages, NEVER, np.int64)
        self._ranges = table.ranges(ledger.columns)  # holds the same generations, on the device
        self._good_at = np.zeros(group.pages, np.float64)
        self._reported: dict[int, tuple[tuple[int, tuple[int, ...]], float]] = {}

    @property
    def nbytes(self) -> int:
        """Bytes of the baseline: fingerprints, generations and times."""
        each = len(self.group.stripes) + (len(self.group.buffers) if self.buffers is not None else 0)
        fingerprints = 8 * self.group.pages * each
        on_device = self._ranges.nbytes if self._ranges is not None else 0
        return fingerprints + self._sealed_generation.nbytes + self._good_at.nbytes + on_device

    def forget(self) -> None:
        """No baseline is valid any more."""
        self._sealed_generation[:] = NEVER
        if self._ranges is not None:
            self._ranges.forget()
        self._reported.clear()

    def _keep(self, pages: PageArray, generations: PageArray) -> None:
        self._sealed_generation[pages] = generations
        if self._ranges is not None:
            self._ranges.keep(pages, generations)

    # Sealing

    def missing(self, pages: PageArray, generations: PageArray) -> tuple[PageArray, PageArray]:
        """Those pages that still have these generations and no fingerprint for them; each once.

        A page that has one keeps it, when it is freed or sealed again too: there is no moment in which a late write
        could be blessed.
        """
        wanted = self.is_missing(pages, generations)
        pages, first = np.unique(pages[wanted], return_index=True)
        return pages, generations[wanted][first]

    def is_missing(self, pages: PageArray, generations: PageArray) -> npt.NDArray[np.bool_]:
        """Which of the pages `missing` would give."""
        wanted: npt.NDArray[np.bool_] = self._sealed_generation[pages] != generations
        wanted &= self.ledger.generations(pages) == generations
        wanted &= self.shapes(pages)  # the bytes of the others' pages are laid out in another way
        return wanted

    def shapes(self, pages: PageArray) -> npt.NDArray[np.bool_]:
        """Which of `pages` are laid out as this group's, now."""
        shaped = self.ledger.group_of(pages)
        return np.ones(len(pages), np.bool_) if shaped is None else shaped == self.place

    def move(self, work: Work) -> None:
        """Copies that the engine made: fingerprints travel from `sources` to `pages`."""
        if not self.group.stripes:
            return
        # a copy of a page that was not sealed leaves its target open: the engine goes on to write both
        travels = work.source_generations != NEVER
        known = travels & (self._sealed_generation[work.sources] == work.source_generations)
        sources, targets = work.sources[known], work.pages[known]
        self.table.store(targets, self.table.expected(sources))
        if self.buffers is not None:
            self.buffers.store(targets, self.buffers.expected(sources))
        self._keep(targets, work.generations[known])
        self._good_at[targets] = self._good_at[sources]
        # where the source's fingerprint is missing (its group was off) the copy is taken as it is now
        rest = travels & ~known
        self.take(*self.missing(work.pages[rest], work.generations[rest]))

    def seal_missing(self, start: int, stop: int) -> int:
        """Fingerprints sealed and free pages of a range that have none (the group was off when they were sealed)."""
        pages = self._range(start, stop)
        # of the generations that these states belong to: a live one may be ahead of them, with the page open again
        generations = self.ledger.applied_generations(start, stop)[pages - start]
        states = self.ledger.states(start, stop)[pages - start]
        kept = (states == SEALED) | (states == FREE)
        return self.take(*self.missing(pages[kept], generations[kept]))

    def take(self, pages: PageArray, generations: PageArray) -> int:
        """Fingerprints pages for these generations; those that move on meanwhile are dropped.

        Returns the bytes read.
        """
        if not self.group.stripes:
            return 0
        live = self.ledger.generations(pages) == generations
        pages, generations = pages[live], generations[live]
        watch, started = self._watch(), self._timer()
        if watch is None or not len(pages):
            return 0
        reading = self.read(pages)
        size = len(pages) * self.group.bytes_per_page
        self.counters.read("seal", size, self._timer() - started)
        stable = self.ledger.generations(pages) == generations
        if self._watch() != watch:
            stable[:] = False
        self.counters.superseded += int((~stable).sum())
        self.keep(pages[stable], generations[stable], reading.rows(stable))
        return size

    def read(self, pages: PageArray) -> Reading:
        """What the pages hold now; nothing is looked at before or after."""
        return Reading(
            stripes=self.table.read(pages), buffers=None if self.buffers is None else self.buffers.read(pages)
        )

    def keep(self, pages: PageArray, generations: PageArray, reading: Reading) -> None:
        """From now on these pages, at these generations, are to hold this."""
        self.table.store(pages, reading.stripes)
        if self.buffers is not None and reading.buffers is not None:
            self.buffers.store(pages, reading.buffers)
        self._keep(pages, generations)
        self._good_at[pages] = self._monotonic()
        self.counters.sealed_pages += len(pages)

    def kept(self, pages: PageArray) -> Reading:
        """What the pages were kept with last, for whatever generation that was (see `kept_for`)."""
        return Reading(
            stripes=self.table.expected(pages), buffers=None if self.buffers is None else self.buffers.expected(pages)
        )

    def kept_for(self, pages: PageArray) -> PageArray:
        """The generations that the fingerprints of `pages` belong to; -1 where there is none."""
        return self._sealed_generation[pages]

    def watch(self) -> int | None:
        """To be the same before and after a reading; None: nothing is to be read."""
        return self._watch()

    # Verifying

    def select(self, start: int, stop: int) -> PageArray:
        """Pages of a range that can be verified now."""
        start, stop = max(start, self.group.first_page), max(stop, self.group.first_page)
        valid = self._sealed_generation[start:stop] == self.ledger.generations_between(start, stop)
        return np.flatnonzero(valid) + start

    def verify(self, pages: PageArray, purpose: Purpose) -> list[Finding]:
        """Re-reads pages; what cannot be verified now is left out.

        Returns confirmed differences, known ones included.
        """
        generations = self.ledger.generations(pages)
        valid = self._sealed_generation[pages] == generations
        pages, generations = pages[valid], generations[valid]
        watch, started = self._watch(), self._timer()
        if watch is None or not len(pages):
            return []
        differences = self.table.verify(pages)
        self.counters.read(purpose, len(pages) * self.group.bytes_per_page, self._timer() - started)
        stable = self.ledger.generations(pages) == generations
        if self._watch() != watch:
            stable[:] = False
        self.counters.superseded += int((~stable).sum())
        self.counters.verified_pages += int(stable.sum())
        suspicious = np.zeros(len(pages), np.bool_)
        suspicious[differences.rows] = True
        self._good_at[pages[stable & ~suspicious]] = self._monotonic()
        suspicious &= stable
        if not suspicious.any():
            return []
        return self._confirm(
            pages[suspicious], generations[suspicious], watch, _first_look(differences, suspicious, pages)
        )

    @property
    def by_range(self) -> bool:
        """Whether the device picks the pages of a range itself (`verify_range`)."""
        return self._ranges is not None

    def verify_range(self, start: int, stop: int, purpose: Purpose) -> tuple[list[Finding], int]:
        """Re-reads those of the pages `start` .. `stop - 1` that can be verified now; nothing is asked to pick them.

        Returns confirmed differences, known ones included, and how many pages were read.
        """
        start = max(start, self.group.first_page)
        watch, started = self._watch(), self._timer()
        if self._ranges is None or watch is None or start >= stop:
            return [], 0
        outcome = self._ranges.verify(start, stop)
        self.counters.read(purpose, outcome.read_pages * self.group.bytes_per_page, self._timer() - started)
        stands = outcome.stands if self._watch() == watch else np.zeros(stop - start, np.bool_)
        verified = int(stands.sum())
        self.counters.superseded += outcome.read_pages - verified
        self.counters.verified_pages += verified
        suspicious = np.zeros(stop - start, np.bool_)
        suspicious[outcome.differences.rows] = True
        if outcome.complete:  # else a page that seems right may be one whose difference was left out
            self._good_at[start:stop][stands & ~suspicious] = self._monotonic()
        suspicious &= stands
        pages = np.arange(start, stop)
        wrong = pages[suspicious]
        if not len(wrong):
            return [], outcome.read_pages
        first = _first_look(outcome.differences, suspicious, pages)
        # they stood, so the live generation was that of the fingerprint
        return self._confirm(wrong, self._sealed_generation[wrong], watch, first), outcome.read_pages

    def _confirm(
        self, pages: PageArray, generations: PageArray, watch: int, first: dict[int, dict[int, int]]
    ) -> list[Finding]:
        started = self._timer()
        second = self.table.read(pages)
        self.counters.read("confirm", len(pages) * self.group.bytes_per_page, self._timer() - started)
        stable = self.ledger.generations(pages) == generations
        if self._watch() != watch:
            stable[:] = False
        self.counters.superseded += int((~stable).sum())
        expected = self.table.expected(pages)
        states = self._states(pages)
        findings = []
        for index in np.flatnonzero(stable):
            page = int(pages[index])
            wrong = {int(s): int(second[index, s]) for s in np.flatnonzero(second[index] != expected[index])}
            persistence: Persistence
            if wrong == first[page]:
                persistence = "persistent"
            elif not wrong:
                persistence = "transient"
            else:
                persistence = "changing"
            shown = wrong or first[page]
            good_at = float(self._good_at[page])
            findings.append(
                Finding(
                    page=page,
                    generation=int(generations[index]),
                    free=bool(states[index] == FREE),
                    stripes=tuple(sorted(shown)),
                    expected=tuple(int(expected[index, s]) for s in sorted(shown)),
                    found=tuple(shown[s] for s in sorted(shown)),
                    persistence=persistence,
                    last_good=good_at or None,
                )
            )
        return findings

    def is_news(self, finding: Finding) -> bool:
        """False when exactly this difference of this page has been reported, and the page was not seen good since;
        remembers it otherwise.
        """
        seen = (finding.generation, (*finding.stripes, *finding.found))
        if finding.persistence != "transient":
            before, when = self._reported.get(finding.page, (None, 0.0))
            if before == seen and (finding.last_good or 0.0) <= when:
                return False
            self._reported[finding.page] = seen, self._monotonic()
        return True

    def tamper(self, page: int, stripe: int, mask: int) -> int:
        """Xors a stored fingerprint (the canary's own data) and returns it as it was; a drill does and undoes it."""
        row = self.table.expected(np.array([page])).copy()
        before = int(row[0, stripe])
        row[0, stripe] = before ^ mask
        self.table.store(np.array([page]), row)
        return before

    def is_valid(self, page: int) -> bool:
        return bool(self._sealed_generation[page] == self.ledger.generations(np.array([page]))[0])

    # Age

    def oldest_age(self, start: int, stop: int) -> float:
        """Seconds since the page of a range that was verified longest ago was seen good; 0 without a valid page."""
        valid = self._sealed_generation[start:stop] == self.ledger.generations_between(start, stop)
        seen = self._good_at[start:stop].min(where=valid, initial=np.inf)
        return float(self._monotonic() - seen) if seen < np.inf else 0.0

    def is_older(self, pages: PageArray, seconds: float) -> npt.NDArray[np.bool_]:
        """Which of `pages` were not seen good in the last `seconds`."""
        older: npt.NDArray[np.bool_] = self._good_at[pages] < self._monotonic() - seconds
        return older

    def _range(self, start: int, stop: int) -> PageArray:
        return np.arange(max(start, self.group.first_page), max(stop, self.group.first_page), dtype=np.int64)

    def _states(self, pages: PageArray) -> npt.NDArray[np.uint8]:
        return self.ledger.states(0, self.group.pages)[pages]


def _first_look(
    differences: Differences, suspicious: npt.NDArray[np.bool_], pages: PageArray
) -> dict[int, dict[int, int]]:
    """What was found instead, by page and stripe, in the suspicious rows of `pages`."""
    first: dict[int, dict[int, int]] = {int(page): {} for page in pages[suspicious]}
    for row, stripe, found in zip(differences.rows, differences.stripes, differences.found, strict=True):
        if suspicious[row]:
            first[int(pages[row])][int(stripe)] = int(found)
    return first
