"""Philox4x32-10, a counter-based random generator: the noise of a token depends on (seed, position, token) alone.

Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3" (SC 2011). NumPy, not torch: the ten rounds
are some fifty operations on short arrays, and a NumPy call costs a fifth of a torch operation.
"""

import numpy as np
from numpy.typing import NDArray

_MULTIPLIERS = np.array([[0xD2511F53], [0xCD9E8D57]], np.uint64)
_KEY_STEPS = np.array([[0x9E3779B9], [0xBB67AE85]], np.uint64)
_LOW_32 = np.uint64(0xFFFFFFFF)
_HIGH = np.uint64(32)
# So many that the arrays of a round stay in a core's own cache: twice as fast for a large vocabulary.
_COUNTERS_AT_ONCE = 8192


def philox4x32_10(counter: NDArray, key: NDArray) -> NDArray:
    """The four random words of each counter.

    Args:
        counter: uint64 [4, n], values below 2^32.
        key: uint64 [2, 1] or [2, n], values below 2^32.

    Returns:
        uint64 [4, n], values below 2^32.
    """
    round_keys = (key + _KEY_STEPS * np.arange(10, dtype=np.uint64)[:, None, None]) & _LOW_32  # [10, 2, n or 1]
    even = counter[::2].copy()  # words 0 and 2, which are multiplied
    odd = counter[1::2].copy()  # words 1 and 3; bits above the 32nd do not matter here
    product, high = np.empty_like(even), np.empty_like(even)
    for round_key in round_keys:
        np.multiply(even, _MULTIPLIERS, out=product)
        crossed = product[::-1]  # word 0 of the next round comes from the product of word 2, and the reverse
        np.right_shift(crossed, _HIGH, out=high)
        np.bitwise_xor(odd, round_key, out=odd)
        np.bitwise_xor(odd, high, out=even)
        np.bitwise_and(even, _LOW_32, out=even)
        odd, product = crossed, odd
    words = np.empty_like(counter)
    words[::2] = even
    words[1::2] = odd & _LOW_32
    return words


def uniform(words: NDArray) -> NDArray:
    """Random words as float32 in (0, 1): ``min((r + 0.5) * 2^-32, 1 - 2^-24)``, so that none is 0 or 1."""
    return np.minimum((words.astype(np.float32) + np.float32(0.5)) * np.float32(2.0**-32), np.float32(1 - 2.0**-24))


def token_uniforms(seed: int, positions: NDArray, groups: NDArray) -> NDArray:
    """The uniforms of tokens 4g .. 4g+3 for every position p and group g: float32 [positions, groups, 4].

    The counter of token v is (v // 4, p, 0, 0), and word v % 4 is taken.
    """
    uniforms = np.empty((positions.size, groups.size, 4), np.float32)
    step = max(1, _COUNTERS_AT_ONCE // positions.size)
    for start in range(0, groups.size, step):
        part = groups[start : start + step]
        counter = np.zeros((4, positions.size, part.size), np.uint64)
        counter[0] = part
        counter[1] = positions[:, None]
        words = philox4x32_10(counter.reshape(4, -1), seed_key(seed))
        uniforms[:, start : start + step] = uniform(words.T).reshape(positions.size, part.size, 4)
    return uniforms


def coins(seed: int, positions: NDArray) -> NDArray:
    """Method target_only's coins for the token at each position, float32 [positions, 2]: to accept a child, and to draw
    from what is left.

    The counter is (0, position, 1, 0), words 0 and 1.
    """
    counter = np.zeros((4, positions.size), np.uint64)
    counter[1] = positions
    counter[2] = 1
    return uniform(philox4x32_10(counter, seed_key(seed))[:2].T)


def seed_key(seed: int) -> NDArray:
    """A 64-bit seed, signed or not, as a Philox key: low word, high word."""
    return np.array([[seed & 0xFFFFFFFF], [seed >> 32 & 0xFFFFFFFF]], np.uint64)


def gumbel(uniforms: NDArray) -> NDArray:
    """Gumbel noise ``-log(-log1p(-u))``, float64: the small u, which win, keep their full precision."""
    return -np.log(-np.log1p(-uniforms.astype(np.float64)))
