"""Philox against its published vectors, and the uniform numbers made from it."""

from __future__ import annotations

import itertools

import pytest

from batchgen_lite.runtime.randomness import draw_seed, philox_4x32, uniform


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [  # known-answer vectors of the authors' Random123 library (kat_vectors, philox4x32 10)
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_published_vectors(
    counter: tuple[int, int, int, int], key: tuple[int, int], expected: tuple[int, int, int, int]
) -> None:
    assert philox_4x32(counter, key) == expected


def test_uniform_is_in_range_spread_and_distinct() -> None:
    numbers = [uniform(s, r, t) for s, r, t in itertools.product(range(20), range(20), range(20))]
    assert all(0 <= x < 1 for x in numbers)
    assert len(set(numbers)) == len(numbers)
    bins = [sum(1 for x in numbers if int(x * 16) == b) for b in range(16)]
    assert sum((n - 500) ** 2 / 500 for n in bins) < 44.3  # chi-square, 15 degrees of freedom, p = 1e-4


def test_uniform_depends_on_every_argument_even_beyond_32_bits() -> None:
    base = uniform(1, 2, 3)
    others = [uniform(2, 2, 3), uniform(1, 3, 3), uniform(1, 2, 4), uniform(1 + 2**32, 2, 3), uniform(1, 2 + 2**32, 3)]
    assert base not in others
    assert len(set(others)) == len(others)
    assert uniform(-1, 0, 0) == uniform(2**64 - 1, 0, 0)


def test_drawn_seeds_differ_and_fit() -> None:
    seeds = {draw_seed() for _ in range(50)}
    assert len(seeds) == 50
    assert all(0 <= seed < 2**63 for seed in seeds)
