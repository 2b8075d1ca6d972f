"""The generator beyond its known answers: seeds of 64 bits, every word of a counter, and uniforms that never reach 0
or 1."""

import math

import numpy as np
import pytest

from ddtree.plugins import philox, sampling

from . import oracles


@pytest.mark.parametrize("seed", [0, 1, -1, 2**40 + 7, 2**63 - 1, -(2**63)])
def test_token_uniforms_are_those_of_scalar_philox(seed):
    positions, groups = np.array([0, 5, 2**20]), np.array([0, 3, 37983])
    uniforms = philox.token_uniforms(seed, positions, groups)  # [positions, groups, 4]
    for at, position in enumerate(positions.tolist()):
        for group_at, group in enumerate(groups.tolist()):
            words = oracles.philox((group, position, 0, 0), seed)
            assert uniforms[at, group_at].tolist() == [oracles.uniform(word) for word in words]


def test_uniforms_never_reach_0_or_1():
    # 4294967168 is the first word that rounds to 2^32 in float32.
    words = np.array([0, 1, 2**31, 4294967167, 4294967168, 2**32 - 1], np.uint64)
    uniforms = philox.uniform(words)
    assert uniforms.dtype == np.float32
    assert uniforms.min() > 0
    assert uniforms.max() < 1
    noise = philox.gumbel(uniforms)
    assert np.isfinite(noise).all()
    assert noise.max() == pytest.approx(-math.log(2.0**-33), abs=1e-6)  # the small uniforms keep their precision
    assert math.exp(noise.min() - noise.max()) > sampling._HOPELESS  # so no token that could win is left out


def test_coins_take_counters_that_tokens_do_not():
    for at, position in enumerate((0, 77)):
        words = oracles.philox((0, position, 1, 0), 123)
        assert philox.coins(123, np.array([0, 77]))[at].tolist() == [oracles.uniform(word) for word in words[:2]]


@pytest.mark.parametrize("vocab", [5, 4099, 9000, 30001])
def test_noise_drawn_ahead_is_that_of_its_position(vocab):
    """Small vocabularies draw many positions at once, large ones each on its own."""
    noise = sampling.TokenNoise(7, 100, 5, vocab)
    groups = np.arange(-(-vocab // 4))
    for index in (0, 1, 2, 4, 6):  # 6: further than announced
        expected = philox.token_uniforms(7, np.array([100 + index]), groups).ravel()[:vocab]
        assert np.array_equal(noise.at(index, np.ones(vocab, np.float32)), expected)
