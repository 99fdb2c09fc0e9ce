"""A model of the sequence lock on one page, small enough to try every order of steps.

The page is two words, written and read one after the other, so a read can see half of a write. Three parties take steps
in any order: the *engine* (its thread: raises the generation, launches writes, tells events), the *device* (carries out
launched writes in order, one word at a time) and the *canary* (applies events, fingerprints, verifies, confirms). An
optional *intruder* writes once without asking anybody, and an optional *glitch* makes one read say what is not there.

`explore` walks all reachable states and returns the first one that breaks a property, with the way there:

* no false alarm: without intruder and glitch nothing is ever reported;
* persistent means persistent: what is reported as such is really in memory;
* it sees: whenever memory differs from a valid baseline and no writer is under way, a verification that runs to its end
  alone reports it.

Each rule of the protocol can be left out (`without`), and then a property must break; so the model is no tautology.
Host order: generations are raised on the engine's thread and events are applied later. Stream order: raises, writes and
states are carried out by the device in the order in which they were launched, and the canary reads them from there.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, replace

OPEN, SEALED, FREE, UNKNOWN, LOADING = "open", "sealed", "free", "unknown", "loading"
ADMITTED = "admitted"  # told of a page that a tier filled: sealed, and to be held against what left
NEVER = -1

RULES = (
    "raise-first",  # 1: the generation is raised before a write is launched
    "look-again",  # 2: the generation is read again after the bytes
    "confirm",  # 3: a second read before anything is called persistent
    "seal-fence",  # 4: a seal waits for the writes launched before it
    "free-fence",  # 5: so does the fingerprint of a freed page
    "admit-fence",  # and a page that is held against its copy
    "epoch",  # while hooks are silent nothing is believed
    "applied-generation",  # pages are taken up late by the generation that their state belongs to
)


@dataclass(frozen=True, slots=True)
class State:
    """Everything there is. `queue` is what is launched and not done; `events` what is told and not applied."""

    # the engine
    phase: str = FREE
    live: int = 0
    version: int = 0  # of the newest write: its value
    budget: int = 0  # steps that the engine may still take
    owed_raise: bool = False  # rule 1 left out: the write is launched, the raise comes after
    hooks: bool = True
    toggles: int = 0
    # the device
    memory: tuple[int, int] = (0, 0)
    queue: tuple[tuple[str, int], ...] = ()
    launched: int = 0
    done: int = 0
    device_state: str = UNKNOWN
    # what the canary holds
    events: tuple[tuple[str, int, int, int], ...] = ()  # kind, generation, fence, the version that was loaded
    table: str = UNKNOWN
    applied: int = 0
    work: tuple[tuple[int, int, int], ...] = ()  # generation, fence, the version that was loaded, 0 for none
    baseline: tuple[int, int, int] = (NEVER, 0, 0)  # generation, words
    epoch: int = 0
    # what it is doing: name, generation, epoch, first word, second word, first reading
    doing: tuple[object, ...] = ()
    # the world
    intruder: int = 0
    glitches: int = 0
    report: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """Which order, which rule is left out, and how much may happen."""

    order: str = "host"
    without: str = ""
    steps: int = 6
    toggles: int = 0
    intruder: bool = False
    glitch: bool = False
    tiers: bool = False  # pages are also filled by copies of what left before

    def has(self, rule: str) -> bool:
        return self.without != rule

    def start(self) -> State:
        return State(
            budget=self.steps,
            toggles=self.toggles,
            intruder=int(self.intruder),
            glitches=int(self.glitch),
            queue=(),
        )

    def next(self, s: State) -> Iterator[tuple[str, State]]:
        yield from self._engine(s)
        yield from self._device(s)
        yield from self._canary(s)
        if s.intruder and s.phase == SEALED and not s.queue:
            yield "intruder writes", replace(s, intruder=0, memory=(s.memory[0], -7))

    # The engine

    def _engine(self, s: State) -> Iterator[tuple[str, State]]:
        if s.owed_raise:
            yield "raises late", replace(self._raise(s), owed_raise=False)
            return
        if s.toggles:
            yield from self._toggle(s)
        if not s.budget:
            return
        spent = replace(s, budget=s.budget - 1)
        if s.phase == FREE:
            opened = replace(spent, phase=OPEN)
            if not s.hooks:
                yield "allocates silently", opened
            elif self.has("raise-first"):
                yield "allocates", self._raise(opened)
            else:
                yield "allocates, and writes first", replace(self._write(opened), owed_raise=True)
        elif s.phase == OPEN:
            yield "launches a write", self._write(spent)
            yield "seals", self._tell(replace(spent, phase=SEALED), SEALED)
            yield "frees it half full", self._tell(replace(spent, phase=FREE), FREE)
            if self.tiers:
                yield "loads", self._load(replace(spent, phase=LOADING))
        elif s.phase == LOADING:
            yield "admits", self._tell(replace(spent, phase=SEALED), ADMITTED)
        elif s.phase == SEALED:
            yield "frees", self._tell(replace(spent, phase=FREE), FREE)

    def _toggle(self, s: State) -> Iterator[tuple[str, State]]:
        """Hooks fall silent, and later everything is told anew: generations are raised, states come from the tables."""
        used = replace(s, toggles=s.toggles - 1, epoch=s.epoch + 1)
        if s.hooks:
            yield "hooks fall silent", replace(used, hooks=False)
        else:
            live = s.live + 1
            told = () if s.phase in (OPEN, LOADING) else ((s.phase, live, s.launched, 0),)
            yield (
                "tells all anew",
                replace(
                    used, hooks=True, live=live, events=(("reset", live, 0, 0), *told), work=(), baseline=s.baseline
                ),
            )

    def _raise(self, s: State) -> State:
        if self.order == "stream":
            return replace(s, queue=(*s.queue, ("raise", 0)), launched=s.launched + 1)
        live = s.live + 1
        return replace(s, live=live, events=(*s.events, (OPEN, live, 0, 0)))

    def _load(self, s: State) -> State:
        """A copy into the page is a write, and needs the raise before it like any other."""
        if not s.hooks:
            return self._write(s)
        if self.has("raise-first"):
            return self._write(self._raise(s))
        return replace(self._write(s), owed_raise=True)

    def _write(self, s: State) -> State:
        version = s.version + 1
        queue = (*s.queue, ("first", version), ("second", version))
        return replace(s, version=version, queue=queue, launched=s.launched + 2)

    def _tell(self, s: State, kind: str) -> State:
        if not s.hooks:
            return s
        loaded = s.version if kind == ADMITTED else 0
        if self.order == "stream":
            return replace(s, queue=(*s.queue, (kind, loaded)), launched=s.launched + 1)
        return replace(s, events=(*s.events, (kind, s.live, s.launched, loaded)))

    # The device

    def _device(self, s: State) -> Iterator[tuple[str, State]]:
        if not s.queue:
            return
        (what, value), rest = s.queue[0], s.queue[1:]
        moved = replace(s, queue=rest, done=s.done + 1)
        if what == "first":
            yield f"{value} lands in the first word", replace(moved, memory=(value, s.memory[1]))
        elif what == "second":
            yield f"{value} lands in the second word", replace(moved, memory=(s.memory[0], value))
        elif what == "raise":
            yield "the raise is done", replace(moved, live=s.live + 1, device_state=OPEN)
        else:
            yield f"the page is {what}", replace(moved, device_state=what, work=(*s.work, (s.live, s.done, value)))

    # The canary

    def _canary(self, s: State) -> Iterator[tuple[str, State]]:
        if s.report:
            return
        if s.doing:
            yield from self._go_on(s)
            return
        if s.events:
            yield "applies an event", self._apply(s)
        if s.work:
            (generation, fence, loaded), rest = s.work[0], s.work[1:]
            if s.done >= fence:
                begun = replace(s, work=rest)
                if self._reads(s) and s.live == generation != s.baseline[0]:
                    doing = ("admit", generation, s.epoch, None, None, (loaded, None)) if loaded else None
                    begun = replace(begun, doing=doing or ("take", generation, s.epoch, None, None, None))
                yield "takes work", begun
        elif self._reads(s) and self.order == "host" and s.table in (SEALED, FREE):
            generation = s.applied if self.has("applied-generation") else s.live
            if s.live == generation != s.baseline[0]:
                yield "takes the page up", replace(s, doing=("take", generation, s.epoch, None, None, None))
        if self._reads(s) and s.baseline[0] == s.live:
            yield "begins to verify", replace(s, doing=("verify", s.live, s.epoch, None, None, None))

    def _reads(self, s: State) -> bool:
        return s.hooks or not self.has("epoch")

    def _apply(self, s: State) -> State:
        (kind, generation, fence, loaded), rest = s.events[0], s.events[1:]
        if kind == "reset":
            return replace(s, events=rest, table=UNKNOWN, applied=generation)
        if kind == OPEN:
            return replace(s, events=rest, table=OPEN, applied=generation)
        rule = {SEALED: "seal-fence", FREE: "free-fence", ADMITTED: "admit-fence"}[kind]
        work = (s.applied, fence if self.has(rule) else 0, loaded)
        return replace(s, events=rest, table=kind, work=(*s.work, work))

    def _go_on(self, s: State) -> Iterator[tuple[str, State]]:
        name, generation, epoch, first, second, reading = s.doing
        if first is None:
            yield "reads the first word", replace(s, doing=(name, generation, epoch, s.memory[0], None, reading))
        elif second is None:
            yield "reads the second word", replace(s, doing=(name, generation, epoch, first, s.memory[1], reading))
            if s.glitches and name == "verify":
                glitched = replace(s, glitches=0)
                yield (
                    "reads a second word that is not there",
                    replace(glitched, doing=(name, generation, epoch, first, -9, reading)),
                )
        else:
            yield "looks at the generation again", self._conclude(replace(s, doing=()), s)

    def _conclude(self, ended: State, s: State) -> State:
        name, generation, epoch, first, second, reading = s.doing
        if self.has("look-again") and s.live != generation:
            return ended
        if self.has("epoch") and (s.epoch != epoch or not s.hooks):
            return ended
        words = (first, second)
        if name == "take":
            return replace(ended, baseline=(generation, *words))  # type: ignore[arg-type]
        if name in ("admit", "transfer"):
            return self._judge(ended, s)
        expected = s.baseline[1:]
        if name == "verify" and words != expected:
            if self.has("confirm"):
                return replace(ended, doing=("confirm", generation, epoch, None, None, words))
            return replace(ended, report="persistent" if s.memory == words else "persistent, though memory is right")
        if name == "confirm":
            if words == reading:
                return replace(ended, report="persistent")
            return replace(ended, report="transient" if words == expected else "changing")
        return ended

    def _judge(self, ended: State, s: State) -> State:
        """A page that was loaded is held against what left; right or wrong, that is its baseline."""
        name, generation, epoch, first, second, (loaded, reading) = s.doing  # type: ignore[misc]
        words, expected = (first, second), (loaded, loaded)
        held = replace(ended, baseline=(generation, *expected))  # type: ignore[arg-type]
        if words == expected:
            return replace(held, report="transient") if name == "transfer" else held
        if name == "admit" and self.has("confirm"):
            return replace(ended, doing=("transfer", generation, epoch, None, None, (loaded, words)))
        return replace(held, report="persistent" if name == "admit" or words == reading else "changing")


@dataclass(frozen=True, slots=True, kw_only=True)
class Broken:
    """A property that does not hold, and the steps that lead there."""

    what: str
    way: tuple[str, ...]


def explore(model: Model) -> tuple[int, Broken | None]:
    """(states looked at, the first that breaks a property)."""
    start = model.start()
    came: dict[State, tuple[State, str] | None] = {start: None}
    ahead = deque([start])
    while ahead:
        state = ahead.popleft()
        if (what := _broken(model, state)) is not None:
            return len(came), Broken(what=what, way=_way(came, state))
        for step, after in model.next(state):
            if after not in came:
                came[after] = (state, step)
                ahead.append(after)
    return len(came), None


def _broken(model: Model, state: State) -> str | None:
    if state.report and not model.intruder and not model.glitch:
        return f"a false alarm: {state.report}"
    if state.report == "persistent, though memory is right":
        return "called persistent, and memory is right"
    if model.intruder and not state.report and not _is_seen(model, state):
        return "wrong bytes that a whole verification does not see"
    return None


def _is_seen(model: Model, state: State) -> bool:
    """Where a verification could begin now and memory is wrong, one that runs alone reports it."""
    idle = not (state.doing or state.queue or state.events or state.work or state.owed_raise)
    if not (idle and state.hooks and state.baseline[0] == state.live and state.memory != state.baseline[1:]):
        return True
    alone = replace(state, doing=("verify", state.live, state.epoch, None, None, None))
    while alone.doing:
        ((_, alone),) = [one for one in model._go_on(alone) if "not there" not in one[0]]
    return bool(alone.report)


def _way(came: dict[State, tuple[State, str] | None], state: State) -> tuple[str, ...]:
    steps: list[str] = []
    while (before := came[state]) is not None:
        state, step = before
        steps.append(step)
    return tuple(reversed(steps))
