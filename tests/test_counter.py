"""Integer random bits: published vectors, and the two implementations against each other."""

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from protomodels_cli import counter

# The first outputs of SplitMix64 seeded with 1234567, as listed with the reference C code and on Rosetta Code.
PUBLISHED = [6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431, 16408922859458223821]


def test_published_vectors():
    assert counter.words(1234567, 0, 5).tolist() == PUBLISHED
    assert [counter.word(1234567, i) for i in range(5)] == PUBLISHED


@given(seed=st.integers(0, 2**64 - 1), start=st.integers(0, 2**40), count=st.integers(1, 20))
def test_any_part_of_the_stream_can_be_made_alone(seed, start, count):
    whole = counter.words(seed, start, count)
    assert whole.dtype == np.uint64
    assert whole.tolist() == [counter.word(seed, start + i) for i in range(count)]


@given(seed=st.integers(0, 2**64 - 1), start=st.integers(0, 2**40), count=st.integers(1, 20))
def test_every_word_is_four_numbers_of_16_bits(seed, start, count):
    found = counter.quarters_on(seed, start, count, torch.device("cpu"))
    right = [counter.word(seed, i // 4) >> 16 * (i % 4) & 0xFFFF for i in range(start, start + count)]
    assert [n & 0xFFFF for n in found.tolist()] == right


def test_subseeds_differ_by_purpose_and_do_not_concatenate():
    seeds = [counter.subseed(0, "a"), counter.subseed(0, "b"), counter.subseed(1, "a"), counter.subseed(0, "a", 1)]
    assert len(set(seeds)) == 4
    assert counter.subseed(0, "epoch", 11) != counter.subseed(0, "epoch1", 1)
