"""One flipped bit is proved from two fingerprints and the words as they are now; nothing else passes for one."""

from __future__ import annotations

import os

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kv_canary.fingerprint import spec
from kv_canary.fingerprint.algebra import CHUNK_WORDS, fingerprint_of, single_flips, sum_of, unmix
from kv_canary.identity import splitmix64_scalar

u64 = st.integers(0, 2**64 - 1)


def words_of(count: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 2**64, count, dtype=np.uint64)


def fingerprint(words: np.ndarray) -> int:
    return spec.fingerprint_bytes([words.tobytes()])


def flips(before: np.ndarray, after: np.ndarray) -> list[tuple[int, int]]:
    return single_flips(after, fingerprint(before), fingerprint(after), 8 * len(after))


@given(value=u64)
def test_the_finaliser_is_undone(value: int) -> None:
    assert unmix(splitmix64_scalar(value)) == value
    assert splitmix64_scalar(unmix(value)) == value


@given(total=u64, length=st.integers(0, 2**40))
def test_the_sum_comes_back_from_a_fingerprint(total: int, length: int) -> None:
    assert sum_of(spec.finish(total, length), length) == total


@pytest.mark.parametrize("count", [1, 7, CHUNK_WORDS, CHUNK_WORDS + 3])
def test_the_fingerprint_of_words_at_hand_is_that_of_the_definition(count: int) -> None:
    words = words_of(count)
    assert fingerprint_of(words, 8 * count) == fingerprint(words)


@pytest.mark.parametrize("fill", ["random", "zeros", "ones"])
def test_every_bit_of_every_word_is_found_and_no_other(fill: str) -> None:
    before = {"random": words_of(40), "zeros": np.zeros(40, np.uint64), "ones": ~np.zeros(40, np.uint64)}[fill]
    for word in range(40):
        for bit in range(64):
            after = before.copy()
            after[word] ^= np.uint64(1) << np.uint64(bit)
            assert flips(before, after) == [(word, bit)]


def test_a_bit_behind_the_first_chunk_is_found() -> None:
    before = words_of(2 * CHUNK_WORDS + 11)
    for word in (0, CHUNK_WORDS - 1, CHUNK_WORDS, len(before) - 1):
        after = before.copy()
        after[word] ^= np.uint64(1) << np.uint64(63)
        assert flips(before, after) == [(word, 63)]


def test_no_change_is_no_flip() -> None:
    words = words_of(5)
    assert flips(words, words) == []


@given(word=st.integers(0, 15), bits=st.sets(st.integers(0, 63), min_size=2, max_size=5), seed=st.integers(0, 9))
def test_several_bits_of_one_word_are_not_called_one(word: int, bits: set[int], seed: int) -> None:
    before = words_of(16, seed)
    after = before.copy()
    for bit in bits:
        after[word] ^= np.uint64(1) << np.uint64(bit)
    assert flips(before, after) == []


def test_adjacent_bits_whose_weights_add_up_to_another_power_of_two_are_not_called_one() -> None:
    """01 -> 10 changes a word by the weight of its lowest bit, and is no flip of it."""
    for value in range(8):
        for change in (3, 6, 7, 5):
            for shift in (0, 13, 31, 32, 50, 61):
                before = np.full(9, value << shift & (1 << 64) - 1, np.uint64)
                after = before.copy()
                after[4] ^= np.uint64(change << shift & (1 << 64) - 1)
                if bin(int(before[4] ^ after[4])).count("1") > 1:
                    assert flips(before, after) == []


def test_one_bit_in_each_of_two_words_is_not_called_one() -> None:
    choose = np.random.default_rng(3)
    for _ in range(300):
        before = words_of(64, int(choose.integers(1 << 30)))
        after = before.copy()
        for word in choose.choice(64, 2, replace=False):
            after[word] ^= np.uint64(1) << np.uint64(choose.integers(64))
        assert flips(before, after) == []


def test_random_damage_is_not_called_one_bit() -> None:
    """The chance is 64 * words / 2^64 a time: KV_CANARY_TEST_DAMAGES more of them find none either."""
    choose, words = np.random.default_rng(4), words_of(2048)
    expected = fingerprint(words)
    for _ in range(int(os.environ.get("KV_CANARY_TEST_DAMAGES", "200"))):
        damaged = words.copy()
        count = int(choose.integers(1, 9))
        places = choose.choice(len(words), count, replace=False)
        damaged[places] = choose.integers(0, 2**64, count, dtype=np.uint64)
        assert single_flips(damaged, expected, fingerprint_of(damaged, 8 * len(words)), 8 * len(words)) == []
