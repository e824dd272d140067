"""Counter-based randomness: a row's random numbers are a function of (seed, row, step), whatever else runs.

Philox 4x32-10 (Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011): the key is the
seed, the counter holds row and step. No state, so nothing to save for a resume and nothing that order could change.
"""

from __future__ import annotations

import secrets

_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_MASK = 0xFFFFFFFF
_ROUNDS = 10


def philox_4x32(counter: tuple[int, int, int, int], key: tuple[int, int]) -> tuple[int, int, int, int]:
    """Four random 32-bit words for a 128-bit ``counter`` and a 64-bit ``key``, both as 32-bit words."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        p0, p1 = _MULTIPLIERS[0] * c0, _MULTIPLIERS[1] * c2
        c0, c1, c2, c3 = (p1 >> 32) ^ c1 ^ k0, p1 & _MASK, (p0 >> 32) ^ c3 ^ k1, p0 & _MASK
        k0, k1 = (k0 + _WEYL[0]) & _MASK, (k1 + _WEYL[1]) & _MASK
    return c0, c1, c2, c3


def uniform(seed: int, row: int, step: int) -> float:
    """A number in [0, 1) with 53 random bits. ``seed`` and ``row`` count modulo 2^64, ``step`` modulo 2^32."""
    seed, row = seed % 2**64, row % 2**64
    high, low, _, _ = philox_4x32((row & _MASK, row >> 32, step & _MASK, 0), (seed & _MASK, seed >> 32))
    return ((high << 21) | (low >> 11)) * 2.0**-53


def draw_seed() -> int:
    """A fresh base seed for a job, from the system's randomness; 0 to 2^63 - 1. Keep it in the manifest."""
    return secrets.randbits(63)
