"""The prefix hash beside every token slot equals the host's, however a sequence is cut and wherever its slots lie."""

from __future__ import annotations

import random

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kv_canary.identity import Prefix
from kv_canary.slot_chain import SlotChain, first_state

CPU = torch.device("cpu")
SLOTS = 512


def _int64(values: list[int]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64)


def _append(chain: SlotChain, parts: list[tuple[list[int], list[int], int, int]]) -> list[list[int]]:
    """One step: (slots, tokens, position of the first, state before) of each sequence; identities of each."""
    lengths = [len(slots) for slots, *_ in parts]
    identities = chain.append(
        _int64([slot for slots, *_ in parts for slot in slots]),
        _int64([token for _, tokens, *_ in parts for token in tokens]),
        _int64([first + n for slots, _, first, _ in parts for n in range(len(slots))]),
        _int64([before for *_, before in parts]),
        _int64(lengths),
        max(lengths),
    )
    return [part.tolist() for part in torch.split(identities, lengths)]


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), salts=st.lists(st.integers(0, 2**64 - 1), min_size=1, max_size=4))
def test_any_way_of_cutting_gives_the_identities_of_the_host(seed: int, salts: list[int]) -> None:
    source = random.Random(seed)
    chain = SlotChain(SLOTS, CPU, longest=4)  # small: the table of powers has to grow
    free = source.sample(range(1, SLOTS), SLOTS - 1)
    texts = [[source.randrange(0, 2**31) for _ in range(source.randrange(1, 60))] for _ in salts]
    slots: list[list[int]] = [[] for _ in salts]
    found: list[list[int]] = [[] for _ in salts]
    while any(len(done) < len(text) for done, text in zip(found, texts, strict=True)):
        parts, who = [], []
        for index, text in enumerate(texts):
            start = len(found[index])
            if start == len(text) or (source.random() < 0.3 and parts):
                continue
            count = source.choice([1, source.randrange(1, len(text) - start + 1)])
            fresh = [free.pop() for _ in range(count)]
            before = int(chain.state[slots[index][-1]]) if start else first_state(salts[index])
            parts.append((fresh, text[start : start + count], start, before))
            slots[index] += fresh
            who.append(index)
        if all(len(fresh) == 1 for fresh, *_ in parts):
            given_ = [_int64([part[place][0] for part in parts]) for place in (0, 1)]
            numbers = [_int64([part[place] for part in parts]) for place in (2, 3)]
            each = [[one] for one in chain.append_one(*given_, *numbers).tolist()]
        else:
            each = _append(chain, parts)
        for index, identities in zip(who, each, strict=True):
            found[index] += identities
    for salt, text, identities in zip(salts, texts, found, strict=True):
        assert identities == Prefix.empty(salt).extended(text, 1)[1].tolist()


def test_what_follows_an_unknown_token_is_unknown() -> None:
    chain = SlotChain(SLOTS, CPU)
    (known, unknown) = _append(chain, [([1, 2], [5, 6], 0, first_state(0)), ([3, 4], [5, 6], 10, 0)])
    assert all(known)
    assert unknown == [0, 0]
    assert chain.state[3:5].tolist() == [0, 0]
    after = chain.append_one(_int64([7]), _int64([9]), _int64([12]), chain.state[_int64([4])])
    assert after.tolist() == [0]


def test_forgetting_makes_every_slot_unknown() -> None:
    chain = SlotChain(SLOTS, CPU)
    _append(chain, [([1, 2], [5, 6], 0, first_state(3))])
    chain.forget()
    assert not chain.state.any()
