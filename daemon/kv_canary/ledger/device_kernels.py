"""The page state machine as one Triton kernel: what `transitions.PageTable` does in a dozen torch operations.

Importing this module imports triton; nothing is compiled before the first launch. Parameters have annotations only
where Triton has to be told a type (it reads those that are there).

One program does a whole call, in phases with a barrier between them, so that a page that occurs more than once in a
call is treated as in the reference, where every operation is done for all pages before the next one begins:

1. *elect*: of the places where a page occurs the last one leads. Owners are counted, once a place.
2. *judge*: everything that is flagged, once a place, from columns that are not written in this phase.
3. *write*: the leader alone writes its page, so generations are raised once, and of several identities or owners the
   last one stays.

Where the order of places does not matter: counting (atomic additions commute); `free` and the marks, which write the
same at each place. Where it is left open: which of several culprits of one reason is kept for a page.

A state is written before the generation is raised: who reads a raised generation finds no state from before.
"""

import triton
import triton.language as tl

from kv_canary.ledger import states
from kv_canary.ledger.states import Reason

UNKNOWN, OPEN, SEALED = tl.constexpr(states.UNKNOWN), tl.constexpr(states.OPEN), tl.constexpr(states.SEALED)
FREE, LOADING = tl.constexpr(states.FREE), tl.constexpr(states.LOADING)
TWO_OWNERS = tl.constexpr(int(Reason.TWO_OWNERS))
WRITE_TO_SEALED = tl.constexpr(int(Reason.WRITE_TO_SEALED))
WRITE_TO_FREE = tl.constexpr(int(Reason.WRITE_TO_FREE))
WRITE_TO_FOREIGN = tl.constexpr(int(Reason.WRITE_TO_FOREIGN))
SEAL_OF_FREE = tl.constexpr(int(Reason.SEAL_OF_FREE))
CLAIM_OF_OPEN = tl.constexpr(int(Reason.CLAIM_OF_OPEN))
CLAIM_OF_FREE = tl.constexpr(int(Reason.CLAIM_OF_FREE))
CLAIM_OF_LOADING = tl.constexpr(int(Reason.CLAIM_OF_LOADING))
CLAIM_IDENTITY = tl.constexpr(int(Reason.CLAIM_IDENTITY))
CLAIMED_NEVER_SEALED = tl.constexpr(int(Reason.CLAIMED_NEVER_SEALED))
RELEASE_WITHOUT_OWNER = tl.constexpr(int(Reason.RELEASE_WITHOUT_OWNER))
FREE_TWICE = tl.constexpr(int(Reason.FREE_TWICE))
FREE_WHILE_OWNED = tl.constexpr(int(Reason.FREE_WHILE_OWNED))
MOVE_ONTO_USED = tl.constexpr(int(Reason.MOVE_ONTO_USED))
HELD_BUT_FREE = tl.constexpr(int(Reason.HELD_BUT_FREE))
HELD_BUT_OPEN = tl.constexpr(int(Reason.HELD_BUT_OPEN))
HELD_IDENTITY = tl.constexpr(int(Reason.HELD_IDENTITY))

EVENTS = ("allocate", "write", "seal", "claim", "reopen", "load", "adopt", "release", "free", "move", "hold", "forget")
LEFT_ROWS = {"seal": 2, "claim": 2, "adopt": 2, "free": 2, "move": 6}  # of `left`, see the kernel


@triton.jit
def _at(pages, place, count, page_total):
    """(page number, whether it is one); what is none is never used as an index."""
    page = tl.load(pages + place, mask=place < count, other=-1)
    there = (page >= 0) & (page < page_total)
    return tl.where(there, page, 0), there


@triton.jit
def _each(scalar, values, stride, place, there):
    """One value for all, or one a place: the other one is zero."""
    return scalar + tl.load(values + place * stride, mask=there, other=0)


@triton.jit
def _flag(reasons, culprits, violations, page, wrong, reason, culprit):
    nothing = tl.zeros_like(page)
    tl.store(reasons + page, nothing + reason, mask=wrong)
    tl.store(culprits + page, nothing + culprit, mask=wrong)
    tl.debug_barrier()  # who sees the count finds the reason
    tl.atomic_add(violations + page, wrong.to(tl.int32), mask=wrong)


# a number that is 1, or divisible by 16, and a pointer that is not, would otherwise be compiled for anew, on the
# engine's thread
@triton.jit(
    do_not_specialize=[
        "pages",
        "sources",
        "count",
        "page_total",
        "step",
        "given_owner",
        "given_owners_each",
        "owner_stride",
        "given_identity",
        "given_identities_each",
        "identity_stride",
        "given_holders",
        "given_holders_each",
        "holders_stride",
        "left",
    ]
)
def transition_kernel(
    pages,
    sources,
    count,
    page_total,
    step,
    given_owner: tl.int64,
    given_owners_each,
    owner_stride,
    given_identity: tl.int64,
    given_identities_each,
    identity_stride,
    given_holders,
    given_holders_each,
    holders_stride,
    left,
    state,
    generation,
    owners,
    owner,
    previous_owner,
    identity,
    claim_identity,
    written_step,
    changed_step,
    marks,
    claims_not_covered,
    violations,
    reasons,
    culprits,
    EVENT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Applies one event to `count` places of `pages` (int64), and, where it leaves work, writes `left`, int64 [rows,
    count]: the page numbers and their generations; for a move also the sources, theirs, and two rows for itself.

    Numbers that are no page of this space are left out; their generation is -1.
    """
    places = tl.arange(0, BLOCK)
    elects: tl.constexpr = EVENT != "free" and EVENT != "hold"
    if EVENT != "hold":
        for start in range(0, count, BLOCK):
            page, there = _at(pages, start + places, count, page_total)
            tl.store(marks + page, tl.zeros_like(page).to(tl.int32), mask=there)
        tl.debug_barrier()
        for start in range(0, count, BLOCK):
            place = start + places
            page, there = _at(pages, place, count, page_total)
            if elects:
                tl.atomic_max(marks + page, place + 1, mask=there, sem="relaxed")
            else:
                tl.atomic_add(marks + page, there.to(tl.int32), mask=there, sem="relaxed")
            if EVENT == "allocate":
                tl.atomic_add(owners + page, there.to(tl.int32), mask=there, sem="relaxed")
            if EVENT == "release":
                tl.atomic_add(owners + page, -there.to(tl.int32), mask=there, sem="relaxed")
        tl.debug_barrier()

    for start in range(0, count, BLOCK):
        place = start + places
        page, there = _at(pages, place, count, page_total)
        known = tl.load(state + page, mask=there, other=0)
        one = _each(given_owner, given_owners_each, owner_stride, place, there)
        if EVENT == "allocate":
            promised = tl.load(claim_identity + page, mask=there, other=0)
            wrong = there & (promised != 0)
            _flag(reasons, culprits, violations, page, wrong, CLAIMED_NEVER_SEALED, one)
            wrong = there & (tl.load(owners + page, mask=there, other=0) > 1)
            _flag(reasons, culprits, violations, page, wrong, TWO_OWNERS, one)
        if EVENT == "write" or EVENT == "load":
            _flag(reasons, culprits, violations, page, there & (known == SEALED), WRITE_TO_SEALED, one)
            _flag(reasons, culprits, violations, page, there & (known == FREE), WRITE_TO_FREE, one)
            held = tl.load(owner + page, mask=there, other=0)
            wrong = there & (known == OPEN) & (held != 0) & (held != one) & (one != 0)
            _flag(reasons, culprits, violations, page, wrong, WRITE_TO_FOREIGN, one)
        if EVENT == "write":
            tl.store(written_step + page, tl.zeros_like(page).to(tl.int32) + step, mask=there)
        if EVENT == "seal":
            _flag(reasons, culprits, violations, page, there & (known == FREE), SEAL_OF_FREE, 0)
            promised = tl.load(claim_identity + page, mask=there, other=0)
            told = _each(given_identity, given_identities_each, identity_stride, place, there)
            wrong = there & (known != FREE) & (promised != 0) & (told != 0) & (promised != told)
            held = tl.load(owner + page, mask=there, other=0)
            _flag(reasons, culprits, violations, page, wrong, CLAIM_IDENTITY, held)
        if EVENT == "claim":
            sealed_as = tl.load(identity + page, mask=there, other=0)
            told = _each(given_identity, given_identities_each, identity_stride, place, there)
            written = tl.load(written_step + page, mask=there, other=-1)
            changed = tl.load(changed_step + page, mask=there, other=-1)
            pending = there & (known == OPEN) & ((written == step) | (changed == step))
            wrong = there & (known == OPEN) & (pending == 0)
            _flag(reasons, culprits, violations, page, wrong, CLAIM_OF_OPEN, one)
            _flag(reasons, culprits, violations, page, there & (known == FREE), CLAIM_OF_FREE, one)
            _flag(reasons, culprits, violations, page, there & (known == LOADING), CLAIM_OF_LOADING, one)
            wrong = there & (known == SEALED) & (sealed_as != 0) & (told != 0) & (sealed_as != told)
            _flag(reasons, culprits, violations, page, wrong, CLAIM_IDENTITY, one)
            promised = tl.load(claim_identity + page, mask=there, other=0)
            wrong = pending & (promised != 0) & (told != 0) & (promised != told)
            _flag(reasons, culprits, violations, page, wrong, CLAIM_IDENTITY, one)
            open_question = (known == UNKNOWN) | ((known == SEALED) & ((sealed_as == 0) | (told == 0)))
            tl.atomic_add(claims_not_covered, tl.sum((there & open_question).to(tl.int64), axis=0), sem="relaxed")
            # owners are counted in the last phase, so this is their number from before
            unowned = tl.load(owners + page, mask=there, other=1) == 0
            leads = there & (tl.load(marks + page, mask=there, other=0) == place + 1)
            tl.store(owner + page, one, mask=leads & unowned)
        if EVENT == "reopen":
            _flag(reasons, culprits, violations, page, there & (known == FREE), WRITE_TO_FREE, 0)
        if EVENT == "release":
            wrong = there & (known != UNKNOWN) & (tl.load(owners + page, mask=there, other=0) < 0)
            _flag(reasons, culprits, violations, page, wrong, RELEASE_WITHOUT_OWNER, one)
        if EVENT == "free":
            twice = there & ((known == FREE) | (tl.load(marks + page, mask=there, other=0) > 1))
            _flag(reasons, culprits, violations, page, twice, FREE_TWICE, 0)
            wrong = there & (tl.load(owners + page, mask=there, other=0) > 0)
            held = tl.load(owner + page, mask=there, other=0)
            _flag(reasons, culprits, violations, page, wrong, FREE_WHILE_OWNED, held)
            wrong = there & (tl.load(claim_identity + page, mask=there, other=0) != 0)
            _flag(reasons, culprits, violations, page, wrong, CLAIMED_NEVER_SEALED, 0)
        if EVENT == "hold":
            held = tl.load(owner + page, mask=there, other=0)
            _flag(reasons, culprits, violations, page, there & (known == FREE), HELD_BUT_FREE, held)
            _flag(reasons, culprits, violations, page, there & (known == OPEN), HELD_BUT_OPEN, held)
            sealed_as = tl.load(identity + page, mask=there, other=0)
            told = _each(given_identity, given_identities_each, identity_stride, place, there)
            wrong = there & (known == SEALED) & (sealed_as != 0) & (told != 0) & (sealed_as != told)
            _flag(reasons, culprits, violations, page, wrong, HELD_IDENTITY, held)
        if EVENT == "move":
            held = tl.load(owner + page, mask=there, other=0)
            used = (known == SEALED) | (known == FREE) | ((held != 0) & (one != 0) & (held != one))
            _flag(reasons, culprits, violations, page, there & used, MOVE_ONTO_USED, one)
            source, whence = _at(sources, place, count, page_total)
            inside = place < count
            tl.store(left + 2 * count + place, tl.load(sources + place, mask=inside, other=0), mask=inside)
            # what travels, from before anything is written: the source may be another's target
            travels = whence & (tl.load(state + source, mask=whence, other=0) == SEALED)
            raised = tl.load(generation + source, mask=travels, other=-1)
            tl.store(left + 3 * count + place, raised, mask=inside)
            tl.store(left + 4 * count + place, travels.to(tl.int64), mask=inside)
            carried = tl.load(identity + source, mask=whence, other=0)
            tl.store(left + 5 * count + place, carried, mask=inside)
        if EVENT == "seal" or EVENT == "claim" or EVENT == "adopt" or EVENT == "free" or EVENT == "move":
            inside = place < count
            tl.store(left + place, tl.load(pages + place, mask=inside, other=0), mask=inside)
            tl.store(left + count + place, tl.load(generation + page, mask=there, other=-1), mask=inside)
    tl.debug_barrier()

    if EVENT == "move":  # a second reason for the same page comes after the first at every place
        for start in range(0, count, BLOCK):
            place = start + places
            page, there = _at(pages, place, count, page_total)
            travels = tl.load(left + 4 * count + place, mask=there, other=0) != 0
            carried = tl.load(left + 5 * count + place, mask=there, other=0)
            promised = tl.load(claim_identity + page, mask=there, other=0)
            wrong = there & travels & (promised != 0) & (carried != 0) & (promised != carried)
            held = tl.load(owner + page, mask=there, other=0)
            _flag(reasons, culprits, violations, page, wrong, CLAIM_IDENTITY, held)
        tl.debug_barrier()

    if EVENT != "hold":
        for start in range(0, count, BLOCK):
            place = start + places
            page, there = _at(pages, place, count, page_total)
            none = tl.zeros_like(page)
            zero = none.to(tl.int32)
            leads = there
            if elects:
                leads = there & (tl.load(marks + page, mask=there, other=0) == place + 1)
            held = tl.load(owner + page, mask=leads, other=0)
            one = _each(given_owner, given_owners_each, owner_stride, place, there)
            told = _each(given_identity, given_identities_each, identity_stride, place, there)
            if EVENT == "allocate":
                tl.store(previous_owner + page, held, mask=leads & (held != 0))
                tl.store(owner + page, one, mask=leads)
            if EVENT == "write" or EVENT == "load":  # not before every place has been judged by the owner from before
                opened = tl.load(state + page, mask=leads, other=0) == OPEN
                tl.store(owner + page, one, mask=leads & opened & (held == 0))
            if EVENT == "free":
                tl.store(previous_owner + page, held, mask=leads & (held != 0))
            if EVENT == "free" or EVENT == "forget":
                tl.store(owner + page, none, mask=leads)
                tl.store(owners + page, zero, mask=leads)
            if EVENT == "allocate" or EVENT == "reopen" or EVENT == "load" or EVENT == "forget":
                tl.store(identity + page, none, mask=leads)
            if EVENT == "allocate" or EVENT == "free" or EVENT == "forget" or EVENT == "adopt":
                tl.store(claim_identity + page, none, mask=leads)
            if EVENT == "adopt":
                holders = _each(given_holders, given_holders_each, holders_stride, place, there)
                tl.store(identity + page, told, mask=leads)
                tl.store(owner + page, one, mask=leads)
                tl.store(owners + page, holders.to(tl.int32), mask=leads)
            if EVENT == "release":
                remaining = tl.load(owners + page, mask=leads, other=0)
                leaves = leads & ((remaining <= 0) | (held == one))
                tl.store(previous_owner + page, held, mask=leaves & (held != 0))
                tl.store(owner + page, none, mask=leaves)
                tl.store(owners + page, zero, mask=leads & (remaining < 0))
            if EVENT == "claim":
                known = tl.load(state + page, mask=leads, other=0)
                written = tl.load(written_step + page, mask=leads, other=-1)
                changed = tl.load(changed_step + page, mask=leads, other=-1)
                promised = tl.load(claim_identity + page, mask=leads, other=0)
                waits = (known == OPEN) & ((written == step) | (changed == step)) & (promised == 0)
                tl.store(claim_identity + page, told, mask=leads & waits)
                tl.atomic_add(owners + page, there.to(tl.int32), mask=there, sem="relaxed")
            # which pages enter the state, and which one
            enters = leads
            entered = none
            if EVENT == "seal":
                enters = leads & (tl.load(state + page, mask=leads, other=0) != FREE)
                tl.store(identity + page, told, mask=leads)
                tl.store(claim_identity + page, none, mask=enters)
                entered = none + SEALED
            if EVENT == "move":
                enters = leads & (tl.load(left + 4 * count + place, mask=leads, other=0) != 0)
                carried = tl.load(left + 5 * count + place, mask=leads, other=0)
                tl.store(identity + page, carried, mask=enters)
                tl.store(claim_identity + page, none, mask=enters)
                entered = none + SEALED
            if EVENT == "adopt":
                entered = none + SEALED
            if EVENT == "allocate" or EVENT == "reopen":
                entered = none + OPEN
            if EVENT == "load":
                entered = none + LOADING
            if EVENT == "free":
                entered = none + FREE
            if EVENT == "forget":
                entered = none + UNKNOWN
            if EVENT != "write" and EVENT != "claim" and EVENT != "release":
                tl.store(state + page, entered.to(tl.uint8), mask=enters)
                tl.store(changed_step + page, zero + step, mask=leads)
            if EVENT == "allocate" or EVENT == "reopen" or EVENT == "load" or EVENT == "forget":
                tl.debug_barrier()
                tl.atomic_add(generation + page, leads.to(tl.int64), mask=leads)
