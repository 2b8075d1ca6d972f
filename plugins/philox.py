"""Philox4x32-10, a counter-based random generator: the noise of a token depends on (seed, position, token) alone.

Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3" (SC 2011). NumPy, not torch: a draw is some
fifty operations on short arrays, and NumPy's cost of a call is a fifth of torch's.
"""

import numpy as np
from numpy.typing import NDArray

_MULTIPLIERS = np.array([[0xD2511F53], [0xCD9E8D57]], dtype=np.uint64)
_KEY_STEPS = np.array([[0x9E3779B9], [0xBB67AE85]], dtype=np.uint64)
_LOW_32 = np.uint64(0xFFFFFFFF)
_HIGH = np.uint64(32)
# Groups of four words worked on at a time, so that the intermediate arrays stay in a core's own cache.
_CHUNK = 4096


def philox4x32_10(counter: NDArray, key: NDArray) -> NDArray:
    """Ten rounds of Philox. ``counter`` [4, n] and ``key`` [2, n] or [2, 1], both uint64 that hold 32-bit words.

    Returns the four words, [4, n] uint64.
    """
    multiplied = np.stack((counter[0], counter[2]))  # [2, n]
    mixed = np.stack((counter[1], counter[3]))  # [2, n], only its low 32 bits count
    for _ in range(10):
        product = (multiplied * _MULTIPLIERS)[::-1]
        multiplied = ((product >> _HIGH) ^ mixed ^ key) & _LOW_32
        mixed = product
        key = (key + _KEY_STEPS) & _LOW_32
    mixed = mixed & _LOW_32
    return np.stack((multiplied[0], mixed[0], multiplied[1], mixed[1]))


def uniform(words: NDArray) -> NDArray:
    """Words of the generator as float32 in (0, 1): ``min((r + 0.5) * 2^-32, 1 - 2^-24)``, so that no coin is 0 or 1."""
    return np.minimum((words.astype(np.float32) + np.float32(0.5)) * np.float32(2.0**-32), np.float32(1 - 2.0**-24))


def token_uniforms(seeds: NDArray, positions: NDArray, groups: NDArray) -> NDArray:
    """The uniform of tokens 4g .. 4g+3: float32 [n, 4] for ``seeds`` and ``positions`` and ``groups`` g, int64 [n]."""
    parts = []
    for start in range(0, groups.size, _CHUNK):
        part = slice(start, start + _CHUNK)
        group = groups[part].astype(np.uint64)
        zero = np.zeros_like(group)
        counter = np.stack((group, positions[part].astype(np.uint64), zero, zero))
        parts.append(uniform(philox4x32_10(counter, split_seed(seeds[part]))).T)
    return np.concatenate(parts)


def coins(seeds: NDArray, positions: NDArray) -> NDArray:
    """The two coins of method target_only at each position, float32 [n, 2]: accept, and residual draw."""
    zero = np.zeros(positions.size, dtype=np.uint64)
    counter = np.stack((zero, positions.astype(np.uint64), zero + np.uint64(1), zero))
    return uniform(philox4x32_10(counter, split_seed(seeds))[:2]).T


def split_seed(seeds: NDArray) -> NDArray:
    """64-bit seeds, int64 [n], as Philox keys: low and high word, uint64 [2, n]."""
    bits = seeds.astype(np.uint64)
    return np.stack((bits & _LOW_32, bits >> _HIGH))


def gumbel(uniforms: NDArray) -> NDArray:
    """Gumbel noise ``-log(-log1p(-u))``, float32.

    Small u are the ones that win; log1p keeps their full precision. The logarithms are taken in float64, because a
    float32 vector logarithm may round the same u differently at another place of an array.
    """
    return -np.log(-np.log1p(-uniforms.astype(np.float64))).astype(np.float32)
