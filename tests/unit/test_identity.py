"""Identities: what they depend on, and what they must not depend on."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kv_canary import identity as module
from kv_canary.identity import Prefix, salt_from, splitmix64_scalar
from kv_canary.identity_kernel import compiled_extend_each

COMPILED = compiled_extend_each()  # here: compiling takes longer than an example may
MASK = 2**64 - 1
TOKENS = st.lists(st.integers(0, 200_000), max_size=64)
SALTS = st.integers(0, MASK)
many = settings(max_examples=100, deadline=None)


def slow(tokens: list[int], salt: int = 0) -> list[int]:
    """The definition, one token at a time: the identity after each of them, as int64."""
    out = []
    value = splitmix64_scalar(salt)
    for count, token in enumerate(tokens, 1):
        value = (value * 0xD1342543DE82EF95 + splitmix64_scalar((token + 1) & MASK)) & MASK
        unsigned = splitmix64_scalar(value ^ (count * 0x9E3779B97F4A7C15 & MASK)) or 1
        out.append(unsigned - 2**64 if unsigned >= 2**63 else unsigned)
    return out


def fast(tokens: list[int], salt: int = 0, page_tokens: int = 1) -> list[int]:
    return Prefix.empty(salt).extended(tokens, page_tokens)[1].tolist()


@many
@given(tokens=TOKENS, salt=SALTS)
def test_identities_agree_with_the_definition(tokens: list[int], salt: int) -> None:
    assert fast(tokens, salt) == slow(tokens, salt)


@many
@given(tokens=st.lists(st.integers(-(2**63), 2**63 - 1), max_size=8))
def test_any_64_bit_token_id_is_taken(tokens: list[int]) -> None:
    assert fast(tokens) == slow(tokens)


@many
@given(tokens=TOKENS, cuts=st.lists(st.integers(0, 64), max_size=5), salt=SALTS)
def test_chunking_does_not_matter(tokens: list[int], cuts: list[int], salt: int) -> None:
    borders = sorted({0, len(tokens), *(cut for cut in cuts if cut < len(tokens))})
    prefix, found = Prefix.empty(salt), []
    for start, stop in pairwise(borders):
        prefix, identities = prefix.extended(tokens[start:stop], 1)
        found += identities.tolist()
    assert found == fast(tokens, salt)
    assert prefix == Prefix.empty(salt).extended(tokens, 1)[0]


@many
@given(tokens=TOKENS, page_tokens=st.sampled_from([1, 2, 3, 16]))
def test_page_size_does_not_matter_where_pages_end_together(tokens: list[int], page_tokens: int) -> None:
    whole = tokens[: len(tokens) - len(tokens) % page_tokens]
    assert fast(whole, page_tokens=page_tokens) == fast(whole)[page_tokens - 1 :: page_tokens]


@many
@given(tokens=st.lists(st.integers(0, 200_000), min_size=1, max_size=64), data=st.data())
def test_a_changed_token_changes_every_identity_from_there_on_and_none_before(
    tokens: list[int], data: st.DataObject
) -> None:
    place = data.draw(st.integers(0, len(tokens) - 1))
    other = data.draw(st.integers(0, 200_000).filter(lambda token: token != tokens[place]))
    before, after = fast(tokens), fast([*tokens[:place], other, *tokens[place + 1 :]])
    assert [left == right for left, right in zip(before, after, strict=True)] == [
        index < place for index in range(len(tokens))
    ]


@many
@given(tokens=st.lists(st.integers(0, 200_000), min_size=2, max_size=32, unique=True), data=st.data())
def test_order_matters(tokens: list[int], data: st.DataObject) -> None:
    left, right = data.draw(st.sets(st.integers(0, len(tokens) - 1), min_size=2, max_size=2))
    swapped = list(tokens)
    swapped[left], swapped[right] = swapped[right], swapped[left]
    assert fast(swapped)[-1] != fast(tokens)[-1]


@many
@given(tokens=st.lists(st.integers(0, 200_000), min_size=1, max_size=32), salts=st.sets(SALTS, min_size=2, max_size=2))
def test_the_salt_changes_every_identity(tokens: list[int], salts: set[int]) -> None:
    left, right = salts
    assert not set(fast(tokens, left)) & set(fast(tokens, right))


@pytest.mark.parametrize("token", [0, 1, -1, 50_000])
def test_position_matters(token: int) -> None:
    """A page of the same tokens is another page at every position."""
    identities = fast([token] * 4096, page_tokens=16)
    assert len(set(identities)) == 256


def test_an_identity_is_never_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    """0 means not known, so a hash that comes out as 0 is stored as 1."""
    monkeypatch.setattr(module, "splitmix64", lambda values: values * np.uint64(0))
    monkeypatch.setattr(module, "splitmix64_scalar", lambda value: 0)
    prefix, identities = Prefix.empty().extended([1, 2, 3, 4], 2)
    assert identities.tolist() == [1, 1]
    assert prefix.identity == 1


@many
@given(tokens=TOKENS, salt=SALTS)
def test_the_identity_of_a_prefix_is_that_of_its_last_page(tokens: list[int], salt: int) -> None:
    """Also bit for bit: an int64, which a ledger takes."""
    prefix, identities = Prefix.empty(salt).extended(tokens, 1)
    assert identities.dtype == np.int64
    if tokens:
        assert prefix.identity == identities[-1]
    assert np.array(prefix.identity, np.int64) == prefix.identity


def test_a_big_prompt_is_right_to_its_last_token() -> None:
    tokens = np.random.default_rng(0).integers(0, 200_000, 100_000).tolist()
    whole = Prefix.empty(3).extended(tokens, 100_000)[0]
    assert whole.identity == slow(tokens, 3)[-1]
    assert whole.length == 100_000


def test_a_prompt_that_is_no_whole_number_of_pages_is_refused() -> None:
    with pytest.raises(ValueError, match="17 tokens are no whole number of pages of 16"):
        Prefix.empty().extended(range(17), 16)


def test_no_tokens_change_nothing() -> None:
    prefix = Prefix.empty(5)
    same, identities = prefix.extended([], 16)
    assert same == prefix
    assert identities.shape == (0,)


def test_a_prefix_can_be_continued_in_two_ways() -> None:
    """Extending makes a new value and leaves the old one alone."""
    prefix, _ = Prefix.empty().extended([1, 2], 2)
    assert [prefix.extended([token], 1)[1][0] for token in (3, 4, 3)] == [slow([1, 2, t])[-1] for t in (3, 4, 3)]


def test_salts_depend_on_every_part_and_its_border() -> None:
    salts = [salt_from(), salt_from("a"), salt_from("a", "b"), salt_from("ab"), salt_from("b", "a"), salt_from("a", "")]
    assert salts[0] == 0
    assert len(set(salts)) == len(salts)
    assert all(0 <= salt <= MASK for salt in salts)


def test_identities_have_not_drifted() -> None:
    """The values travel between processes, so they are part of the interface."""
    assert fast([1, 2, 3, 4], 0, 2) == [-7363226264416797447, 3954090097539673747]
    assert fast([1, 2, 3, 4], salt_from("adapter"), 4) == [-8035789870070061431]


@given(
    st.integers(1, 40).flatmap(
        lambda size: st.lists(
            st.tuples(
                st.lists(st.integers(0, 2**31), max_size=50),
                st.lists(st.integers(0, 2**31), min_size=size, max_size=size),
            ),
            min_size=1,
            max_size=5,
        )
    )
)
def test_extending_many_prefixes_at_once_is_extending_each(sequences: list[tuple[list[int], list[int]]]) -> None:
    """In numpy and compiled."""
    prefixes = [Prefix.empty(index).extended(before, 1)[0] for index, (before, _) in enumerate(sequences)]
    expected = [prefix.extended(tokens, len(tokens)) for prefix, (_, tokens) in zip(prefixes, sequences, strict=True)]
    wanted = ([state for state, _ in expected], [found.tolist()[0] for _, found in expected])
    for extend_each in (module.extend_each, COMPILED):
        assert extend_each(prefixes, [tokens for _, tokens in sequences]) == wanted
    assert module.extend_each([], []) == ([], [])
